"""Sessions, money, audit and identity through the unmodified official SDK and its command line.

The server of this file exchanges keys for tokens and announces even small results, so every request here goes those
ways too."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import chdir
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd, tinker_command, weftd_command
from tests.e2e.data import ADAM, prompt, supervised
from tests.forked import run_forked

pytestmark = pytest.mark.server

CONFIG = """
pjwt_auth_enabled = true
jwt_life_s = 120
[limits]
inline_result_bytes = 500
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weftd]:
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "weft.toml").write_text(CONFIG)
    server = Weftd(folder / "data", "--config", str(folder / "weft.toml")).start()
    yield server
    assert server.stop() == 0, server.log()


@pytest.fixture(scope="module")
def worked(server: Weftd) -> str:
    """A finished session in which everything was done once: trained, saved, sampled. Returns its id."""
    service = tinker.ServiceClient(
        base_url=server.url, api_key=server.key(), user_metadata={"job": "nightly"}, project_id="night"
    )
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    backward, update = run.forward_backward(supervised(), "cross_entropy"), run.optim_step(ADAM)
    assert backward.result().metrics["loss:sum"] > 0
    update.result()
    run.save_state("done").result()
    sampler = run.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt(), 3, types.SamplingParams(max_tokens=5, stop=[])).result()
    service.close("success", "all done").result()
    return str(run.model_id.split(":")[0])


def rest(server: Weftd, organisation: str = "acme") -> Any:
    return tinker.RestClient(base_url=server.url, api_key=server.key(organisation))


def admin(server: Weftd, organisation: str = "acme") -> Any:
    return tinker.AdminClient(base_url=server.url, api_key=server.key(organisation))


def cli(server: Weftd, *arguments: str, key: str | None = None, cwd: Path | None = None) -> str:
    with chdir(cwd or Path.cwd()):
        done = tinker_command(server, *arguments, key=key)
    assert done.returncode == 0, done.stderr
    return done.stdout


def window() -> tuple[str, str]:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    return start.isoformat().replace("+00:00", "Z"), (start + timedelta(hours=3)).isoformat().replace("+00:00", "Z")


def ledger(server: Weftd) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}/api/v1/weft/usage", headers={"x-api-key": server.key()})
    return dict(reply.json())


def test_a_session_and_its_parts(server: Weftd, worked: str) -> None:
    client = rest(server)
    details = client.get_session(worked).result()
    assert details.training_run_ids == [f"{worked}:train:0"]
    assert details.sampler_ids == [f"{worked}:sample:0"]
    assert details.user_metadata == {"job": "nightly"}
    assert worked in client.list_sessions().result().sessions
    assert worked not in rest(server, "rival").list_sessions(access_scope="accessible").result().sessions


def test_search_and_projects(server: Weftd, worked: str) -> None:
    client = rest(server)
    request = types.SessionSearchRequest(user_metadata={"job": "nightly"}, project_ids=["night"])
    (found,) = client.search_sessions(request).result().sessions
    assert (found.session_id, found.project_id, found.checkpoints_count) == (worked, "night", 1)
    assert (found.status.type, found.status.reason.type, found.status.detail) == (
        "client_finished", "success", "all done",
    )  # fmt: skip
    assert found.checkpoint_storage_bytes > 0
    client.assign_session_project(worked, "day").result()
    assert client.search_sessions(request).result().sessions == []
    client.assign_session_project(worked, "night").result()
    with pytest.raises(tinker.NotFoundError):
        rest(server, "rival").assign_session_project(worked, "mine").result()


def test_search_in_pages(server: Weftd) -> None:
    key = {"x-api-key": server.key("pages")}
    body = {"tags": [], "sdk_version": "1", "display_name": "page"}
    for _ in range(5):
        httpx.post(f"{server.url}/api/v1/create_session", json=body, headers=key)
    client, found, cursor = rest(server, "pages"), [], None
    while True:
        page = client.search_sessions(types.SessionSearchRequest(limit=2, cursor=cursor)).result()
        found += [session.session_id for session in page.sessions]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert len(set(found)) == len(found) == 5


def test_usage_agrees_with_the_ledger_to_the_nano_dollar(server: Weftd, worked: str) -> None:
    usage = admin(server).get_billing_usage(*window()).result()
    total = sum(round(event.estimated_cost_usd * 10**9) for event in usage.data if event.estimated_cost_usd is not None)
    assert total == ledger(server)["total_nusd"] > 0
    kinds = {event.event_info.type for event in usage.data if event.session_id == worked}
    kinds -= {"storage"}  # at the end of an hour
    assert kinds == {"training", "sampling_prefill", "sampling_sample", "checkpoint"}
    assert usage.sessions[worked].user_metadata == {"job": "nightly"}
    assert {event.project_id for event in usage.data if event.session_id == worked} == {"night"}
    assert admin(server, "poor").get_billing_usage(*window()).result().data == []
    rows = list(csv.DictReader(io.StringIO(cli(server, "billing", "usage", *window(), "--csv", "-"))))
    assert sum(round(float(row["estimated_cost_usd"] or 0) * 10**9) for row in rows) == total
    assert sum(int(row["token_count"] or 0) for row in rows) == sum(r["tokens"] for r in ledger(server)["rows"])


def test_stored_checkpoints(server: Weftd, worked: str) -> None:
    (item,) = admin(server).get_current_checkpoint_storage_usage("night").result().data
    assert (item.checkpoint_count, item.project_id) == (1, "night")
    (listed,) = rest(server).list_checkpoints(f"{worked}:train:0").result().checkpoints
    assert item.size_bytes == listed.size_bytes
    shown = json.loads(cli(server, "-f", "json", "billing", "checkpoint-storage"))
    assert shown["data"][0]["size_bytes"] == item.size_bytes


def test_the_audit_log(server: Weftd, worked: str) -> None:
    entries = admin(server).get_audit_log("checkpoints").result().entries
    (created,) = [e for e in entries if e.event == "checkpoint_created" and e.model_id == f"{worked}:train:0"]
    assert created.tinker_path == f"tinker://{worked}:train:0/weights/done"
    everything = [e.event for e in admin(server).get_audit_log().result().entries]
    assert {"key_created", "session_created", "session_finished"} <= set(everything)
    assert admin(server, "poor").get_audit_log("checkpoints").result().entries == []


def test_a_trace_is_exported_and_opens(server: Weftd, worked: str, tmp_path: Path) -> None:
    url = rest(server).export_session_trace(worked).result()
    assert httpx.get(url).status_code == 200  # the link needs no key
    assert httpx.get(url.replace("signature=", "signature=0")).status_code == 403
    cli(server, "session", "export-trace", worked, cwd=tmp_path)
    packets = Trace.FromString((tmp_path / f"{worked}.pftrace").read_bytes()).packet
    names = {packet.track_event.name for packet in packets if packet.track_event.name}
    assert {"create 0", "forward_backward 1", "optim_step 2", "sample 0", "queued", "compute", "commit"} <= names
    computed = [packet.track_event for packet in packets if packet.track_event.name == "compute"]
    assert all({"runs", "tenants"} <= {a.name for a in event.debug_annotations} for event in computed)


def test_who_asks(server: Weftd) -> None:
    me = rest(server).whoami().result()
    assert me.user_urn.startswith("weft:key:")
    assert me.org_urn.startswith("tml:organization:")
    assert me.email is None
    assert me.user_urn in cli(server, "auth", "whoami")
    cli(server, "auth", "status")
    assert rest(server, "rival").whoami().result().org_urn != me.org_urn


def test_log_in_and_out(server: Weftd, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TINKER_API_KEY"}
    env |= {"TINKER_BASE_URL": server.url, "HOME": str(tmp_path)}

    def tinker_auth(command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run_forked("-m", "tinker.cli", "auth", command, env=env, stdin=stdin)

    wrong = tinker_auth("login", "tml-wrong\n")
    assert wrong.returncode != 0
    assert "unknown or revoked" in wrong.stdout + wrong.stderr
    entered = tinker_auth("login", server.key() + "\n")
    assert entered.returncode == 0, entered.stdout + entered.stderr
    assert "(acme)" in entered.stdout
    assert "weft:key:" in tinker_auth("whoami").stdout
    assert tinker_auth("logout").returncode == 0
    assert tinker_auth("whoami").returncode != 0


def test_a_token_is_a_key(server: Weftd, worked: str) -> None:
    token = httpx.post(f"{server.url}/api/v1/auth/token", headers={"x-api-key": server.key()}).json()["jwt"]
    headers = {"x-api-key": token}
    assert httpx.get(f"{server.url}/api/v1/sessions/{worked}", headers=headers).is_success
    refused = httpx.get(f"{server.url}/api/v1/sessions/{worked}", headers={"x-api-key": token[:-3] + "abc"})
    assert refused.status_code == 401
    assert 'error="invalid_token"' in refused.headers["www-authenticate"]


def test_a_revoked_key_ends_its_tokens_within_seconds(server: Weftd) -> None:
    key = server.key("leaving")
    token = httpx.post(f"{server.url}/api/v1/auth/token", headers={"x-api-key": key}).json()["jwt"]
    sessions = f"{server.url}/api/v1/sessions"
    assert httpx.get(sessions, headers={"x-api-key": token}).is_success
    assert weftd_command("key", "revoke", "--data-dir", server.data_dir, key[:12]).returncode == 0
    time.sleep(4)
    for credential in (key, token):
        assert httpx.get(sessions, headers={"x-api-key": credential}).status_code == 401


def test_a_heartbeat_after_the_end_is_410(server: Weftd, worked: str) -> None:
    headers = {"x-api-key": server.key()}
    reply = httpx.post(f"{server.url}/api/v1/session_heartbeat", json={"session_id": worked}, headers=headers)
    assert reply.status_code == 410


def test_the_sdk_s_telemetry_is_kept(server: Weftd) -> None:
    script = (
        "import tinker, sys\n"
        "service = tinker.ServiceClient()\n"
        f"service.create_sampling_client(base_model={BASE_MODEL!r}).result()\n"
        "service.close('success').result()\n"
    )
    env = os.environ | {
        "TINKER_TELEMETRY": "1", "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key("talkative"),
    }  # fmt: skip
    done = run_forked("-c", script, env=env)
    assert done.returncode == 0, done.stderr
    lines = [line for path in (server.data_dir / "telemetry").rglob("*.jsonl") for line in path.open()]
    assert "SESSION_START" in {json.loads(line)["event"]["event"] for line in lines}


def test_idle_sessions_are_ended(tmp_path: Path) -> None:
    (tmp_path / "weft.toml").write_text("session_idle_s = 5\n")
    server = Weftd(tmp_path / "data", "--config", str(tmp_path / "weft.toml")).start()
    try:
        headers = {"x-api-key": server.key()}
        api = f"{server.url}/api/v1"
        body = {"tags": [], "sdk_version": "1"}
        idle, alive = (
            httpx.post(f"{api}/create_session", json=body, headers=headers).json()["session_id"] for _ in range(2)
        )
        for _ in range(120):  # if the server stalls for some seconds, the session waits longer
            assert httpx.post(f"{api}/session_heartbeat", json={"session_id": alive}, headers=headers).is_success
            if "ended 1 idle sessions" in server.log():
                break
            time.sleep(0.5)
        status = httpx.post(f"{api}/session_heartbeat", json={"session_id": idle}, headers=headers).status_code
        assert status == 410
    finally:
        assert server.stop() == 0
