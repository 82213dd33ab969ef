"""Makes `docs/compatibility.md` from `tests/compat/results.json`: `python -m tests.compat.page`.

The list of calls comes from the newest SDK itself, so the page also shows a method that no test calls."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable
from pathlib import Path

from tests.compat import loaders
from tests.compat.environments import ROOT
from tests.compat.tour import RESULTS
from tests.cookbook.recipes import RECIPES
from tests.rl_packages.environment import ENVIRONMENTS

PAGE = ROOT / "docs" / "compatibility.md"
SIGNS = {"ok": "yes", "fail": "**no**", "absent": "–"}
#: The sections of the page, and the prefixes of their calls' names.
PARTS = {
    "ServiceClient": "ServiceClient.",
    "TrainingClient": "TrainingClient.",
    "SamplingClient": "SamplingClient.",
    "RestClient and AdminClient": "RestClient.",
    "The `tinker` command": "tinker ",
}
SMOKE = Path(__file__).with_name("smoke")
#: Methods that send no request to a server, and those that the SDK itself calls.
LOCAL = {"get_telemetry", "get_console_url", "on_queue_state_change", "create"}

INTRODUCTION = """\
# Compatibility with Tinker's SDK and command line

Made by `make compat` from a tour of a real server, in which every version of the unmodified `tinker` package makes each
call from an environment of its own. The tour is `tests/compat/smoke`, whose file for each call is named beside it;
CI takes it with the versions marked *.

yes: the call works and its result was checked. –: that version does not have it. Every method has a deprecated `_async`
twin that sends the same; the last rows drive a loop of them.
"""

COOKBOOK_TITLE = """\
## The cookbook

Published recipes of `tinker_cookbook` 0.6.1 that `make cookbook` runs offline against a real server, with their own
code (`tests/cookbook`); CI runs those marked *. Each family of docs/models.md has one, on a small random model.
"""

PACKAGES_TITLE = """\
## Packages for RL

What `weft.rl` and the doors ([openai.md](openai.md)) are tried with on a real server, each row in an environment of its
own (`python -m tests.rl_packages.environment`, then `pytest tests/rl_packages`). Single-turn, multi-turn and tool
environments roll out and train: the first step's ratio is 1 within 1e-6, its mismatch KL at most 1e-8, the turns of a
rollout one datum. `openai` 3.x is what the tests of the door themselves use.
"""

LOADERS_TITLE = """\
## Downloads in transformers and PEFT

What stock PEFT makes of an adapter with experts and a trained unembedding that `weft download` fetched, by the folder's
own `verify.py` (`make loaders`; CI loads it with the newest, `make soak` with the pairs marked *, too). right: the
server's log-probabilities. **wrong**: others, without a word. –: it does not load, with an error. It is one of Qwen3
MoE, which has nothing but experts in its MLPs, as Mixtral and OLMoE. With transformers 5 peft 0.21 drops, without a
word, dense layers and shared experts beside experts (GLM-4.5, GLM-4.7-Flash, DeepSeek-V3, Qwen3-Next), and the experts
of Qwen3.5 MoE, gpt-oss and Nemotron.
"""
LOADER_SIGNS = {"right": "right", "wrong": "**wrong**", "refused": "–"}

VERSIONS_TITLE = """\
## What Weft stands on, oldest and newest

Tried by hand on 2026-11-28, on a CPU: both wheels installed outside of the checkout, a server that trained, sampled,
saved, answered a chat completion and passed `weftd doctor`; then tests. Python 3.14 was not to be had. On 3.12 the
oldest client, and on 3.12 and 3.13 the newest, trained, sampled, saved and listed runs on 2026-11-29. zstandard 0.22
has no wheel for 3.13: a newer one is taken there.
"""
#: Python, the versions, and the tests that ran with them.
VERSIONS = (
    (
        "3.11",
        "the oldest that the requirements admit together (`uv pip compile --resolution lowest-direct`): torch 2.11.0, "
        "transformers 5.17.0, pydantic 2.12.0, SQLAlchemy 2.0.36, Alembic 1.13.0, redis 6.4.0, Celery 5.6.0, "
        "stripe 16.0.0, FastAPI 0.165.0, openai 3.0.0, peft 0.21.0, click 8.2.0",
        "isolation, replay, kernels, decoder, engines, adapters, store, queues, jobs, payments, traces, HTTP API, "
        "OpenAI's door, `weftd`",
    ),
    (
        "3.11",
        "the same on 2026-11-29 from the checkout, but torch 2.13.0, prometheus-client 0.23.1; authlib 1.9.0, joserfc "
        "1.8.0, cryptography 45.0.1, httpx 0.27.0, OpenTelemetry 1.44.0",
        "a tour of tinker 0.38.0, `weftd doctor`, Prometheus, traces, connections, console without a browser, sign-in, "
        "object store, the official SDK's tests and OpenAI's end to end",
    ),
    (
        "3.13",
        "the newest of everything: torch 2.15.0 (CUDA's build), transformers 5.24.0, SQLAlchemy 2.1.9, pydantic 2.14.4",
        "with `-W error::DeprecationWarning`: isolation, replay, kernels, decoder, engines, losses, adapters, OpenAI's "
        "door, `weft.rl`, wire",
    ),
    (
        "3.11",
        "the client alone, without torch, its oldest: pydantic 2.9.0, httpx 0.27.0, numpy 1.26.0, protobuf 7.35.1, "
        "click 8.1.2, rich 13.0.0",
        "the client's own, those apart that need torch",
    ),
)


def page(results: dict[str, dict[str, str]], in_ci: Iterable[str]) -> str:
    """The whole page. `results`: `ok`, `fail` or `absent`, by version and call."""
    versions = sorted(results, key=lambda version: [int(part) for part in version.split(".")])
    calls = list(dict.fromkeys(call for version in reversed(versions) for call in results[version]))
    parts = [INTRODUCTION]
    for title, prefix in PARTS.items():
        rows = [call for call in calls if call.startswith(prefix)]
        parts.append(_table(title, sorted(rows), versions, results, set(in_ci)))
    rest = [call for call in calls if not call.startswith(tuple(PARTS.values()))]
    parts.append(_table("Everything else", rest, versions, results, set(in_ci)))
    parts.append(_recipes())
    parts.append(_packages())
    parts.append(_loaders())
    parts.append(_versions())
    return "\n".join(parts)


def _recipes() -> str:
    """The cookbook's recipes by name; `make cookbook` fails if one of them does not run."""
    lines = [f"- {recipe.name}" + (" \\*" if recipe.in_ci else "") for recipe in RECIPES]
    return "\n".join([COOKBOOK_TITLE, *lines, ""])


def _packages() -> str:
    rows = [f"| {', '.join(each.packages).replace('==', ' ')} | {each.proves} |" for each in ENVIRONMENTS.values()]
    return "\n".join([PACKAGES_TITLE, "| packages | what is tried |", "|---|---|", *rows, ""])


def _loaders() -> str:
    found = json.loads(loaders.RESULTS.read_text())
    lines = [LOADERS_TITLE, f"| transformers | {' | '.join(f'peft {peft}' for peft in loaders.PEFT)} |"]
    lines.append("|---" * (len(loaders.PEFT) + 1) + "|")
    for transformers, outcomes in found.items():
        signs = [
            LOADER_SIGNS[outcomes[peft]] + ("\\*" if (transformers, peft) in loaders.IN_CI else "")
            for peft in loaders.PEFT
        ]
        lines.append(f"| {transformers} | {' | '.join(signs)} |")
    return "\n".join(lines) + "\n"


def _versions() -> str:
    rows = [f"| {' | '.join(row)} |" for row in VERSIONS]
    return "\n".join([VERSIONS_TITLE, "| Python | versions | tests |", "|---|---|---|", *rows, ""])


def _table(
    title: str, calls: list[str], versions: list[str], results: dict[str, dict[str, str]], in_ci: set[str]
) -> str:
    heads = [version + ("\\*" if version in in_ci else "") for version in versions]
    lines = [f"## {title}", "", f"| call | {' | '.join(heads)} | test |", "|---" * (len(heads) + 2) + "|"]
    for call in calls:
        signs = [SIGNS[results[version].get(call, "absent")] for version in versions]
        lines.append(f"| {_shown(call)} | {' | '.join(signs)} | {driver(call)} |")
    return "\n".join(lines) + "\n"


def _shown(call: str) -> str:
    """A call's name, `Class.method: variant`, with the method shown as code."""
    name, colon, way = call.partition(": ")
    plain = " " in name and not name.startswith("tinker ")
    code = name if plain else f"`{name.split('.', 1)[-1]}`"
    return f"{code}: {way}" if colon else code


@functools.cache
def driver(call: str) -> str:
    """The file of the tour that makes this call."""
    method = call.partition(":")[0]
    told = call.removeprefix("tinker ")
    for text in (f'"{told}"', f'f"{method}: {{', f'"{method}"'):
        for path in sorted(SMOKE.glob("*.py")):
            if text in path.read_text():
                return path.name
    return ""


def undriven(calls: Iterable[str]) -> set[str]:
    """Public methods of the installed SDK that no call of the tour names."""
    import tinker
    from tinker.lib.public_interfaces.rest_client import RestClient

    driven = {call.partition(":")[0] for call in calls}
    missing = set()
    for owner in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient):
        for name, _ in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("_") and not name.endswith("_async") and name not in LOCAL:
                missing.add(f"{owner.__name__}.{name}")
    return missing - driven


def main() -> None:
    from tests.compat.environments import IN_CI

    PAGE.write_text(page(json.loads(Path(RESULTS).read_text()), IN_CI))


if __name__ == "__main__":
    main()
