"""After one file has changed, a run of tests imports anew that file and all modules that import it, directly or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.warm import dependents

CHECKOUT = Path(__file__).parents[2]
ROOMS = ("api", "billing", "scheduler", "store", "workers")
FILES = {
    ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in (CHECKOUT / room).rglob("*.py")
}


@pytest.mark.parametrize(
    ("module", "some", "others"),
    [
        (
            "store.people.keys",
            {"store.people.organisations", "api.who.lookup", "api.routes.people.keys"},
            {"store.tables", "workers.model.lora.linear"},
        ),
        (
            "store.tables.work",
            {"store.tables", "store.people.keys", "billing.money.wallets"},
            {"store.database.caller", "store.people.roles"},
        ),
        (
            "billing.metering.charges",
            {"scheduler.journal.ending.settlement"},
            {"billing.money.wallets", "store.people.keys"},
        ),
        ("api.who.may_change", {"api.routes.computing.training"}, {"api.who.lookup", "scheduler.order.fair"}),
    ],
)
def test_modules_that_import_it_through_others_are_found_too(module: str, some: set[str], others: set[str]) -> None:
    assert (some | others | {module}) <= FILES.keys()
    found = dependents(module, FILES, CHECKOUT)
    assert found >= some | {module}
    assert not found & others


def test_imports_in_functions_and_of_packages_are_found(tmp_path: Path) -> None:
    """An import anywhere in a file counts; and a module in a package, or one that imports from it, runs its
    `__init__`."""
    texts = {
        "a.changed": "",
        "a": "import a.changed",
        "a.plain": "import os",
        "b": "def f():\n    from a import plain",
        "c": "import b as other",
        "d": "from os import path",
    }
    files = {}
    for name, text in texts.items():
        files[name] = tmp_path / f"{name}.py"
        files[name].write_text(text)
    files["outside"] = CHECKOUT / "setup.py"
    assert dependents("a.changed", files, tmp_path) == {"a.changed", "a", "a.plain", "b", "c"}
