"""Environments of verifiers 0.1 and 0.4 and of reasoning-gym, and a renderer of renderers, sampled and trained."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import weft
from weft import rl

from tests.e2e.conftest import Weftd
from tests.rl_packages.environment import (
    AGENTS,
    INSTRUCTOR,
    LITELLM,
    ROOT,
    SANDBOXES,
    SINKS,
    VERIFIERS_0_1,
    VERIFIERS_0_4,
    Environment,
)
from tests.rl_packages.lesson import by_heart

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    server = Weftd(tmp_path_factory.mktemp("weftd")).start()
    yield server
    assert server.stop() == 0, server.log()


def made(environment: Environment) -> pytest.MarkDecorator:
    reason = f"python -m tests.rl_packages.environment {environment.name} makes what it needs"
    return pytest.mark.skipif(not environment.stamp.exists(), reason=reason)


def said(server: Weftd, environment: Environment, program: Path, *arguments: str, key: str = "") -> list[str]:
    """Run a program in `environment`; the lines that it prints."""
    variables = os.environ | {
        "WEFT_BASE_URL": server.url,
        "WEFT_API_KEY": key or server.key(f"{program.stem}-{arguments[0].strip('-')}"),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm would fetch one
    }
    command = [str(environment.python), str(program), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def on_policy(step: dict[str, Any]) -> None:
    assert step["ratio"] == pytest.approx(1, abs=1e-6)
    assert abs(step["mismatch_kl"]) <= 1e-8


@made(VERIFIERS_0_1)
@pytest.mark.parametrize("kind", ["single", "multi", "tool", "gym", "renderer"])
def test_a_package_rolls_out_and_trains_on_policy(server: Weftd, kind: str) -> None:
    steps = json.loads(said(server, VERIFIERS_0_1, Path(__file__).with_name("loops.py"), kind)[-1])
    assert len(steps) == 3
    trained = [step for step in steps if step["data"]]
    for step in trained:
        on_policy(step)
        assert step["data"] <= step["rollouts"]  # the turns of a rollout are one datum
    assert trained
    if kind == "multi":
        assert steps[0]["turns/rollout"] == 2
    if kind == "tool":
        assert steps[0]["turns/rollout"] > 1


@made(VERIFIERS_0_1)
def test_a_budget_that_ends_a_sample_of_verifiers_ends_the_loop(server: Weftd) -> None:
    assert said(server, VERIFIERS_0_1, Path(__file__).with_name("loops.py"), "spent") == ["budget", "[]"]


@made(VERIFIERS_0_1)
def test_a_rollout_of_verifiers_that_fills_the_context_ends_there_and_is_scored(server: Weftd) -> None:
    """So it is with verifiers' own clients: a loop that dropped rollouts that grow too long would never learn to be
    brief."""
    ended, steps = said(server, VERIFIERS_0_1, Path(__file__).with_name("loops.py"), "endless")
    assert ended == "done"
    for step in json.loads(steps):
        assert step["rollouts"] == 36
        assert step["turns/rollout"] > 3
        assert "waste/failed_rollouts" not in step


@made(VERIFIERS_0_1)
def test_a_sample_of_verifiers_that_fails_can_be_asked_for_again(server: Weftd) -> None:
    """Its environment asks again and goes on: the prompt has the question only once, and the rollout is scored."""
    ended, steps = said(server, VERIFIERS_0_1, Path(__file__).with_name("loops.py"), "again")
    assert ended == "done"
    for step in json.loads(steps):
        assert (step["rollouts"], step["turns/rollout"]) == (36, 2)
        assert "waste/failed_rollouts" not in step


@made(VERIFIERS_0_4)
@pytest.mark.long
@pytest.mark.parametrize("kind", ["single", "multi", "tool"])
def test_verifiers_0_4_comes_through_vllms_door(server: Weftd, kind: str) -> None:
    steps = json.loads(said(server, VERIFIERS_0_4, Path(__file__).with_name("door_loops.py"), kind)[-1])
    assert len(steps) == 2
    for step in steps:
        on_policy(step)
        assert step["same"], "the session has other tokens or logprobs than the client got"
        assert step["data"] == step["rollouts"]  # the turns of a rollout are one datum
        if kind == "multi":
            assert step["turns"] == 2 * step["rollouts"]
        if kind == "tool":
            assert step["calls"] > 0
            assert step["turns"] == step["rollouts"] + step["calls"]


@pytest.mark.parametrize(
    "environment",
    [pytest.param(each, id=name, marks=made(each)) for name, each in (("2.x", VERIFIERS_0_4), ("3.x", AGENTS))],
)
def test_an_agent_of_openai_is_trained(server: Weftd, environment: Environment) -> None:
    asked = [str(environment.python), "-c", "import openai; print(openai.__version__)"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert f"openai=={version}" in environment.packages
    lines = said(server, environment, ROOT / "examples" / "openai_agent.py", "--steps", "2", "--batch", "2")
    assert [line.split()[:2] for line in lines] == [["reward", "0"], ["reward", "1"]]


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
#: The model's words, turn by turn, by framework; for all others it calls `add`, and then says the sum.
SAID = {"instructor": ('```json\n{"a": 3, "b": 4}\n```',)}


@pytest.mark.parametrize(
    ("environment", "framework"),
    [
        pytest.param(environment, framework, id=framework, marks=made(environment))
        for environment, frameworks in (
            (AGENTS, "openai_agents openai_agents_responses pydantic_ai pydantic_ai_responses langgraph"),
            (LITELLM, "litellm"),
            (INSTRUCTOR, "instructor"),
        )
        for framework in frameworks.split()
    ],
)
def test_a_framework_gets_through_its_conversation(server: Weftd, environment: Environment, framework: str) -> None:
    """The model learns each answer by heart, for exactly the tokens of the framework's own prompt."""
    key = server.key(framework)
    with weft.ServiceClient(base_url=server.url, api_key=key) as service:
        run = service.create_lora_training_client("weft/tiny-moe", rank=16, seed=0)
        run.save_weights_and_get_sampling_client()
        learned: dict[tuple[int, ...], str] = {}
        answers = SAID.get(framework, (ADD, "7"))
        program = Path(__file__).with_name("frameworks.py")
        for turn, answer in enumerate(answers):
            session = f"{framework}-{turn}"
            said(server, environment, program, framework, f"run:{run.model_id}", session, key=key)
            learned[rl.trajectories(session, service).turns[turn].prompt] = answer
            by_heart(run, learned)
        end = said(server, environment, program, framework, f"run:{run.model_id}", "end", key=key)[-1]
        assert json.loads(end) == {"called": [[3, 4]], "answer": "7", "error": ""}
        rollout = rl.trajectories("end", service)
        assert [len(turn.tokens) > 0 for turn in rollout.turns] == [True] * len(answers)


@made(SANDBOXES)
def test_the_providers_clients_take_what_our_adapters_send() -> None:
    """The published signatures and types; without accounts, the providers themselves are not tested."""
    command = [str(SANDBOXES.python), str(Path(__file__).with_name("providers.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = {
        "left": [1, 0, 2],  # of a quota of two: with one sandbox open, with two, with none
        "read": "\x00four",
        "said": [3, "given", "no\n", None],
        "refused": ["cannot read nowhere", "cannot write slow"],
    }
    assert json.loads(done.stdout) == {"modal": expected, "prime": expected}


@made(SINKS)
def test_sinks_write_what_their_packages_read() -> None:
    command = [str(SINKS.python), str(Path(__file__).with_name("sinks.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    points = [[0, 0.25], [1, 0.5]]
    assert json.loads(done.stdout.splitlines()[-1]) == {"tensorboard": points, "trackio": points, "wandb": points}
