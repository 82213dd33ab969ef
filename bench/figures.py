"""Tables of measured figures in docs/, made from bench/results.

    python bench/figures.py            # rewrites what stands between the marks

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`, with the command that measured it.
tests/bench/test_figures.py holds every document to it, so no figure is there that no command has made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from bench.tables import computing, losses, recovery, serving
from bench.tables.grids import claims

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    "training": computing.training,
    "training-peers": computing.training_peers,
    "through-api": lambda: claims("through_api"),
    "paging": lambda: claims("paging"),
    "path": lambda: claims("path"),
    "families": computing.families,
    "recurrences": computing.recurrences,
    "gpu": computing.on_gpu,
    "gpu-served": computing.gpu_served,
    "decoding": computing.decoding,
    "decoding-peers": computing.decoding_peers,
    "skyrl": computing.skyrl,
    "vllm": computing.vllm,
    "vllm-options": computing.vllm_options,
    "lookup": computing.lookup,
    "memory": serving.memory,
    "backfill": serving.backfill,
    "ledger": serving.ledger,
    "leader": serving.leader,
    "neighbour": serving.neighbour,
    "console": serving.console,
    "scale": lambda: claims("scale", "ranks", "layouts"),
    "simulated": serving.simulated,
    "simulated-trainers": serving.simulated_trainers,
    "mismatch": losses.mismatch,
    "mismatch-followed": losses.mismatch_followed,
    "async-rl": lambda: claims("async_rl"),
    "recovery-idle": recovery.pauses,
    "recovery-embedded": lambda: recovery.kills("embedded"),
    "recovery-production": lambda: recovery.kills("production"),
    "recovery-damage": recovery.damage,
}


def filled(text: str) -> str:
    """The document with new tables. Raises KeyError for an unknown table name."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match['name']]()}\n\n{match[3]}", text)


def main() -> None:
    for document in sorted(DOCS.glob("*.md")):
        document.write_text(filled(document.read_text()))


if __name__ == "__main__":
    main()
