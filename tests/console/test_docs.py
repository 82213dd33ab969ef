from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_page_shows_its_pictures() -> None:
    shown = set(re.findall(r"\(images/([\w-]+\.png)\)", (DOCS / "console.md").read_text()))
    there = {path.name: path.stat().st_size for path in (DOCS / "images").glob("console-*.png")}
    assert shown <= there.keys()
    assert len(shown) >= 12
    assert all(size < 150_000 for size in there.values())
