"""What an organisation may keep at a time. Beyond it requests are refused with 429, which names quota, limit, value and
what helps, and nothing of a refused request remains."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from sqlalchemy import select

from api.routes.openai import turns
from api.routes.openai.turns import PAGE_BYTES
from api.state.service import ComingTurn
from billing.metering.quotas import QUOTAS
from billing.metering.storage import meter
from store import tables
from store.people import organisations
from tests.api.conftest import MODEL, World
from tests.api.test_custom_loss import body as loss
from tests.api.test_money_cli import run as weftd
from tests.tenancy.conftest import org_id_of

FINISH = {"reason": {"type": "success"}, "detail": None}


def set_quota(world: World, **values: int | None) -> None:
    def write(session: Any) -> None:
        organisations.set_quotas(session, session.get_one(tables.Organisation, org_id_of(world)), values)

    world.database.write_now(write)


def refused(world: World, path: str, body: dict[str, Any]) -> str:
    reply = world.call("POST", path, json=body)
    assert (reply.status_code, reply.json()["code"]) == (429, "quota_reached"), reply.text
    assert reply.headers["retry-after"] == "10"
    assert reply.headers["x-weft-limit-scope"] == "organisation"
    return str(reply.json()["detail"])


def test_quota_of_runs(world: World) -> None:
    session = world.session()
    set_quota(world, runs=2)
    world.run(session, 0)
    world.run(session, 1)
    body = {"session_id": session, "model_seq_id": 2, "base_model": "test/model:peft:64", "type": "create_model"}
    told = refused(world, "create_model", body)
    assert "quota runs is 2: 2 runs are live, and this would be 1 more; end sessions whose runs are done" in told
    other = world.session()
    refused(world, "create_model", body | {"session_id": other, "model_seq_id": 0})
    for seq in (0, 1):
        world.finish(world_op(world, f"{session}:train:{seq}"))
    world.post(f"sessions/{session}/finish", FINISH)
    world.finish("none")  # and what waits in the background is stored
    world.run(other)
    world.run(key=world.other_key)


def world_op(world: World, lane: str) -> str:
    with world.database.read() as session:
        return session.scalars(select(tables.Operation.id).filter_by(lane=lane, seq=0)).one()


def test_many_runs_at_once_do_not_pass_it_together(world: World) -> None:
    session = world.session()
    set_quota(world, runs=3)

    async def create(number: int) -> Any:
        body = {"session_id": session, "model_seq_id": number, "base_model": "test/model:peft:64"}
        return await asyncio.to_thread(world.call, "POST", "create_model", json=body | {"lora_config": {"rank": 4}})

    async def all_at_once() -> list[int]:
        return [reply.status_code for reply in await asyncio.gather(*(create(number) for number in range(8)))]

    assert sorted(asyncio.run(all_at_once())) == [200] * 3 + [429] * 5


def test_sessions(world: World) -> None:
    set_quota(world, sessions=1)
    session = world.session()
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
    assert "quota sessions is 1: 1 sessions are active" in refused(world, "create_session", body)
    world.session(world.other_key)
    world.post(f"sessions/{session}/finish", FINISH)
    world.session()


def test_custom_losses(world: World) -> None:
    session = world.session()
    set_quota(world, custom_losses=1)
    world.post("create_custom_loss", loss(session))
    assert "quota custom_losses is 1: 1 uploaded losses" in refused(world, "create_custom_loss", loss(session, 1))
    world.post("create_custom_loss", loss(session))  # a repeat adds nothing
    world.post(f"sessions/{session}/finish", FINISH)
    # Losses of a session that has just ended still count.
    refused(world, "create_custom_loss", loss(world.session()))


def test_stored_bytes_count_what_is_queued_and_what_has_no_name(world: World) -> None:
    run = world.run()
    spec_bytes = stored_by(world, run, "save_weights_for_sampler", 1, sampling_session_seq_id=1)
    set_quota(world, stored_bytes=3 * spec_bytes)
    second = world.post("save_weights_for_sampler", unnamed(run, 2))["request_id"]  # queued
    third = world.post("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "path": "x"})["request_id"]
    told = refused(world, "save_weights_external", {"model_id": run, "seq_id": 4, "path": "y"})
    assert f"quota stored_bytes is {3 * spec_bytes}: {3 * spec_bytes} bytes are stored or about to be" in told
    assert "delete checkpoints" in told
    world.finish(second, size_bytes=0)
    world.finish(third, size_bytes=spec_bytes)
    world.post("save_weights_external", {"model_id": run, "seq_id": 4, "path": "y"})  # the same number
    path = world.outcome(third).json()["path"]
    copy = {"source_path": path, "destination_project_id": "default"}
    assert "stored_bytes" in refused(world, "copy_weights", copy)
    set_quota(world, stored_bytes=None)
    world.post("copy_weights", copy)


def test_a_save_larger_than_the_quota_fails_for_good_and_spends_its_number(world: World) -> None:
    run = world.run()
    body = {"model_id": run, "seq_id": 1, "path": "x"}
    set_quota(world, stored_bytes=10)
    reply = world.call("POST", "save_weights_external", json=body)
    assert (reply.status_code, reply.json()["code"]) == (413, "quota_reached"), reply.text
    assert "retry-after" not in reply.headers
    told = reply.json()["detail"]
    assert told.startswith("the organisation's quota stored_bytes is 10, and this alone would be ")
    assert "weftd org quota" in told
    set_quota(world, stored_bytes=None)
    again = world.post("save_weights_external", body)["request_id"]  # it has its outcome
    assert world.outcome(again).json()["error"] == told
    saved = world.post("save_weights_external", body | {"seq_id": 2})["request_id"]
    world.finish(saved, size_bytes=10)
    assert world.outcome(saved).json()["path"]


def unnamed(run: str, seq: int, **fields: Any) -> dict[str, Any]:
    return {"model_id": run, "seq_id": seq, "sampling_session_seq_id": seq, **fields}


def stored_by(world: World, run: str, path: str, seq: int, **fields: Any) -> int:
    request_id = world.post(path, {"model_id": run, "seq_id": seq, **fields})["request_id"]
    size = world.operation(request_id).stores_bytes
    assert size > 0
    world.finish(request_id, size_bytes=size)
    return size


def open_spans(world: World) -> dict[str, int]:
    with world.database.read() as session:
        spans = session.scalars(select(tables.StorageSpan).filter_by(ended_at=None)).all()
    return {span.checkpoint_id: span.size_bytes for span in spans}


def test_samplers_without_a_name_are_billed_while_they_live(world: World) -> None:
    run = world.run()
    saves = [world.post("save_weights_for_sampler", unnamed(run, seq))["request_id"] for seq in (1, 2)]
    for request_id in saves:
        world.finish(request_id, size_bytes=700)
    assert open_spans(world) == dict.fromkeys(saves, 700)
    inflight = []
    for seq in (3, 4):  # the second one replaces the first
        inflight.append(world.post("save_weights_for_sampler", unnamed(run, seq, kind="inflight"))["request_id"])
        world.finish(inflight[-1], size_bytes=900)
    assert open_spans(world) == dict.fromkeys(saves, 700) | {inflight[1]: 900}
    meter(world.database, world.service.prices, datetime.now(UTC))  # which ends samplers without an owner
    assert len(open_spans(world)) == 3
    meter(world.database, world.service.prices, datetime.now(UTC) + timedelta(hours=2))
    with world.database.read() as session:
        billed = session.scalars(select(tables.UsageEvent.quantity).filter_by(run_id=run, kind="storage")).all()
    assert sum(billed) >= 700 + 700 + 900  # at least an hour of each
    world.post(f"sessions/{run.partition(':')[0]}/finish", FINISH)
    assert open_spans(world) == {}


def test_a_span_that_was_left_open_ends_with_its_samplers(world: World) -> None:
    """Such a span is left if another version of the server has ended the session."""
    run = world.run()
    request_id = world.post("save_weights_for_sampler", unnamed(run, 1))["request_id"]
    world.finish(request_id, size_bytes=700)

    def end(session: Any) -> None:
        session.get_one(tables.Session, run.partition(":")[0]).state = "finished"

    world.database.write_now(end)
    meter(world.database, world.service.prices, datetime.now(UTC))
    assert open_spans(world) == {}


def test_turns_of_sessions_that_clients_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are stored count, and those under way at their largest; a refused request is not sampled."""
    org_id = org_id_of(world)

    def keep(number: int, size_bytes: int) -> None:
        row = tables.SessionTurn(
            org_id=org_id, name="mine", request_id=f"r{number}", ref=f"turns/x/r{number}", size_bytes=size_bytes,
            created_at=datetime.now(UTC),
        )  # fmt: skip
        turn = {"request_id": f"r{number}", "choice": 0, "model": "m", "at": 0.0, "prompt": [1], "tokens": [2]}
        turn |= {"logprobs": [-1.0], "versions": [], "stop_reason": "stop"}
        world.service.blobs.put(row.ref, zstandard.compress(msgspec.msgpack.encode([turn])))
        world.database.write_now(lambda session: session.add(row))

    def ask(**body: Any) -> Any:
        asked = {"model": MODEL, "prompt": [1, 2], "max_tokens": 4, **body}
        headers = {"x-api-key": world.key, "x-session-id": "mine"}
        return world.http.post("/v1/completions", json=asked, headers=headers)

    keep(1, 3000)
    set_quota(world, turn_bytes=5000)
    reply = ask(n=2)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "quota_reached")
    told = reply.json()["error"]["message"]
    assert "quota turn_bytes is 5000: 3000 bytes of turns are kept or being sampled, and this would be 2" in told
    assert "sample without X-Session-ID" in told
    set_quota(world, turn_bytes=3000 + 1200)
    world.service.turns_coming.add(ComingTurn(org_id, 500))
    assert "3500 bytes of turns" in ask().json()["error"]["message"]
    assert len(world.service.turns_coming) == 1, "what was refused is not coming"
    assert ask(temperature=-1).status_code == ask(model="nobody's").status_code - 4 == 400
    monkeypatch.setattr(turns, "MOST_READ", 3)
    reply = ask(n=2)
    assert (reply.status_code, "would have 4 tokens of prompts" in reply.json()["error"]["message"]) == (400, True)
    # An answer that lists them has at most so many bytes, and says where the next one begins.
    keep(2, PAGE_BYTES)
    keep(3, PAGE_BYTES)
    after, seen = 0, []
    while after is not None:
        page = world.get(f"weft/turns/mine?after={after}")
        seen.append([turn["request_id"] for turn in page["turns"]])
        after = page["next"]
    assert seen == [["r1"], ["r2"], ["r3"]]


def test_quota_of_archives(world: World) -> None:
    run = world.run()
    path = world.checkpoint(run, 1)
    with world.database.read() as session:
        ref = session.scalars(select(tables.Checkpoint.ref)).one()
    with world.service.blobs.new_folder(ref) as folder:
        (folder / "README.md").write_text("as a file")
    url = path.replace("tinker://", "training_runs/").replace("/weights/", "/checkpoints/weights/") + "/archive"
    set_quota(world, archive_bytes=1)
    reply = world.call("GET", url, follow_redirects=False)
    assert (reply.status_code, reply.json()["code"]) == (413, "quota_reached")
    assert "this alone would be 7" in reply.json()["detail"]
    set_quota(world, archive_bytes=None)
    assert world.call("GET", url, follow_redirects=False).status_code == 302
    set_quota(world, archive_bytes=1)
    assert world.call("GET", url, follow_redirects=False).status_code == 302  # it exists


def test_the_operator_sets_and_sees_them(tmp_path: Path) -> None:
    weftd(tmp_path, "org", "create", "acme")
    shown = weftd(tmp_path, "org", "quota", "acme").output.splitlines()
    assert [line.split("\t")[0] for line in shown] == list(QUOTAS)
    assert "runs\t4096\t0\tdefault" in shown
    changed = weftd(tmp_path, "org", "quota", "acme", "--set", "runs=7", "--set", "stored_bytes=0").output
    assert "runs\t7\t0\tset" in changed
    assert "stored_bytes\t0\t0\tset" in changed
    assert "runs\t4096\t0\tdefault" in weftd(tmp_path, "org", "quota", "acme", "--set", "runs=default").output
    for wrong in ("rums=1", "runs=-1", "runs=", "runs=1.5"):
        assert weftd(tmp_path, "org", "quota", "acme", "--set", wrong).exit_code == 2


@pytest.mark.parametrize("name", sorted(QUOTAS))
def test_every_quota_has_a_default(world: World, name: str) -> None:
    assert world.service.settings.limits.model_dump()[QUOTAS[name].default] > 0
