"""The options of vLLM that an operator may set ([generator.vllm.options]), by vLLM's own names, and what each does to
the numbers.

Whatever shares work between GPUs or guesses tokens ahead leaves log-probabilities what they are up to rounding. FP8
does not: what is trained on must have been drawn from nearly the weights that are trained, so adapters are declined
there unless the operator says otherwise. Options that are not in the table are refused: each that vLLM has may change
what Weft promises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: The effect of an option on log-probabilities: none but rounding; or those of other weights or keys.
Numbers = Literal["same", "others"]
#: Methods of speculation that need no second model, and were measured.
GUESSERS = ("ngram",)
#: The values of `quantization` for weights that are stored in bfloat16: vLLM rounds the weights as it loads them.
QUANTIZATIONS = ("fp8_per_tensor", "fp8_per_block")
#: Connectors that identify keys and values by vLLM's hashes of blocks, which include the organisation's salt and the
#: adapter.
CONNECTORS = ("OffloadingConnector",)
#: Connectors between a vLLM that prefills and one that decodes: they move the blocks that a request names, and no
#: others.
TRANSFERS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
#: The settings of such a connector that may be set.
OFFLOADING = {"cpu_bytes_to_use", "block_size", "blocks_per_chunk", "eviction_policy", "store_threshold"}
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


class BadOption(ValueError):
    """The message names the option, what was said, and what may be."""


@dataclass(frozen=True)
class Option:
    """`may_be` in words, for what `fits` does not take. `cpu`: vLLM does it on a CPU, too, with adapters."""

    may_be: str
    fits: Callable[[Any], bool]
    numbers: Numbers = "same"
    cpu: bool = False


def _count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _guesses(value: Any) -> bool:
    known = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
    return (
        isinstance(value, dict)
        and value.keys() <= known
        and value.get("method") in GUESSERS
        and all(_count(number) for name, number in value.items() if name != "method")
        and "num_speculative_tokens" in value
    )


def _offloads(value: Any) -> bool:
    """Whether this connector keeps organisations and adapters apart. Others (ExampleConnector) identify keys and values
    by tokens alone; and some settings of this one name modules to import, or other machines."""
    return (
        isinstance(value, dict)
        and value.keys() <= {"kv_connector", "kv_role", "kv_connector_extra_config"}
        and value.get("kv_connector") in CONNECTORS
        and value.get("kv_role") == "kv_both"
        and isinstance(extra := value.get("kv_connector_extra_config"), dict)
        and {"cpu_bytes_to_use"} <= extra.keys() <= OFFLOADING
        and all(isinstance(setting, int | str) for setting in extra.values())
    )


OPTIONS: dict[str, Option] = {
    "tensor_parallel_size": Option("a number of GPUs", _count, cpu=True),
    "data_parallel_size": Option("a number of copies, of tensor_parallel_size GPUs each", _count),
    "enable_expert_parallel": Option("true or false", lambda value: isinstance(value, bool)),
    "gpu_memory_utilization": Option(
        "more than 0 and less than 1", lambda value: isinstance(value, float) and 0 < value < 1
    ),
    "speculative_config": Option(f"a table with method ({' or '.join(GUESSERS)}) and num_speculative_tokens", _guesses),
    "kv_offloading_size": Option(
        "GiB of the host's memory", lambda value: type(value) in (int, float) and 0 < value < math.inf
    ),
    "kv_transfer_config": Option(
        f'a table with kv_connector ({" or ".join(CONNECTORS)}), kv_role = "kv_both" and kv_connector_extra_config: '
        f"cpu_bytes_to_use, and of {', '.join(sorted(OFFLOADING))} what you like. A vLLM that only prefills or only "
        "decodes is not started here, where each has all of a request: start such yourself (docs/vllm.md)",
        _offloads,
    ),
    "quantization": Option(" or ".join(QUANTIZATIONS), lambda value: value in QUANTIZATIONS, "others"),
    "kv_cache_dtype": Option(" or ".join(KV_DTYPES), lambda value: value in KV_DTYPES, "others", cpu=True),
}


@dataclass(frozen=True)
class Layout:
    """How one vLLM lies on its GPUs: `tensor` of them have a slice of each layer, `data` such groups have requests of
    their own. Experts are in slices over all of them or, with `by_expert`, whole on one each."""

    tensor: int = 1
    data: int = 1
    by_expert: bool = False

    @staticmethod
    def of(options: Mapping[str, Any]) -> Layout:
        return Layout(
            options.get("tensor_parallel_size", 1),
            options.get("data_parallel_size", 1),
            options.get("enable_expert_parallel", False),
        )

    @property
    def gpus(self) -> int:
        return self.tensor * self.data


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the names of the table. Raises BadOption."""
    found = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in found.items():
        option = OPTIONS.get(name)
        if option is None:
            raise BadOption(f"generator.vllm.options.{name} is not known here; known are {', '.join(OPTIONS)}")
        if not option.fits(value):
            given = json.dumps(value, default=str)  # TOML has dates, JSON does not
            raise BadOption(f"generator.vllm.options.{name} is {given}; it may be {option.may_be}")
    layout = Layout.of(found)
    if layout.by_expert and layout.gpus == 1:
        raise BadOption("generator.vllm.options.enable_expert_parallel: there is one GPU, which has all experts")
    return found


def words(options: Mapping[str, Any]) -> list[str]:
    """The options in the form of vLLM's command line."""
    said: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            said += [flag] if value else []
        else:
            said += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return said


def mixing_connector(options: Mapping[str, Any]) -> str:
    """For a vLLM that somebody else has started: the connector that is not known to keep organisations and adapters
    apart; "" if there is none."""
    name = str((options.get("kv_transfer_config") or {}).get("kv_connector") or "")
    return "" if name in CONNECTORS or name in TRANSFERS else name


def other_numbers(options: Mapping[str, Any]) -> str:
    """Which options make log-probabilities those of other weights or keys, for people; "" if none does."""
    changed = (n for n, v in options.items() if OPTIONS[n].numbers == "others" and v != "auto")
    return " and ".join(f"{name} = {options[name]}" for name in changed)
