"""docs/models.md is what the table of families says."""

from __future__ import annotations

from tools.models_page import PAGE, page


def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text() == page(), "run `python -m tools.models_page`"
