"""A sampler that gives scripted answers, and the built-in model's own tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoTokenizer
from weft.rl.chat.chat import Policy
from weft.rl.chat.render import TemplateRenderer
from weft.wire.binary.sample_codec import PolicySpan

from workers.model.tiny import TINY_PATH


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_PATH, local_files_only=True)


class Said:
    """A sampled sequence."""

    def __init__(self, tokens: list[int], stop_reason: str = "stop", version: int = 0, stale: bool = False) -> None:
        self.tokens, self.stop_reason, self.stale = tokens, stop_reason, stale
        self.tokens_np = tokens
        self.logprobs = [-0.5 - i for i in range(len(tokens))]
        self.sequence_id = "op:0"
        self.policy_versions = [PolicySpan(version, len(tokens))]
        self.routed_experts_np: Any = None


class Answer:
    prompt_cache_hit_tokens = 0

    def __init__(self, sequences: list[Said]) -> None:
        self.sequences = sequences


class Scripted:
    """A sampler that gives one answer after the other, whoever asks, and keeps the requests."""

    def __init__(self, *answers: str | Said) -> None:
        self.answers = list(answers)
        self.asked: list[list[int]] = []
        self.params: list[Any] = []
        self.more: list[dict[str, Any]] = []

    async def sample_async(self, prompt: Any, n: int, params: Any, **more: Any) -> Answer:
        self.asked.append(prompt.to_ints())
        self.params.append(params)
        self.more.append(more)
        return Answer([self._next() for _ in range(n)])

    def _next(self) -> Said:
        answer = self.answers.pop(0)
        return answer if isinstance(answer, Said) else Said(tokenizer().encode(answer + "<|im_end|>"))


def policy(*answers: str | Said, context: int = 2048) -> tuple[Policy, Scripted]:
    sampler = Scripted(*answers)
    return Policy(sampler, TemplateRenderer(tokenizer()), context), sampler
