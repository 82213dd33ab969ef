"""An operation's plan comes back from the database as it was, and queries find its fields."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import pytest
from sqlalchemy import select

from scheduler.journal import rows
from scheduler.links.messages import OpKind, RunSpec
from scheduler.order.operations import SAMPLE, Operation
from scheduler.order.plans import (
    BODY_ONLY,
    Create,
    ForwardBackward,
    Load,
    NewSampler,
    Plan,
    Sample,
    Save,
    Slice,
    Source,
    Step,
)
from store import tables
from store.database.bulk import insert_rows, update_rows
from store.database.db import Database

SPEC = RunSpec("s:train:0", "m", 8, 32.0, 2**40, train_attn=True, train_mlp=False, train_unembed=True)
SOURCE = Source("weights/abc", "tinker://run/weights/a", with_optimizer=True)
PLANS: list[tuple[str, Plan]] = [
    (OpKind.CREATE, Create(SPEC, "batch")),
    (OpKind.CREATE, Create(SPEC, "interactive", SOURCE)),
    (OpKind.LOAD_STATE, Load(SOURCE)),
    (OpKind.FORWARD, ForwardBackward((Slice(0, 2, 10), Slice(2, 3, 5)))),
    (OpKind.SAVE_STATE, Save("weights", "a", 60, overwrite=True, user_metadata={"deep": [{"ünïcode": None}]})),
    (OpKind.SAVE_EXTERNAL, Save("external_weights", "a")),
    (OpKind.SAVE_SAMPLER, NewSampler("s:sample:3", 3, inflight=True)),
    (SAMPLE, Sample(4, 7, "batch")),
    (OpKind.OPTIM_STEP, BODY_ONLY),
    (OpKind.OPTIM_STEP, Step({"learning_rate": 1e-4, "beta1": 0.9})),
]


def operation(seq: int, kind: str, plan: Plan) -> Operation:
    now = datetime.now(UTC)
    usual: dict[str, Any] = {"key_id": 7, "project_id": "p", "body_bytes": 3, "body_sha256": "stored"}
    return Operation(f"op{seq}", "a", "s", "lane", seq, str(kind), "m", 9, f"ops/{seq}", plan, now, **usual)


@pytest.fixture
def database(any_database: Database) -> Database:
    def write(session: Any) -> None:
        session.add(tables.Organisation(id="a", name="a", created_at=datetime.now(UTC)))
        session.flush()
        made = [rows.to_row(operation(seq, kind, plan), "sent") for seq, (kind, plan) in enumerate(PLANS)]
        insert_rows(session.connection(), tables.Operation, made)

    any_database.write_now(write)
    return any_database


def test_every_sort_of_plan_comes_back_as_it_was(database: Database) -> None:
    assert {type(plan) for _, plan in PLANS} == set(get_args(Plan))
    with database.read() as session:
        found = list(session.scalars(select(tables.Operation).order_by(tables.Operation.seq)))
    for row, (kind, plan) in zip(found, PLANS, strict=True):
        op = rows.from_row(row)
        assert (op.kind, op.plan) == (kind, plan)
        assert (op.body_bytes, op.body_sha256, op.key_id, op.project_id) == (3, "stored", 7, "p")
        assert rows.sent_sha256_of(row) == "sent"


@pytest.mark.parametrize(("kind", "plan"), PLANS)
def test_what_is_packed_comes_back_as_its_row_would(kind: str, plan: Plan) -> None:
    op = replace(operation(7, kind, plan), user_id="u", body=b"{}", origin="request trace")
    back = rows.unpack(rows.pack(op))
    assert rows.to_row(back, "sent") == rows.to_row(op, "sent")
    assert back.plan == plan
    for other in (b"", rows.pack(op)[:-1], msgspec.msgpack.encode(["op7", "a"])):
        with pytest.raises(ValueError, match=r"Expected|truncated|malformed"):
            rows.unpack(other)


def test_queries_find_the_fields_of_plans(database: Database) -> None:
    query = select(rows.source_ref, rows.sampler_id, rows.num_samples).order_by(tables.Operation.seq)
    with database.read() as session:
        found = [tuple(row) for row in session.execute(query)]
    source, sampler, sample = ("weights/abc", None, None), (None, "s:sample:3", None), (None, None, 4)
    nothing = (None, None, None)
    assert found == [nothing, source, source, nothing, nothing, nothing, sampler, sample, nothing, nothing]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (rb'{"a": "\u0000\ud800\""}', r'{"a": "\u0000\ud800\""}'),
        (b"x" * rows.SMALL_BYTES, "x" * rows.SMALL_BYTES),
        (b"x" * (rows.SMALL_BYTES + 1), None),
        (b"a\0", None),
        ("\u00fc".encode(), None),
        (b"\xff", None),
    ],
    ids=["empty", "escapes", "as large as may be", "larger", "NUL", "not ASCII", "no text"],
)
def test_what_a_row_takes_comes_back_from_it(database: Database, data: bytes, text: str | None) -> None:
    assert rows.small_text(data) == text
    if not text:
        return
    op = replace(operation(100, OpKind.OPTIM_STEP, BODY_ONLY), body=data, body_ref="")

    def write(session: Any) -> None:
        insert_rows(session.connection(), tables.Operation, [rows.to_row(op, "sent")])
        update_rows(session.connection(), tables.Operation, [{"id": op.id, "result": text}])

    database.write_now(write)
    with database.read() as session:
        row = session.get_one(tables.Operation, op.id)
    assert (rows.from_row(row).body, row.result) == (data, text)
