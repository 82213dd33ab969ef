"""docs/mutants.md names every module of `tools/mutants.py`, in the table or among those not tried yet, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed() -> dict[str, tuple[str, ...]]:
    """`MODULES`, read from the source: its file imports packages that only an environment of its own has."""
    for node in ast.parse((ROOT / "tools" / "mutants.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MODULES" and node.value is not None:
            found: dict[str, tuple[str, ...]] = eval(ast.unparse(node.value), {})
            return found
    raise AssertionError("tools/mutants.py has no MODULES")


def test_the_page_has_each_module_once() -> None:
    page = (ROOT / "docs" / "mutants.md").read_text()
    rows = re.findall(r"^\| `([^`]+\.py)` \|", page, re.MULTILINE)
    before = page.partition("not yet tried to the end:")[2].partition("\n\n")[0]
    assert sorted([*rows, *re.findall(r"`([^`]+\.py)`", before)]) == sorted(listed())


def test_modules_and_their_tests_are_there() -> None:
    tests = [word.partition("::")[0] for words in listed().values() for word in words if word.startswith("tests/")]
    assert [name for name in [*listed(), *tests] if not (ROOT / name).is_file()] == []
