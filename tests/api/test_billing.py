from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from starlette.types import Message, Scope
from weft.wire.account.billing import BillingUsageResponse

from billing.metering.hourly import hour_of
from store import tables
from tests.api.conftest import MODEL, World
from tests.api.data import batch
from tests.rows import session_row


def window(hours: int = 1, back: int = 0) -> str:
    start = hour_of(datetime.now(UTC)) - timedelta(hours=back)
    stamps = [at.strftime("%Y-%m-%dT%H:%M:%SZ") for at in (start, start + timedelta(hours=hours))]
    return "billing/usage/events?starting_on={}&ending_before={}".format(*stamps)


def session(world: World, key: str | None = None, **facts: Any) -> str:
    return str(world.post("create_session", {"tags": [], "sdk_version": "1"} | facts, key=key)["session_id"])


def train(world: World, run: str, seq: int, tokens: int, key: str | None = None) -> None:
    world.finish(world.train(batch(run, seq), key=key)["request_id"], b"x", tokens=tokens)


def events(world: World, query: str | None = None, key: str | None = None) -> list[dict[str, Any]]:
    return list(world.get(query or window(), key=key)["data"])


def test_hours_add_up_to_the_ledger(world: World) -> None:
    first, second = session(world, user_metadata={"job": 1}, project_id="p"), session(world)
    run = world.run(first)
    for seq, tokens in ((1, 7), (2, 1_234_567)):
        train(world, run, seq, tokens)
    train(world, world.run(second), 1, 3)
    bill = world.get(window())
    big, small = bill["data"]
    assert (big["event_info"], small["event_info"]) == (
        {"type": "training", "token_count": 1_234_574},
        {"type": "training", "token_count": 3},
    )
    assert {key: big[key] for key in ("base_model", "session_id", "project_id", "user_id", "user_name")} == {
        "base_model": MODEL,
        "session_id": first,
        "project_id": "p",
        "user_id": "weft:key:1",
        "user_name": world.key[:12],
    }
    assert datetime.fromisoformat(big["bucket_end"]) - datetime.fromisoformat(big["bucket_start"]) == timedelta(hours=1)
    assert big["effective_rate_usd_per_million_tokens"] == 0.4
    assert bill["sessions"] == {first: {"user_metadata": {"job": "1"}}, second: {"user_metadata": None}}
    total = sum(round(event["estimated_cost_usd"] * 10**9) for event in bill["data"])
    assert total == world.get("weft/usage")["total_nusd"] > 0


def test_samples_and_saves(world: World) -> None:
    run = world.run()
    world.checkpoint(run, 1)
    world.checkpoint(run, 2, "two")
    world.call("DELETE", f"training_runs/{run}/checkpoints/weights/two")
    unnamed = {"model_id": run, "seq_id": 3, "sampling_session_seq_id": 0}
    world.finish(world.post("save_weights_for_sampler", unnamed)["request_id"], size_bytes=5)
    body = {
        "sampling_session_id": f"{run.split(':')[0]}:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1},
    }
    world.finish(world.post("asample", body)["request_id"], b"x", prefill=2, cached_prefill=4, sample=3)
    infos = [event["event_info"] for event in events(world)]
    assert infos == [
        {"type": "sampling_prefill", "cached": True, "token_count": 4},
        {"type": "sampling_sample", "token_count": 3},
        {"type": "sampling_prefill", "cached": False, "token_count": 2},
        {"type": "checkpoint", "count": 2},
    ]


def test_the_window_and_the_organisation(world: World) -> None:
    train(world, world.run(), 1, 5)
    train(world, world.run(key=world.other_key), 1, 9, key=world.other_key)
    (event,) = events(world)
    assert event["event_info"]["token_count"] == 5
    assert events(world, window(hours=2, back=2)) == []
    assert events(world, window(hours=14 * 24, back=13 * 24)) == [event]
    assert len(events(world, key=world.other_key)) == 1


def test_however_many_sessions_it_is_told_a_part_at_a_time(world: World) -> None:
    """One answer with all sessions and their metadata took gigabytes, and blocked everybody for seconds."""
    first = session(world)
    train(world, world.run(first), 1, 7)
    metadata = {"note": "x" * 16_000}

    def write(writing: Session) -> None:
        owner, hour = writing.get_one(tables.Session, first), writing.scalars(select(tables.UsageHour)).one()
        for number in range(1000):
            name = f"{number:04}"
            row = session_row(owner.org_id, owner.created_at, name, key_id=1, user_metadata=metadata)
            writing.add(row)
            facts = {column.key: getattr(hour, column.key) for column in tables.UsageHour.__table__.columns}
            writing.add(tables.UsageHour(**facts | {"session_id": name}))

    world.database.write_now(write)
    sent: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"} if sent and not sent[-1] else await asyncio.sleep(60, {"type": ""})

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"")) if message["type"] == "http.response.body" else None

    path, _, query = window().partition("?")
    scope: Scope = {"type": "http", "method": "GET", "path": f"/api/v1/{path}", "query_string": query.encode()}
    scope.update(headers=[(b"x-api-key", world.key.encode())], app=world.http.app)
    world.http.portal.call(world.http.app, scope, receive, send)  # type: ignore[union-attr]
    bill = BillingUsageResponse.model_validate_json(b"".join(sent))
    assert (len(bill.data), len(bill.sessions)) == (1001, 1001)
    assert bill.sessions["0999"].user_metadata == metadata
    assert {event.session_id for event in bill.data} == bill.sessions.keys()
    assert max(map(len, sent)) < 5_000_000 < sum(map(len, sent))


def test_two_rates_in_one_hour_are_two_rows(world: World) -> None:
    train(world, world.run(), 1, 5)
    again = "INSERT INTO usage_hourly SELECT org_id, hour, kind, base_model, project_id, key_id, user_id, session_id, "
    again += "run_id, 'new', 500000, per_units, 2, 1000, 1 FROM usage_hourly"
    world.database.write_now(lambda writing: writing.execute(text(again)))
    rates = [
        (event["event_info"]["token_count"], event["effective_rate_usd_per_million_tokens"]) for event in events(world)
    ]
    assert rates == [(5, 0.4), (2, 0.5)]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "starting_on"),
        ("?starting_on=x&ending_before=2026-01-01T01:00:00Z", "starting_on"),
        ("?starting_on=2026-01-01T00:00:00&ending_before=2026-01-01T01:00:00", "timezone"),
        ("?starting_on=2026-01-01T00:30:00Z&ending_before=2026-01-01T02:00:00Z", "on the hour"),
        ("?starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-01T00:00:01Z", "on the hour"),
        ("?starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-15T01:00:00Z", "14 days"),
        ("?starting_on=2026-01-01T01:00:00Z&ending_before=2026-01-01T01:00:00Z", "after starting_on"),
        ("?starting_on=0001-01-01T00:00:00%2B01:00&ending_before=2026-01-01T00:00:00Z", "years 1 to 9999"),
        ("?starting_on=2026-01-01T00:00:00Z&ending_before=9999-12-31T23:00:00-01:00", "years 1 to 9999"),
        ("?starting_on=2999-01-01T00:00:00Z&ending_before=2999-01-01T01:00:00Z", "future"),
        ("?starting_on=2026-01-01T00:00:00%2B00:30&ending_before=2026-01-01T01:00:00Z", "on the hour"),
    ],
)
def test_mistakes(world: World, query: str, says: str) -> None:
    reply = world.call("GET", f"billing/usage/events{query}")
    assert reply.status_code in (400, 422)
    assert says in reply.json()["detail"]


class TestStorage:
    def stored(self, world: World, query: str = "", key: str | None = None) -> list[dict[str, Any]]:
        reply = world.get(f"billing/usage/checkpoints/current{query}", key=key)
        assert reply["effective_rate_usd_per_gigabyte_month"] == 0.1
        return list(reply["data"])

    def test_by_project_and_owner(self, world: World) -> None:
        in_project = world.run(session(world, project_id="p"))
        world.checkpoint(in_project, 1)
        world.checkpoint(in_project, 2, "two")
        elsewhere = world.run()
        world.checkpoint(elsewhere, 1)
        first, second = self.stored(world)
        assert first == {
            "project_id": "p",
            "org_user_urn": "weft:key:1",
            "user_email": None,
            "user_name": world.key[:12],
            "checkpoint_count": 2,
            "size_bytes": 14,
            "size_gigabytes": 14e-9,
            "estimated_monthly_cost_usd": 14e-9 * 0.1,
        }
        assert (second["project_id"], second["size_bytes"]) == (None, 7)
        assert self.stored(world, "?project_id=p") == [first]
        assert self.stored(world, "?project_id=default") == [second]
        assert self.stored(world, "?project_id=none") == []
        assert self.stored(world, key=world.other_key) == []

    def test_what_is_deleted_is_not_stored(self, world: World) -> None:
        run = world.run()
        world.checkpoint(run, 1)
        world.call("DELETE", f"training_runs/{run}/checkpoints/weights/one")
        assert self.stored(world) == []
