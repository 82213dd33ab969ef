"""The contract of a generator engine: what the worker loop asks of it, whichever library runs the model.

An engine generates for many requests at once. It is driven by one thread: `add` queues a request and returns at once,
`step` does a bounded amount of work and returns whatever finished. A request's own faults (a prompt that does not
fit, an adapter that cannot be read, logits that are not finite) come back as a `Finished` with `error`; they are never
raised and never touch another request.

Seeded requests are reproducible whatever else the engine is doing: every sequence has its own random generator, keyed
by (seed, sample index), and uses one uniform number per position: a request that goes on from prompt + partial sample
draws what would have been drawn.

Policies in flight: an adapter has a version, the number of optimizer steps that made it (`version_of` of
`workers.model.adapters.adapter`; the base model's is 0). Every token is labelled with the version whose logits it was
drawn from. `swap_adapter` moves running requests to newer weights between two steps, keeping their keys and values, as
soon as these weights have been read; `run_moved` tells the run's newest version, and stops sequences that have become
too old for their requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from weft.wire.binary.sample_codec import SequenceResult, TopkLogprobs

from store.blobs.contract import Weights

Logprobs = npt.NDArray[np.float32]
#: Token ids int64 and their logprobs float32, both [prompt - 1, k].
AltTokens = tuple[npt.NDArray[np.int64], Logprobs]
ErrorCategory = Literal["user", "server"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends.

    `max_tokens` None means up to the engine's context; 0 only computes the prompt. Temperature 0 takes the most
    probable token. `top_k` -1 (or 0) and `top_p` 1 keep every token; with both, top-k cuts first and top-p works on
    what is left, renormalised.
    A token that stops a sequence is kept as its last token: EOS (any of the model's, unless `stop_at_eos` is false)
    and `stop_token_ids` alike. A sequence also ends when its decoded text contains one of `stop_strings`, with special
    tokens spelled out or left out; the tokens which complete the string are kept.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_at_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TargetTokens:
    """Tokens whose logprobs are asked for: `ids[m]` instead of prompt token `rows[m] + 1`. `rows` ascend; id -1 asks
    for nothing and gets 0."""

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]


@dataclass(frozen=True)
class GenerateRequest:
    """`num_samples` continuations of one prompt.

    Keys and values of a prompt are reused only for prompts of the same `tenant`.
    `adapter` names the weights ("" is the base model); equal names are equal weights until `swap_adapter`. The first
    request with a name has the folder to read it from. `prompt_logprobs_last_n` limits `prompt_logprobs` and
    `topk_prompt_logprobs` to the last n prompt tokens; `prompt_alt_tokens_k` is the number of independent draws, at the
    request's temperature, to make instead of each prompt token after the first.

    `priority`: when slots or memory are short, a tenant's higher ones start first and its lower ones are set aside; it
    changes nothing else.
    `run` is the run whose policy is sampled, "" for none. With `max_staleness`, a sequence whose oldest token is more
    than that many versions below the run's (`run_moved`) ends there, `stale`, with the tokens it has.

    `return_routed_experts` asks which experts its tokens were routed to, in a mixture-of-experts model.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    num_samples: int = 1
    tenant: str = ""
    adapter: str = ""
    adapter_folder: Weights | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_tokens: TargetTokens | None = None
    prompt_alt_tokens_k: int = 0
    priority: int = 0
    run: str = ""
    max_staleness: int | None = None
    return_routed_experts: bool = False

    def most_tokens(self, context_tokens: int) -> int:
        """The most tokens that a sample may have. The last one is read by nobody, so it need not be in the context."""
        most = context_tokens - len(self.prompt) + 1
        return most if self.sampling.max_tokens is None else min(most, self.sampling.max_tokens)


@dataclass(frozen=True)
class Facts:
    """Tokens of a request, for metering: `prefill` prompt tokens were computed; `cached_prefill` were taken from
    memory, `cache_hit` of them from an earlier request, the others from another sample of this one."""

    prefill: int = 0
    cached_prefill: int = 0
    sample: int = 0
    cache_hit: int = 0


@dataclass(frozen=True)
class RequestError:
    """Why a request ended without a result. `elsewhere` says who may still serve it: an engine of another kind
    ("request"; "weights" when the adapter is the reason), any engine, because this one was lost or had no memory
    ("again"), or this one once its disk answers ("later"). `ran`: it was computed, and its user's own weights made it
    fail: it is billed."""

    message: str
    category: ErrorCategory
    elsewhere: Literal["", "request", "weights", "again", "later"] = ""
    ran: bool = False


@dataclass(frozen=True)
class Finished:
    """The end of a request: its sequences in sample order, or `error`.

    `logprobs[i]` of a sequence is that of `tokens[i]` under softmax(logits / temperature) over the whole vocabulary,
    before any top-k or top-p cut; with temperature 0 it is that of softmax(logits).
    The same holds of the tables in `topk`, which have min(k, vocabulary) columns.
    `prompt_logprobs` has one entry per prompt token, NaN for the first and for those not asked for. They and all else
    about the prompt are logprobs of the unscaled logits. `target_logprobs` has an entry for each of the target tokens.
    """

    id: str
    sequences: tuple[SequenceResult, ...] = ()
    prompt_logprobs: Logprobs | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_logprobs: Logprobs | None = None
    prompt_alt_tokens: AltTokens | None = None
    facts: Facts = Facts()
    error: RequestError | None = None


@dataclass(frozen=True)
class SoFar:
    """A sequence that is being drawn, as lists that grow: `policy` are (version, consecutive tokens drawn from it);
    `tops` is empty where no likeliest tokens are asked for."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[tuple[list[int], list[float]]]
    policy: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made, and what it holds now: `prefill_tokens` were computed, `cache_hit_tokens` found
    in the prefix cache. `slots_busy / slots_offered`, summed over decode steps, is the share of slots that worked while
    at least one did. `drafted_tokens` were tried beyond one for each sequence in a step, and `accepted_tokens` of them
    drawn; 0 if an engine tells nothing of it. `kv_tokens_used` of `kv_tokens` positions for keys and values are in
    use. `preempted` counts how often a sequence was set aside for lack of them, or of slots."""

    decode_steps: int = 0
    slots_busy: int = 0
    slots_offered: int = 0
    prefill_tokens: int = 0
    cache_hit_tokens: int = 0
    sampled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    running: int = 0
    waiting: int = 0
    adapters_loaded: int = 0
    adapter_bytes: int = 0
    kv_tokens: int = 0
    kv_tokens_used: int = 0
    preempted: int = 0


class Engine(Protocol):
    """Generates tokens from one base model, for all requests that were added and have not ended."""

    @property
    def free_slots(self) -> int:
        """Sequences that could start now, after those already waiting for a slot."""

    @property
    def yields(self) -> int:
        """Sequences that could start now although no slot is free, since others would be set aside for them: those of
        tenants that have few slots or none, or of a higher priority than others of their tenant."""

    @property
    def busy(self) -> bool:
        """True if `step` has something to do."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Requests start in the order they were added, except that one may wait a step or more for
        another to compute the head of its prompt, and for its adapter to be read, or others' to make room for it."""

    def step(self) -> list[Finished]:
        """Prefill what fits, advance every running sequence by a token, and return the requests that ended. Waits a
        moment when nothing has ended yet."""

    def cancel(self, request_id: str) -> Finished | None:
        """End a request now, with the tokens it has (stop reason "length"). None if there is no such request."""

    def so_far(self, request_id: str) -> list[SoFar]:
        """The sequences of a request that has not ended; empty from an engine that tells nothing before the end."""

    def swap_adapter(self, name: str, folder: Weights) -> None:
        """As soon as they have been read, `name` means the weights in `folder`: for running requests from their next
        token on, for requests added from now on from their first. Swaps of one name keep their order. When they cannot
        be read, running requests keep the old weights, and the next request's own folder is read."""

    def run_moved(self, run: str, version: int) -> None:
        """The newest policy of `run` is `version`: stop sequences that have become too old, whatever they sample."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """End threads and processes, whatever is running. The engine must not be used afterwards."""
