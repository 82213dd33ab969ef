"""`weft`, our own client, on a real server: a whole loop, what it costs, mistakes in it, and crashes."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import weft
from click.testing import CliRunner
from weft import AdamParams, Plan, PlannedSample, PlannedSave, PlannedTrain, PlannedUpdate, ServiceClient, types
from weft.cli import main
from weft.types import Datum, ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, BIN, Weftd
from tests.forked import run_forked

pytestmark = pytest.mark.server
ADAM = AdamParams(learning_rate=2e-3)
PROMPT = ModelInput.from_ints([40, 43, 46, 49])


def supervised(sequences: int = 3, length: int = 12, seed: int = 0) -> list[Datum]:
    def datum(i: int) -> Datum:
        tokens = [(seed * 31 + 7 * i + 5 * j) % 300 + 30 for j in range(length + i + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        return Datum(ModelInput.from_ints(tokens[:-1]), inputs)

    return [datum(i) for i in range(sequences)]


def train(run: weft.TrainingClient, steps: int, before_step: Callable[[int], None] = lambda step: None) -> list[float]:
    found = []
    for step in range(steps):
        before_step(step)
        backward, update = run.forward_backward(supervised(seed=step), "cross_entropy"), run.optim_step(ADAM)
        found.append(backward.result(60).metrics["loss:sum"])
        update.result(60)
    return found


def fingerprint(run: weft.TrainingClient) -> Any:
    outputs = run.forward(supervised(seed=99), "cross_entropy").result(60).loss_fn_outputs
    return np.concatenate([output["logprobs"].to_numpy() for output in outputs])


def client(server: Weftd, organisation: str = "loom", **options: Any) -> ServiceClient:
    return ServiceClient(base_url=server.url, api_key=server.key(organisation), **options)


@pytest.fixture
def service(weftd: Weftd) -> Iterator[ServiceClient]:
    with client(weftd) as service:
        yield service


@pytest.fixture
def run(service: ServiceClient) -> weft.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)


def test_train_save_sample_and_resume(service: ServiceClient, run: weft.TrainingClient) -> None:
    train(run, 3)
    saved = run.save_state("three").result(60).path
    named = run.save_weights_for_sampler("three").result(60).path
    again = service.create_training_client_from_state_with_optimizer(saved, name="again")
    assert train(again, 2) == train(run, 2)
    np.testing.assert_array_equal(fingerprint(again), fingerprint(run))
    listed = service.create_rest_client().get_training_run(again.model_id).result(60)
    assert (listed.name, listed.continued_from) == ("again", saved)
    sampler = service.create_sampling_client(model_path=named)
    params = SamplingParams(max_tokens=8, seed=3, stop=[])
    first = sampler.sample(PROMPT, 2, params).result(60)
    assert [len(sequence.tokens) for sequence in first.sequences] == [8, 8]
    assert sampler.sample(PROMPT, 2, params).result(60).sequences[1].tokens == first.sequences[1].tokens
    assert len(sampler.compute_logprobs(PROMPT).result(60)) == PROMPT.length


def test_the_official_client_computes_the_same(weftd: Weftd, run: weft.TrainingClient, official: Any) -> None:
    other = official("loom").create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    from tests.e2e import data

    theirs = [
        other.forward_backward(data.supervised(3, seed=step), "cross_entropy").result().metrics["loss:sum"]
        for step in range(2)
    ]
    ours = [
        run.forward_backward(supervised(seed=step), "cross_entropy").result(60).metrics["loss:sum"] for step in (0, 1)
    ]
    assert ours == theirs


def test_every_sampling_argument(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    targets = types.TensorData([41, 42, 43, 44, -1, 46], "int64", [3, 2])
    answer = sampler.sample(
        PROMPT,
        1,
        SamplingParams(max_tokens=3, seed=1, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=2,
    ).result(60)
    assert answer.prompt_logprobs is not None
    assert [value is None for value in answer.prompt_logprobs] == [True, True, False, False]
    assert answer.target_prompt_logprobs is not None
    assert answer.target_prompt_logprobs.to_numpy().shape == (3, 2)
    assert answer.prompt_alt_tokens is not None
    assert answer.prompt_alt_tokens.tokens.to_numpy().shape[1] == 2
    assert answer.topk_prompt_logprobs is not None
    table = answer.sequences[0].topk_logprobs
    assert table is not None
    assert [len(row or ()) for row in table] == [2, 2, 2]


def test_a_sampler_in_another_process(weftd: Weftd, service: ServiceClient, run: weft.TrainingClient) -> None:
    train(run, 1)
    sampler = run.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=6, seed=3, stop=[])
    mine = sampler.sample(PROMPT, 1, params).result(60).sequences[0].tokens
    clone = pickle.loads(pickle.dumps(sampler))  # noqa: S301
    assert clone.sample(PROMPT, 1, params).result(60).sequences[0].tokens == mine
    code = (
        "import sys, weft\n"
        "sampler = weft.SamplingClient.from_sampler_handle(sys.argv[1])\n"
        "params = weft.SamplingParams(max_tokens=6, seed=3, stop=[])\n"
        f"prompt = weft.ModelInput.from_ints({PROMPT.to_ints()})\n"
        "print(sampler.sample(prompt, 1, params).result(60).sequences[0].tokens)"
    )
    environment = os.environ | {"WEFT_API_KEY": weftd.key("loom")}
    done = run_forked("-c", code, sampler.get_sampler_handle(), env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == mine


def nll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def test_custom_losses_here_and_there_are_the_built_in_one(service: ServiceClient) -> None:
    """By the server in one pass, by the client in two passes, and as the server's built-in loss: the same gradient."""
    handle = service.create_custom_loss(nll, {"logprobs": 1, "weights": 1}).result(60)
    assert handle.loss_id is not None

    def by_hand(data: list[Datum], logprobs: list[Any]) -> Any:
        pairs = zip(data, logprobs, strict=True)
        return sum(-(lp * datum.loss_fn_inputs["weights"].to_torch()).sum() for datum, lp in pairs), {}

    found = []
    for loss in (None, handle, by_hand):
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
        data = supervised()
        backward = (
            run.forward_backward(data, "cross_entropy") if loss is None else run.forward_backward_custom(data, loss)
        )
        run.optim_step(ADAM).result(60)
        found.append((backward.result(60).metrics["loss:sum"], fingerprint(run)))
    for loss_sum, logprobs in found[1:]:
        assert loss_sum == pytest.approx(found[0][0], rel=1e-5)
        np.testing.assert_allclose(logprobs, found[0][1], atol=1e-4)


def test_stable_reinforce_from_what_was_recorded(run: weft.TrainingClient) -> None:
    """Spans in place of logprobs: the server knows what it sampled with, and the first step's ratio is 1."""
    sampler = run.save_weights_and_get_sampling_client(record_stability_info=True)
    drawn = sampler.sample(PROMPT, 3, SamplingParams(max_tokens=6, seed=2, stop=[])).result(60)
    size, data = PROMPT.length, []
    for sequence in drawn.sequences:
        name, tokens = sequence.sequence_id, [*PROMPT.to_ints(), *sequence.tokens]
        inputs = {"target_tokens": tokens[1:], "advantages": [0.0] * (size - 1) + [1.0] * 6}
        prompt, sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan
        data.append(
            Datum(ModelInput.from_ints(tokens[:-1]), inputs).with_provenance(
                [prompt(name, 0, size), sampled(name, 0, 5)], [prompt(name, 1, size - 1), sampled(name, 0, 6)]
            )
        )
    assert run.validate(data, "stable_reinforce", {"kl_coeff": 0.01}) == []
    metrics = run.forward_backward(data, "stable_reinforce", {"kl_coeff": 0.01}).result(60).metrics
    assert metrics["loss:sum"] == pytest.approx(-18.0, abs=1e-2)
    assert [problem.where for problem in run.validate(data, "ppo")] == [
        f"data[{index}].loss_fn_inputs['logprobs']" for index in range(3)
    ]


def test_dimuon(service: ServiceClient) -> None:
    config = types.DimuonOptimizerConfig()
    run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5, optimizer=config).result(60)
    assert run.get_info().optimizer_config == config
    before = fingerprint(run)
    run.forward_backward(supervised(), "cross_entropy")
    run.optim_step(types.DimuonParams(learning_rate=1e-3)).result(60)
    assert not np.array_equal(fingerprint(run), before)
    with pytest.raises(weft.WeftError, match="dimuon"):
        run.optim_step(ADAM).result(60)


def test_the_estimate_is_what_is_billed(service: ServiceClient, run: weft.TrainingClient) -> None:
    data, times = supervised(), 3
    params = SamplingParams(max_tokens=5, seed=1, stop=[])
    steps = [PlannedTrain(data), PlannedTrain(data[:1], forward_only=True), PlannedUpdate(ADAM)]
    estimate = run.estimate_cost(Plan(steps=steps, times=times)).result(60)
    assert estimate.exact
    assert estimate == service.estimate(Plan(BASE_MODEL, steps, times=times)).result(60)
    for _ in range(times):
        run.forward_backward(data, "cross_entropy")
        run.forward(data[:1], "cross_entropy")
        run.optim_step(ADAM).result(60)
    spent = run.cost().result(60)
    assert (spent.total_nusd, spent.total_usd) == (estimate.total_nusd, estimate.total_usd)
    assert {row.kind: row.amount_nusd for row in spent.rows} == {row.kind: row.amount_nusd for row in estimate.rows}
    assert spent.price_version == estimate.price_version

    rest = service.create_rest_client()
    assert rest.get_usage(run.model_id).result(60) == spent
    before = rest.get_balance().result(60)
    assert before.balance_nusd is None
    most = run.estimate_cost(PlannedSample([PROMPT], 3, params)).result(60)
    assert not most.exact
    run.save_weights_and_get_sampling_client().sample(PROMPT, 3, params).result(60)
    assert 0 < rest.get_balance().result(60).spent_nusd - before.spent_nusd <= most.total_nusd


def test_all_problems_at_once(service: ServiceClient, run: weft.TrainingClient) -> None:
    assert run.validate(supervised()) == []
    assert run.validate(PlannedUpdate(ADAM)) == []
    run.save_state("taken").result(60)
    spent = run.cost().result(60)
    bad = Datum(ModelInput.from_ints([50, 10_000_000, 52]), {"target_tokens": [1, 2], "weights": [1.0, float("nan")]})
    plan = Plan(
        "nobody/nothing",
        rank=100_000,
        steps=[
            PlannedTrain([*supervised(1), bad], "hinge"),
            PlannedTrain(supervised(1), "ppo", {"beta": 1.0}),
            PlannedTrain([Datum(ModelInput.from_ints([50] * 50_000), {"target_tokens": [50] * 50_000})]),
            PlannedUpdate({"learning_rate": 30.0}),
            PlannedSample([[50] * 2040], 1, {"max_tokens": 100, "temperature": 1.0}),
            PlannedSave("taken"),
        ],
    )
    found = {problem.where for problem in service.validate(plan)}
    of_run = {problem.where: problem for problem in run.validate(plan)}
    assert {"base_model", "rank"} <= found
    expected = {
        "base_model",
        "steps[0].loss_fn",
        "steps[0].data[1].model_input",
        "steps[0].data[1].loss_fn_inputs['target_tokens']",
        "steps[0].data[1].loss_fn_inputs['weights']",
        "steps[1].loss_fn_config['beta']",
        "steps[1].data[0].loss_fn_inputs['logprobs']",
        "steps[1].data[0].loss_fn_inputs['advantages']",
        "steps[2].data[0].model_input",
        "steps[2].data[0].loss_fn_inputs['weights']",
        "steps[3].params.learning_rate",
        "steps[4].prompts[0]",
        "steps[5].name",
    }
    assert of_run.keys() == expected
    assert of_run["steps[0].data[1].model_input"].value == 10_000_000
    assert run.validate([bad])[0].where == "data[0].model_input"
    assert run.cost().result(60) == spent


CASES: dict[str, tuple[list[Datum], str]] = {
    "vocabulary": ([Datum(ModelInput.from_ints([9_999]), {"target_tokens": [1], "weights": [1.0]})], "cross_entropy"),
    "length": ([Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [1], "weights": [1.0]})], "cross_entropy"),
    "nan": ([Datum(ModelInput.from_ints([1]), {"target_tokens": [1], "weights": [float("nan")]})], "cross_entropy"),
    "missing": ([Datum(ModelInput.from_ints([1]), {"target_tokens": [1]})], "cross_entropy"),
    "loss": (supervised(1), "hinge"),
    "unknown input": (
        [Datum(ModelInput.from_ints([1]), {"target_tokens": [1], "weights": [1.0], "x": np.ones(1)})],
        "cross_entropy",
    ),
    "fine": (supervised(1), "cross_entropy"),
}


@pytest.mark.parametrize("case", CASES)
def test_validate_agrees_with_the_server(run: weft.TrainingClient, case: str) -> None:
    data, loss = CASES[case]
    problems = run.validate(data, loss)
    if not problems:
        run.forward(data, loss).result(60)
        return
    with pytest.raises((weft.BadRequestError, weft.UnprocessableEntityError, weft.RequestFailedError)):
        run.forward(data, loss).result(60)


def test_typed_errors(weftd: Weftd, service: ServiceClient) -> None:
    with pytest.raises(weft.AuthenticationError):
        ServiceClient(base_url=weftd.url, api_key="tml-wrong").create_lora_training_client(BASE_MODEL).result(60)
    with pytest.raises((weft.BadRequestError, weft.NotFoundError), match=r"nobody/nothing"):
        service.create_lora_training_client("nobody/nothing").result(60)
    with pytest.raises(weft.NotFoundError):
        service.create_rest_client().get_training_run("00000000-0000:train:0").result(60)
    run = service.create_lora_training_client(BASE_MODEL, rank=2)
    run.save_state("twice").result(60)
    with pytest.raises((weft.BadRequestError, weft.RequestFailedError), match="twice"):
        run.save_state("twice").result(60)
    assert run.optim_step(ADAM).result(60).metrics is not None


def test_async_forms(weftd: Weftd) -> None:
    async def loop() -> tuple[float, int]:
        async with client(weftd) as service:
            run = await service.create_lora_training_client_async(BASE_MODEL, rank=4, seed=5)
            backward = await run.forward_backward_async(supervised(), "cross_entropy")
            update = await run.optim_step_async(ADAM)
            loss = (await backward).metrics["loss:sum"]
            await update
            assert await run.validate_async(supervised()) == []
            sampler = await run.save_weights_and_get_sampling_client_async()
            answers = await asyncio.gather(
                *(sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=2, stop=[])) for _ in range(5))
            )
            with pytest.raises(weft.NotFoundError):
                await service.create_rest_client().get_training_run_async("x")
            return loss, sum(len(answer.sequences[0].tokens) for answer in answers)

    loss, tokens = asyncio.run(loop())
    assert loss > 0
    assert tokens == 10


def test_a_cancelled_sample_stops(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result(60)
    future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1500, stop=[]))
    assert future.cancel()
    assert sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1, stop=[])).result(60).sequences


def test_tokenizer_from_the_server(
    service: ServiceClient, run: weft.TrainingClient, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    tokenizer = run.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("3 + 5 = 8")) == "3 + 5 = 8"
    assert service.create_sampling_client(base_model=BASE_MODEL).get_tokenizer().vocab_size == tokenizer.vocab_size


def test_sessions_exports_copies_and_traces(service: ServiceClient, tmp_path: Path) -> None:
    with client_of(service, display_name="nightly 7", project_id="p1") as other:
        run = other.create_lora_training_client(BASE_MODEL, rank=4).result(60)
        train(run, 1)
        session = run.model_id.split(":")[0]
        exported = run.save_weights_external("out").result(60).path
        state = run.save_state("s").result(60).path
        rest = other.create_rest_client()
        found = rest.search_sessions(types.SessionSearchRequest(display_name="nightly")).result(60).sessions
        assert session in [summary.session_id for summary in found]
        rest.assign_session_project(session, "p2").result(60)
        files = {path.name for path in rest.download_checkpoint(exported, tmp_path / "out").result(60)}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        assert rest.download_checkpoint(state, tmp_path / "state").result(60)
        copy = other.copy_weights(state).result(60)
        assert copy.endswith("/weights/s")
        assert copy != state
        rest.publish_checkpoint_from_tinker_path(state).result(60)
        rest.unpublish_checkpoint_from_tinker_path(state).result(60)
        assert rest.export_session_trace(session).result(60).startswith("http")
        assert rest.whoami().result(60).org_urn
    admin = weft.AdminClient(transport=service._transport)
    assert admin.get_audit_log().result(60).entries
    assert admin.get_current_checkpoint_storage_usage().result(60).data


def client_of(service: ServiceClient, **options: Any) -> ServiceClient:
    endpoint = service._transport.endpoint
    return ServiceClient(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


def test_the_command(
    weftd: Weftd, service: ServiceClient, run: weft.TrainingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run, 1)
    state = run.save_state("cli").result(60).path
    spent = run.cost().result(60).total_usd
    monkeypatch.chdir(tmp_path)
    settings = {"WEFT_BASE_URL": weftd.url, "WEFT_API_KEY": weftd.key("loom"), "COLUMNS": "200"}
    program = [str(BIN / "weft"), "balance"]
    done = subprocess.run(program, env=os.environ | settings, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "none kept" in done.stdout) == (0, True), done.stderr

    def weft_command(*arguments: str) -> str:
        """`weft` in this process: a process of its own would import for a second."""
        found = CliRunner().invoke(main, arguments, env=settings)
        assert found.exit_code == 0, found.output
        return found.stdout

    assert spent in weft_command("cost", run.model_id)
    assert json.loads(weft_command("cost", run.model_id, "--json"))["total_usd"] == spent
    assert "0.400000" in weft_command("prices", BASE_MODEL)
    assert BASE_MODEL in weft_command("models")
    assert run.model_id in weft_command("runs")
    assert state in weft_command("checkpoints", "--run", run.model_id)
    assert "adapter_model.safetensors" in weft_command("download", state)
    assert (tmp_path / "cli").is_dir()
    assert "public" in weft_command("publish", state)
    assert "private" in weft_command("unpublish", state)
    assert "7,200" in weft_command("set-ttl", state, "--seconds", "7200")
    weft_command("trace", run.model_id.split(":")[0], "--to", "t.pftrace")
    assert (tmp_path / "t.pftrace").stat().st_size > 0
    assert "deleted" in weft_command("delete", "-y", state)
    assert state not in weft_command("checkpoints")


def test_a_killed_server_is_a_pause(own_weftd: Callable[..., Weftd]) -> None:
    server = own_weftd()
    service = client(server)
    calm = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
    expected = train(calm, 4), fingerprint(calm)
    shaken = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
    back = threading.Event()

    def kill(step: int) -> None:
        if step == 2:
            server.kill()
            threading.Thread(target=lambda: (server.start(), back.set())).start()

    found = train(shaken, 4, kill), fingerprint(shaken)
    assert back.wait(30)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    rates = calm.cost().result(60).total_nusd, shaken.cost().result(60).total_nusd
    assert rates[0] == rates[1]


def test_with_all_of_the_servers_options(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    """Tokens in place of the key, and one poll for all requests of a sampler."""
    config = tmp_path / "weft.toml"
    config.write_text("pjwt_auth_enabled = true\nsample_use_retrieve_futures = true\n")
    with client(own_weftd("--config", str(config))) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
        assert len(train(run, 1)) == 1
        sampler = run.save_weights_and_get_sampling_client().result(60)
        assert service._session.config.pjwt_auth_enabled
        assert service._session.config.sample_use_retrieve_futures
        params = SamplingParams(max_tokens=3, stop=[])
        futures = [sampler.sample(PROMPT, 2, params) for _ in range(30)]
        assert {len(future.result(60).sequences) for future in futures} == {2}
        clone = pickle.loads(pickle.dumps(sampler))  # noqa: S301
        assert clone.sample(PROMPT, 1, params).result(60).sequences
