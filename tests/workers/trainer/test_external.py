"""Exports that the trainer has made, and training that goes on from saved states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyrage
import pytest
import torch
from weft.wire import SaveWeightsExternalRequest

from scheduler.links.messages import OpKind, TrainOp
from tests.workers.trainer.kit import Bench, arenas, ce_data
from workers.model.adapters.encryption import BadRecipient, parse_recipients


def save_external(bench: Bench, run_id: str, ref: str, recipients: list[str] | None = None) -> TrainOp:
    body = SaveWeightsExternalRequest(model_id=run_id, path="x", age_encryption_recipients=recipients)
    return bench.op(run_id, OpKind.SAVE_EXTERNAL, body.model_dump_json().encode(), target_ref=ref)


def trained(bench: Bench, run_id: str, steps: int = 2, **spec: int) -> None:
    bench.ok(bench.create(run_id, **spec))
    go_on(bench, run_id, steps, seed=0)


def go_on(bench: Bench, run_id: str, steps: int, seed: int) -> None:
    for step in range(steps):
        bench.ok(bench.fb(run_id, ce_data([5, 9], seed + step)), bench.optim(run_id))


def test_a_run_made_from_an_export_has_the_same_adapter(bench: Bench) -> None:
    trained(bench, "a", rank=6)
    op = save_external(bench, "a", "weights/x")
    assert bench.ok(op)[op.op_id].facts["size_bytes"] == bench.blobs.size_bytes("weights/x")
    bench.ok(bench.create("b", rank=6, source_ref="weights/x"))
    assert torch.equal(bench.run("b").adapter.flat, bench.run("a").adapter.flat)
    failed = bench.create("c", rank=6, source_ref="weights/x", with_optimizer=True)
    assert "no optimizer state" in bench.go(failed)[failed.op_id].failure.message  # type: ignore[union-attr]


def test_an_export_changes_nothing_of_the_run(make_bench: Callable[..., Bench]) -> None:
    with_export, without = make_bench(), make_bench()
    for bench in (with_export, without):
        trained(bench, "a")
        bench.ok(bench.fb("a", ce_data([6], 7)))
        if bench is with_export:
            bench.ok(save_external(bench, "a", "weights/x"))
        bench.ok(bench.optim("a"))
    for mine, theirs in zip(arenas(with_export.run("a")), arenas(without.run("a")), strict=True):
        assert torch.equal(mine, theirs)


def test_every_file_is_encrypted_to_every_recipient(bench: Bench) -> None:
    keys = [pyrage.x25519.Identity.generate() for _ in range(2)]
    trained(bench, "a")
    bench.ok(save_external(bench, "a", "weights/plain"))
    bench.ok(save_external(bench, "a", "weights/x", [str(key.to_public()) for key in keys]))
    plain = {path.relative_to(bench.blobs.path("weights/plain")): path for path in _files(bench, "weights/plain")}
    for path in _files(bench, "weights/x"):
        name = path.relative_to(bench.blobs.path("weights/x"))
        for key in keys:
            assert pyrage.decrypt(path.read_bytes(), [key]) == plain[name.with_suffix("")].read_bytes()
    assert len(_files(bench, "weights/x")) == len(plain)
    create = bench.create("b", source_ref="weights/x")
    failure = bench.go(create)[create.op_id].failure
    assert failure is not None
    assert (failure.category, "encrypted" in failure.message) == ("user", True)


def _files(bench: Bench, ref: str) -> list[Path]:
    return [bench.blobs.path(ref) / name for name in bench.blobs.files(ref)]


def test_recipients_that_are_none() -> None:
    with pytest.raises(BadRecipient, match=r"\[1\]"):
        parse_recipients([str(pyrage.x25519.Identity.generate().to_public()), "AGE-SECRET-KEY-1QQQ"])


def test_resuming_is_bitwise_going_on_and_leaves_out_what_was_accumulated(make_bench: Callable[..., Bench]) -> None:
    straight, stopped = make_bench(), make_bench()
    trained(straight, "a", 5)
    trained(stopped, "a", 2)
    stopped.ok(stopped.fb("a", ce_data([4], 99)))
    stopped.ok(stopped.op("a", OpKind.SAVE_STATE, target_ref="weights/s"))
    stopped.restart()
    stopped.ok(stopped.create("b", source_ref="weights/s", with_optimizer=True))
    go_on(stopped, "b", 3, seed=2)
    for mine, theirs in zip(arenas(straight.run("a")), arenas(stopped.run("b")), strict=True):
        assert torch.equal(mine, theirs)
    assert straight.run("a").step == stopped.run("b").step
    straight.ok(save_external(straight, "a", "weights/x"))
    stopped.ok(save_external(stopped, "b", "weights/x"))
    one, other = ([path.read_bytes() for path in sorted(_files(each, "weights/x"))] for each in (straight, stopped))
    assert one == other
