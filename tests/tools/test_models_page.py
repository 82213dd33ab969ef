"""docs/models.md says what the table of families says."""

from __future__ import annotations

from tools.models_page import PAGE, filled
from workers.model.families.table import FAMILIES


def test_the_page_is_made_of_the_table() -> None:
    page = PAGE.read_text()
    assert page == filled(page), "run `python -m tools.models_page`"
    assert [page.count(f"\n| {family.name} | ") for family in FAMILIES.values()] == [2] * len(FAMILIES)
