"""Makes the tables of docs/models.md of the table of families: `python -m tools.models_page` rewrites what stands
between the marks `<!-- families: NAME -->` and `<!-- end of families -->`."""

from __future__ import annotations

import re
from pathlib import Path

from workers.model.families.rope import KINDS
from workers.model.families.table import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_BLOCK = re.compile(r"(<!-- families: (?P<name>\w+) -->).*?(<!-- end of families -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with new tables. Raises KeyError for an unknown table name."""
    families = list(FAMILIES.values())
    served = [
        (family.name, _listed(family.architecture, *family.vision), _listed(*family.checkpoints)) for family in families
    ]
    made = {
        "served": _table("family", "`architectures`", "checkpoints, for example", rows=served),
        "parts": _table(
            "family", "attention", "MLP", rows=[(each.name, each.attention, each.mlp) for each in families]
        ),
        "rope": ", ".join(KINDS),
    }
    return _BLOCK.sub(lambda match: f"{match[1]}{made[match['name']]}{match[3]}", text)


def _table(*head: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n\n" + "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n\n"


def _listed(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
