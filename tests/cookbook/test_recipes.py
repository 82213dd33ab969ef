"""Published recipes of tinker_cookbook run offline against a real server, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cookbook.environment import HYBRID, MODEL, OTHERS, build, serve, shadow
from tests.cookbook.recipes import RECIPES, Recipe, run
from tests.e2e.conftest import Weftd
from workers.model.families.table import FAMILIES

pytestmark = [pytest.mark.server, pytest.mark.cookbook]
IN_CI = [recipe for recipe in RECIPES if recipe.in_ci]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weftd]:
    server = serve(tmp_path_factory.mktemp("cookbook"), dict.fromkeys(recipe.model for recipe in IN_CI))
    yield server
    assert server.stop() == 0, server.log()


@pytest.mark.parametrize("recipe", IN_CI, ids=lambda recipe: recipe.name)
def test_the_recipe_runs(recipe: Recipe, server: Weftd, tmp_path: Path) -> None:
    run(recipe, build(), server, shadow(tmp_path / "work"))


def test_every_family_has_a_recipe() -> None:
    own = {MODEL: "Qwen3 MoE", HYBRID: "Qwen3.5, Qwen3.6, Qwen3.8 (text)"}
    of_models = own | {model: family for family, (model, _) in OTHERS.items()}
    assert {of_models[recipe.model] for recipe in RECIPES} == {family.name for family in FAMILIES.values()}
