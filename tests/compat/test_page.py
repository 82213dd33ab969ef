"""docs/compatibility.md shows the outcomes of the last tour, and leaves no method of the SDK out."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.compat.environments import IN_CI
from tests.compat.page import PAGE, page, undriven
from tests.compat.tour import RESULTS
from tests.rl_packages.environment import ENVIRONMENTS

RECORDED = json.loads(RESULTS.read_text())


def test_the_page_is_made_of_the_recorded_results() -> None:
    assert PAGE.read_text() == page(RECORDED, IN_CI), "run: make compat"


def test_the_recorded_results_name_the_calls_of_the_tour() -> None:
    """The calls are read from the tour's code: one that was added since shows without a new tour."""
    sources = [path.read_text() for path in (Path(__file__).parent / "smoke").glob("*.py")]
    named = set(re.findall(r'"((?:[A-Z][A-Za-z]+Client\.[a-z_]+)(?:: [^"{}]+)?)"', "\n".join(sources)))
    assert named
    assert named <= RECORDED["0.38.0"].keys(), "run: make compat"


def test_every_public_method_of_the_newest_sdk_is_called() -> None:
    assert undriven(RECORDED["0.38.0"]) == set()


def test_no_call_failed_in_any_version() -> None:
    failed = {(version, call) for version, row in RECORDED.items() for call, result in row.items() if result == "fail"}
    assert failed == set()


def test_every_package_for_rl_has_one_version() -> None:
    packages = [package for each in ENVIRONMENTS.values() for package in each.packages]
    assert [package for package in packages if not re.fullmatch(r"[A-Za-z0-9_-]+==[0-9.]+", package)] == []
