"""The code of the documentation pages runs as printed: of each page first the shell commands, then its Python as one
program, against one server. The few blocks that cannot run here are listed in tests/pages.py."""

from __future__ import annotations

import io
import os
import re
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import BIN, Weftd
from tests.forked import run_forked
from tests.pages import PAGES, runnable

pytestmark = pytest.mark.server
#: Pages whose code runs: in a test below, or in tests/e2e/test_rl_docs.py.
RUN = {"docs/rl.md"}


def program(page: str) -> str:
    """The page's Python, as one program."""
    return "\n".join(runnable(page, "python"))


@pytest.fixture
def names(weftd: Weftd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: Any) -> dict[str, Any]:
    """The names that a page's program defines, with `printed` (its lines) and `shell` (what its commands print)."""
    page = request.param
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_BASE_URL", weftd.url)
    monkeypatch.setenv("WEFT_API_KEY", weftd.key("guides"))
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    shell = ["bash", "-eu", "-o", "pipefail", "-c", "\n".join(runnable(page, "sh"))]
    ran = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    made: dict[str, Any] = {"__name__": "docs"}
    with redirect_stdout(io.StringIO()) as said:
        exec(compile(program(page), page, "exec"), made)
    service = made.get("service", made.get("service_client"))
    if service is not None:
        service.close().result(60)
    return {**made, "printed": said.getvalue().splitlines(), "shell": ran.stdout.splitlines()}


def on(page: str) -> pytest.MarkDecorator:
    RUN.add(page)
    return pytest.mark.parametrize("names", [page], indirect=True, ids=[page])


@on("docs/get-started.md")
def test_data_of_one_s_own_to_an_answer(names: dict[str, Any]) -> None:
    losses = names["report"].curve("loss")
    assert len(losses) == 40
    assert losses[-1] < losses[0] / 10
    _, answer, path = names["printed"]
    assert answer.startswith("Lima")
    assert re.fullmatch(r"tinker://\S+/sampler_weights/capitals-1 0\.0\d+", path)


@on("docs/concepts.md")
def test_a_step(names: dict[str, Any]) -> None:
    assert float(names["printed"][0].split()[0]) > 0


@on("docs/guides/sft.md")
def test_supervised(names: dict[str, Any]) -> None:
    losses, tested = names["report"].curve("loss"), names["report"].curve("test/loss")
    assert len(losses) == 18
    assert losses[-1] < losses[0] / 2
    assert len(tested) == 2
    assert tested[1] < tested[0]
    sums = [step.result().metrics["loss:sum"] for step in names["waiting"]]
    assert sums[-1] < sums[0]


@on("docs/guides/dpo.md")
def test_preferences(names: dict[str, Any]) -> None:
    assert names["report"].curve("accuracy")[-1] > 0.9
    assert names["report"].curve("margin")[-1] > names["report"].curve("margin")[0]


@on("docs/guides/distillation.md")
def test_distillation(names: dict[str, Any]) -> None:
    gaps = names["report"].curve("reverse_kl")
    assert len(gaps) == 4
    assert gaps[-1] < gaps[0]


@on("docs/guides/from-tinker.md")
def test_a_loop_of_tinker_s(names: dict[str, Any]) -> None:
    listed, *losses, drawn = names["printed"]
    assert "weft/tiny-moe" in listed
    assert float(losses[2]) < float(losses[0])
    assert len(eval(drawn)) == 4


def test_the_same_loop_by_tinker_s_own_client(weftd: Weftd) -> None:
    """Only the import differs, and the tokenizer, which that client fetches from a hub."""
    loop = program("docs/guides/from-tinker.md").replace("import weft as tinker", "import tinker")
    loop = loop.replace("from weft import types", "from tinker import types")
    loop, hubs = re.subn(r"training_client.get_tokenizer\(\).encode\(.*\)", "list(range(40, 50))", loop)
    assert hubs == 1
    assert "weft." not in loop
    environment = os.environ | {"TINKER_BASE_URL": weftd.url, "TINKER_API_KEY": weftd.key("guides")}
    done = run_forked("-c", loop, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5


@on("docs/guides/from-peft.md")
def test_a_loop_of_trl_s(names: dict[str, Any]) -> None:
    rewards, files = names["printed"]
    assert len(eval(rewards)) == 3
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(eval(files))


@on("README.md")
def test_the_readme(names: dict[str, Any]) -> None:
    assert float(names["printed"][0]) > 0
    assert "".join(names["printed"][1:])


@on("client_sdk/README.md")
def test_the_client_s_readme(names: dict[str, Any]) -> None:
    losses, drawn, cost = names["printed"]
    assert float(losses.split()[0]) > 0
    assert len(eval(drawn)) == 8
    assert float(cost) > 0


@on("docs/sdk.md")
def test_what_a_plan_costs_and_what_is_wrong_with_it(names: dict[str, Any]) -> None:
    estimated, so_far, spent, *problems = names["printed"]
    assert float(estimated.split()[0]) > 0
    assert float(so_far) == 0
    assert int(spent) >= 0
    assert any("clip_low_threshold" in problem or "logprobs" in problem for problem in problems)


@on("docs/sampling.md")
def test_reading_along_and_stopping(names: dict[str, Any]) -> None:
    drawn = names["response"].sequences[0].tokens
    assert 16 < len(drawn) < 2000
    assert names["printed"][0].startswith(f"{len(drawn)} ")


@on("docs/openai.md")
def test_the_doors(names: dict[str, Any]) -> None:
    assert '"chat.completion"' in names["shell"][0]
    prompt, tokens = names["reply"].prompt_token_ids, names["reply"].choices[0].token_ids
    (turn,) = names["rollout"].turns
    assert (list(turn.prompt), list(turn.tokens)) == (prompt, tokens)
    assert "loss:sum" in names["printed"][-1]


@on("docs/console.md")
def test_curves(names: dict[str, Any], weftd: Weftd) -> None:
    address = f"{weftd.url}/api/v1/weft/runs/{names['run'].model_id}/metrics"
    found = httpx.get(address, headers={"x-api-key": weftd.key("guides")}).json()
    assert "reward" in str(found)


@on("docs/api.md")
def test_the_api_by_curl(names: dict[str, Any]) -> None:
    metrics, step, drawn, spent, finished = names["shell"]
    assert "'loss:sum'" in metrics
    assert '"type":"optim_step"' in step.replace(" ", "") or "metrics" in step
    assert "'tokens': [" in drawn
    assert int(spent) > 0
    assert "error" not in finished


def test_every_page_with_code_is_run() -> None:
    assert {page for page in PAGES if any(runnable(page, kind) for kind in ("python", "sh"))} == RUN
