"""Peers of the benches on the CPU, as their own users run them: peft on the toy of bench/trainer.py, and vLLM.

A peer gets the adapters that ours has: those of attention alone as they are, those of experts too as `weft download`
writes them, a pair for each expert, because neither can share a factor among them; the results have the number of
parameters of either. What peft offers for many adapters is all tried: a request at a time with its adapter beside the
base, the same with the adapter merged into the base for the request, and a batch in which each row names its adapter
(attention alone: peft refuses it for the parameters of experts).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from workers.model.adapters.adapter import Adapter
from workers.model.adapters.peft_format import write_export
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig

Parts = Literal["attention", "experts"]
#: What an adapter trains, in words for people.
PARTS: dict[Parts, str] = {"attention": "attention alone", "experts": "attention and experts"}


def shape_of(config: DecoderConfig, rank: int, parts: Parts) -> AdapterShape:
    return AdapterShape(config, rank, train_mlp=parts == "experts", train_unembed=False)


def transformers_config(config: DecoderConfig, **more: Any) -> Any:
    """The shape as a transformers config."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        num_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        moe_intermediate_size=config.moe_intermediate_size,
        max_position_embeddings=config.context_length,
        rope_theta=config.rope.theta,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **more,
    )


def transformers_model(config: DecoderConfig) -> Any:
    """A model of this shape in transformers, with its fastest expert path on a CPU."""
    from transformers import Qwen3MoeForCausalLM

    theirs = transformers_config(config)
    model = Qwen3MoeForCausalLM._from_config(theirs, experts_implementation="grouped_mm", attn_implementation="sdpa")
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    return model


def peft_model(config: DecoderConfig, adapters: Sequence[Adapter], folder: Path, *, trainable: bool = False) -> Any:
    return with_adapters(transformers_model(config), adapters, folder, trainable=trainable)


def with_adapters(model: Any, adapters: Sequence[Adapter], folder: Path, *, trainable: bool = False) -> Any:
    """The model with `adapters` loaded as a0, a1, ..., each from a file."""
    from peft import PeftModel

    for number, adapter in enumerate(adapters):
        place = folder / f"a{number}"
        arrays = {name: view.detach().numpy().copy() for name, view in adapter.views.items()}
        alpha, in_size = adapter.scale * adapter.rank, adapter.shape.in_size
        write_export(place, arrays, base_model="toy", rank=adapter.rank, alpha=alpha, in_size=in_size)
        place = place / "peft" if (place / "peft").is_dir() else place
        if number == 0:
            model = PeftModel.from_pretrained(model, place, adapter_name="a0", is_trainable=trainable)
        else:
            model.load_adapter(place, adapter_name=f"a{number}", is_trainable=trainable)
    return model


def adapter_parameters(config: DecoderConfig, rank: int) -> dict[str, dict[str, int]]:
    """The parameters of one adapter on either side."""
    written_out = AdapterShape(config, rank, train_unembed=False, shared=False)
    ours = {parts: shape_of(config, rank, parts).num_parameters for parts in PARTS}
    theirs = {"attention": ours["attention"], "experts": written_out.num_parameters}
    return {PARTS[parts]: {"ours": ours[parts], "peft": theirs[parts]} for parts in PARTS}


def generates(
    model: Any, prompts_NP: torch.Tensor, adapters: int, sampled: int, parts: Parts
) -> dict[str, tuple[int, Callable[[], None]]]:
    """By way of running: for how many prompts, and the call. Prompt n has adapter n modulo `adapters`."""
    from transformers import GenerationConfig

    model.eval()
    how = GenerationConfig(max_new_tokens=sampled, min_new_tokens=sampled, do_sample=True, pad_token_id=0)

    def generate(tokens_NP: torch.Tensor, **extra: Any) -> None:
        with torch.inference_mode():
            model.generate(
                input_ids=tokens_NP, attention_mask=torch.ones_like(tokens_NP), generation_config=how, **extra
            )

    def beside() -> None:
        for number in range(adapters):
            model.set_adapter(f"a{number}")
            generate(prompts_NP[number : number + 1])

    def merged() -> None:
        for number in range(adapters):
            model.set_adapter(f"a{number}")
            model.merge_adapter()
            generate(prompts_NP[number : number + 1])
            model.unmerge_adapter()

    def together() -> None:
        generate(prompts_NP, adapter_names=[f"a{n % adapters}" for n in range(len(prompts_NP))])

    ways: dict[str, tuple[int, Callable[[], None]]] = {"one by one": (adapters, beside), "merged": (adapters, merged)}
    return ways | {"one batch": (len(prompts_NP), together)} if parts == "attention" else ways


class VllmPeer:
    """bench/parts/vllm_peer.py in a process of its own, which is stopped between generations."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer("ready")
        os.killpg(process.pid, signal.SIGSTOP)

    @classmethod
    @contextmanager
    def of(cls, vllm: Path, model: Path, adapters: Path | None) -> Iterator[VllmPeer]:
        environment = {**os.environ, "PATH": f"{vllm.parent}:{os.environ.get('PATH', '')}", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"LD_PRELOAD": str(vllm.parents[1] / "lib" / "libiomp5.so"), "VLLM_LOGGING_LEVEL": "ERROR"}
        environment.pop("PYTHONPATH", None)  # it names this environment's packages
        command = [str(vllm.parent / "python"), str(Path(__file__).with_name("vllm_peer.py")), str(model)]
        command += ["--adapters", str(adapters)] if adapters else []
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True)
        try:
            yield cls(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def generate(self, prompts: Sequence[Sequence[int]]) -> float:
        """Generate; returns the seconds it took."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(json.dumps([list(prompt) for prompt in prompts]) + "\n")
        self._process.stdin.flush()
        took = float(self._answer("seconds")[0])
        os.killpg(self._process.pid, signal.SIGSTOP)
        return took

    def _answer(self, word: str) -> list[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.split()[:1] == [word]:
                return line.split()[1:]
        raise RuntimeError("vLLM ended; what it wrote says why")
