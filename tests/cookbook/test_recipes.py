"""Published recipes of tinker_cookbook run offline against a real server, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cookbook.environment import build, serve, shadow
from tests.cookbook.recipes import RECIPES, Recipe, run
from tests.e2e.conftest import Weftd

pytestmark = [pytest.mark.server, pytest.mark.cookbook]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weftd]:
    server = serve(tmp_path_factory.mktemp("cookbook"))
    yield server
    assert server.stop() == 0, server.log()


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.in_ci], ids=lambda recipe: recipe.name)
def test_the_recipe_runs(recipe: Recipe, server: Weftd, tmp_path: Path) -> None:
    run(recipe, build(), server, shadow(tmp_path / "work"))
