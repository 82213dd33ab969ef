"""Other versions of transformers and PEFT load a download rightly, or are known not to, and verify.py says which. That
it does so with the installed versions, for wrong folders too: tests/e2e/test_exports.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.loaders import IN_CI, Pair, build, loads, make_adapter
from tests.e2e.conftest import Weftd

pytestmark = [pytest.mark.server, pytest.mark.compat, pytest.mark.long]


@pytest.fixture(scope="module")
def adapter(weftd: Weftd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(weftd, tmp_path_factory.mktemp("loaders") / "adapter")


@pytest.mark.parametrize("pair", IN_CI, ids=lambda pair: f"transformers {pair.transformers}, peft {pair.peft}")
def test_a_download_loads_as_the_table_says(pair: Pair, adapter: Path) -> None:
    outcome, said = loads(build(pair), adapter)
    assert outcome == IN_CI[pair], said
