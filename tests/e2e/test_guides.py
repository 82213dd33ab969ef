"""Every block of the pages that one begins with runs as it stands: each page is one program, against one server."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Weftd

pytestmark = pytest.mark.server
DOCS = Path(__file__).parents[2] / "docs"


def program(page: str) -> str:
    """The page's Python, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S))


@pytest.fixture
def names(weftd: Weftd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: Any) -> dict[str, Any]:
    """What the page's program has made, and `printed`: its lines. It runs in a folder of its own."""
    page = request.param
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_BASE_URL", weftd.url)
    monkeypatch.setenv("WEFT_API_KEY", weftd.key("guides"))
    for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.S):
        subprocess.run(["bash", "-eu", "-c", block], check=True, timeout=60)
    made: dict[str, Any] = {"__name__": "docs"}
    with redirect_stdout(io.StringIO()) as said:
        exec(compile(program(page), page, "exec"), made)
    made["service" if "service" in made else "service_client"].close().result(60)
    return {**made, "printed": said.getvalue().splitlines()}


def on(page: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("names", [page], indirect=True, ids=[page])


@on("get-started.md")
def test_data_of_one_s_own_to_an_answer(names: dict[str, Any]) -> None:
    losses = names["report"].curve("loss")
    assert len(losses) == 40
    assert losses[-1] < losses[0] / 10
    _, answer, path = names["printed"]
    assert answer.startswith("Lima")
    assert re.fullmatch(r"tinker://\S+/sampler_weights/capitals-1 0\.0\d+", path)


@on("concepts.md")
def test_a_step(names: dict[str, Any]) -> None:
    assert float(names["printed"][0].split()[0]) > 0


@on("guides/sft.md")
def test_supervised(names: dict[str, Any]) -> None:
    losses, tested = names["report"].curve("loss"), names["report"].curve("test/loss")
    assert len(losses) == 18
    assert losses[-1] < losses[0] / 2
    assert len(tested) == 2
    assert tested[1] < tested[0]
    sums = [step.result().metrics["loss:sum"] for step in names["waiting"]]
    assert sums[-1] < sums[0]


@on("guides/dpo.md")
def test_preferences(names: dict[str, Any]) -> None:
    assert names["report"].curve("accuracy")[-1] > 0.9
    assert names["report"].curve("margin")[-1] > names["report"].curve("margin")[0]


@on("guides/distillation.md")
def test_distillation(names: dict[str, Any]) -> None:
    gaps = names["report"].curve("reverse_kl")
    assert len(gaps) == 4
    assert gaps[-1] < gaps[0]


@on("guides/from-tinker.md")
def test_a_loop_of_tinker_s(names: dict[str, Any]) -> None:
    listed, *losses, drawn = names["printed"]
    assert "weft/tiny-moe" in listed
    assert float(losses[2]) < float(losses[0])
    assert len(eval(drawn)) == 4


def test_the_same_loop_by_tinker_s_own_client(weftd: Weftd) -> None:
    """Only the import is another one, and the tokenizer, which that client fetches from a hub."""
    loop = program("guides/from-tinker.md").replace("import weft as tinker", "import tinker")
    loop = loop.replace("from weft import types", "from tinker import types")
    loop, hubs = re.subn(r"training_client.get_tokenizer\(\).encode\(.*\)", "list(range(40, 50))", loop)
    assert hubs == 1
    assert "weft." not in loop
    environment = os.environ | {"TINKER_BASE_URL": weftd.url, "TINKER_API_KEY": weftd.key("guides")}
    done = subprocess.run(
        [sys.executable, "-c", loop], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5


@on("guides/from-peft.md")
def test_a_loop_of_trl_s(names: dict[str, Any]) -> None:
    rewards, files = names["printed"]
    assert len(eval(rewards)) == 3
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(eval(files))
