"""Fixed data, step by step and from life to life: what is trained in which order, what is told, saved and paid."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weft import rl
from weft.wire.inputs import Datum, ModelInput
from weft.wire.rest import Checkpoint, CheckpointsListResponse

from tests.client_sdk.rl.test_train import READ, TRAINED, Done, Pupil


class Server:
    """What outlives a run: its checkpoints, newest first, and what its runs were billed."""

    def __init__(self) -> None:
        self.rows, self.bills = list[Checkpoint](), dict[str, SimpleNamespace]()


class Learns(Pupil):
    """A run of `server`; `loaded` is the checkpoint that it began with."""

    def __init__(self, server: Server, model_id: str = "first") -> None:
        super().__init__(())
        self.server, self.model_id, self.loaded = server, model_id, list[str]()

    async def list_user_checkpoints(self, limit: int, offset: int) -> CheckpointsListResponse:
        return CheckpointsListResponse(checkpoints=self.server.rows)

    async def get_usage(self, run_id: str) -> SimpleNamespace:
        return self.server.bills[run_id]

    def save_state(self, name: str, ttl: int | None, *, overwrite: bool, user_metadata: dict[str, str]) -> Any:
        row = Checkpoint(
            checkpoint_id=name,
            checkpoint_type="training",
            time=datetime(2026, 11, 28, tzinfo=UTC),
            tinker_path=f"tinker://{self.model_id}/{name}",
            user_metadata=user_metadata,
        )
        self.server.rows[:0] = [row]
        return Done(SimpleNamespace(path=row.tinker_path))

    def load_state_with_optimizer(self, path: str) -> Any:
        self.loaded.append(path)
        return Done(None)

    def forward(self, data: list[Datum], loss: str) -> Any:
        return Done(SimpleNamespace(metrics={"loss:sum": 3.0}))

    @property
    def order(self) -> list[list[int]]:
        """The data of each step, named by their first token."""
        return [[datum.model_input.to_ints()[0] for datum in data] for data in self.sent]


class Sink:
    """A sink under which the program ends at a step."""

    def __init__(self, dies_at: int = 99) -> None:
        self.dies_at, self.told, self.closed = dies_at, list[tuple[int, int]](), False

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        self.told.append((step, of))
        if step == self.dies_at:
            raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


def data(count: int = 10, length: int = 4) -> list[Datum]:
    """Data of so many tokens each, all but the first of which have a weight."""
    inputs: dict[str, Any] = {"target_tokens": [1] * length, "weights": [0.0] + [1.0] * (length - 1)}
    return [Datum(ModelInput.from_ints([number] + [1] * (length - 1)), inputs) for number in range(count)]


def test_a_life_goes_on_with_the_data_that_would_have_come_and_counts_what_was_paid() -> None:
    def life(run: Learns, sink: Any, **more: Any) -> rl.Report:
        kept = rl.Checkpoints("mine", every=2)
        return rl.sft(
            cast(Any, run), data(), batch=2, epochs=1.2, checkpoint=kept, sinks=[sink], seed=3, budget_usd=1.0, **more
        )

    whole = Learns(Server())
    report = life(whole, sink := Sink())
    assert (sorted(number for step in whole.order[:5] for number in step), len(whole.order)) == (list(range(10)), 6)
    assert (sink.told, sink.closed) == ([(step, 6) for step in range(6)], True)
    step_nusd = 2 * 4 * TRAINED + 2
    assert report.spent_nusd == 6 * step_nusd
    told = [{"loss": 0.25, "tokens": 6.0, "grad_norm": 2.0, "spent_usd": n * step_nusd / 1e9} for n in range(1, 7)]
    assert report.steps == [pytest.approx(each) for each in told]
    assert whole.logged == [{"step": step, **numbers} for step, numbers in enumerate(report.steps)]
    names = [row.tinker_path for row in reversed(whole.server.rows)]
    assert names == [f"tinker://first/mine-{step:06d}" for step in (0, 2, 4, 6)]

    server = Server()
    first, second = Learns(server), Learns(server, "second")
    with pytest.raises(KeyboardInterrupt):
        life(first, dying := Sink(3))
    assert dying.closed
    server.bills["first"] = SimpleNamespace(total_nusd=700, held_nusd=50)
    rest = life(second, Sink())
    assert second.loaded == ["tinker://first/mine-000002"]
    assert first.order[:2] + second.order == whole.order
    assert (rest.resumed_at, rest.spent_nusd) == (2, 750 + 4 * step_nusd)
    done = life(Learns(Server()), Sink(), test=data(3), every=4)
    assert [step.get("test/loss") for step in done.steps] == [None, None, None, 3 / 9, None, 3 / 9]
    assert done.spent_nusd == 6 * step_nusd + 2 * (3 * 4 * READ + 3)


def test_a_part_of_an_epoch_is_a_step_at_least_and_a_datum_may_fill_the_context() -> None:
    for given, more in ((data(3), {"epochs": 0.1}), (data(1, 2048), {})):
        run = Learns(Server())
        assert len(rl.sft(cast(Any, run), given, sinks=[], **more).steps) == 1
        assert (len(run.sent), run.server.rows) == (1, [])


@pytest.mark.parametrize(("count", "steps"), [(3, 2), (4, 2), (5, 3), (7, 4), (9, 5)])
def test_half_a_batch_at_the_end_is_filled_from_the_next_epoch(count: int, steps: int) -> None:
    run = Learns(Server())
    rl.sft(cast(Any, run), data(count), batch=2, sinks=[])
    assert [len(step) for step in run.order] == [2] * steps
    assert {number for step in run.order for number in step} == {*range(count)}


def test_a_budget_that_ends_leaves_what_was_trained_saved() -> None:
    run = Learns(Server())
    budget_usd, kept = 3.5 * (2 * 4 * TRAINED + 2) / 1e9, rl.Checkpoints("mine", every=2)
    report = rl.sft(cast(Any, run), data(), batch=2, checkpoint=kept, sinks=[], budget_usd=budget_usd)
    assert (report.ended, len(report.steps)) == ("budget", 3)
    assert [row.checkpoint_id for row in run.server.rows] == [f"mine-{step:06d}" for step in (3, 2, 0)]
