"""`weftd serve`: one line on stdout when it serves, one on stderr when it cannot, exit code 0 after a drain."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from api.cli import weftd as command
from api.server.serve import Away, CannotServe, _serve, only_one, open_database
from billing.prices import load_prices
from store import tables
from store.database.db import Database
from store.load_settings import load_settings
from store.settings import Settings
from tests.api.stand_in import ROOT, operators_weftd, refused, serving, weftd
from tests.servers import free_port


@pytest.mark.parametrize(
    ("url", "error"), [("postgresql://w:w@127.0.0.1:{}/weft", Away), ("sqlite:///no/such/{}/weft.db", CannotServe)]
)
def test_a_database_that_does_not_answer_is_no_mistake_in_the_settings(
    tmp_path: Path, url: str, error: type[CannotServe]
) -> None:
    url = url.format(free_port())
    with pytest.raises(CannotServe, match="database_url") as refused:
        open_database(Settings(data_dir=tmp_path, database_url=url))
    assert type(refused.value) is error


@pytest.mark.parametrize(("error", "code"), [(Away, 1), (CannotServe, 2)])
def test_what_may_be_there_later_has_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[CannotServe], code: int
) -> None:
    """deploy/weftd.service starts it again after the one, and not after the other."""
    monkeypatch.setattr("api.server.serve.serve", Mock(side_effect=error("no answer")))
    found = CliRunner().invoke(command, ["serve", "--data-dir", str(tmp_path)])
    assert (found.exit_code, found.output) == (code, "weftd: no answer\n")


def test_serves_until_sigterm_and_drains(tmp_path: Path) -> None:
    with serving(tmp_path / "new" / "data", start=operators_weftd) as (process, url):
        with urllib.request.urlopen(f"{url}/models") as answer:
            assert answer.read() == b'["weft/tiny-moe"]'
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "drained ['exited with code 0', 'exited with code 0']" in err


def test_a_client_that_comes_while_the_server_starts_is_kept_waiting(tmp_path: Path) -> None:
    """A refused client would stay away for as long as its growing pause."""
    port, go = free_port(), tmp_path / "go"
    process = operators_weftd("serve", "--data-dir", str(tmp_path / "data"), "--port", str(port), mode=str(go))
    try:
        client, deadline = None, time.monotonic() + 60
        while client is None:
            assert time.monotonic() < deadline
            assert process.poll() is None
            with suppress(ConnectionRefusedError):
                client = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"GET /models HTTP/1.1\r\nHost: weft\r\nConnection: close\r\n\r\n")
        go.touch()
        client.settimeout(60)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
        client.close()
        assert answer.endswith(b'["weft/tiny-moe"]')
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_drains_too(tmp_path: Path) -> None:
    with serving(tmp_path, start=operators_weftd) as (process, _):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_a_long_poll_does_not_hold_up_the_drain(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
            client.sendall(b"GET /poll HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            time.sleep(0.3)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert b"try again" in b"".join(iter(lambda: client.recv(1000), b""))
        process.communicate(timeout=60)
        assert time.monotonic() - started < 4
    assert process.returncode == 0


def test_a_signal_while_it_starts_ends_it_in_peace(tmp_path: Path) -> None:
    process = operators_weftd("serve", "--data-dir", str(tmp_path), "--port", "0")
    while not (tmp_path / "weft.db").exists():
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM), err
    assert out == ""


def test_a_data_folder_has_one_server(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, _):
        message = refused("serve", "--data-dir", str(tmp_path), "--port", "0")
        says = f"another weftd (process {process.pid}) serves the data folder {tmp_path}"
        assert message == f"weftd: {says}: end that, or name another folder\n"
        process.kill()
        process.wait()
    with serving(tmp_path):
        pass  # a killed server leaves no lock behind


def test_of_two_that_make_a_folder_at_the_same_moment_who_is_refused_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with only_one(tmp_path / "data"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "exists", lambda self: False)  # until both have looked
            with pytest.raises(CannotServe, match="another weftd"), only_one(tmp_path / "data"):
                pass
        assert (tmp_path / "data" / "server.lock").exists()
    assert not (tmp_path / "data").exists()


def test_a_disk_that_is_full_while_a_server_starts_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(CannotServe, match=f"folder {tmp_path}: No space left"), only_one(tmp_path):
            pass
    with only_one(tmp_path):
        pass
    open_database(settings := load_settings(None, data_dir=tmp_path)).close()
    with sqlite3.connect(tmp_path / "weft.db") as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON wallet_defaults BEGIN SELECT RAISE(ABORT, 'full'); END")
    with socket.socket() as sock, pytest.raises(CannotServe, match=f"cannot use the database of {tmp_path}: full$"):
        _serve(settings, {}, load_prices(settings.prices), sock, None, None, [])
    (tmp_path / "weft.db").rename(tmp_path / "old")
    (tmp_path / "weft.db").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(CannotServe, match="open database file; the disk of this folder is full: make room"):
        open_database(settings)


def test_a_database_that_is_none_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "weft.db").write_text("hello")
    with pytest.raises(CannotServe, match=f"of {tmp_path}: file is not a database; put the right weft.db back, or"):
        open_database(load_settings(None, data_dir=tmp_path))


def test_a_server_on_a_disk_without_room_says_so_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(None, data_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5 << 20))
    monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=CannotServe("far enough")))
    with socket.socket() as sock, pytest.raises(CannotServe, match="far enough"):
        _serve(settings, {}, load_prices(settings.prices), sock, None, None, [])
    assert "nearly full (5 MiB free, 128 are needed): nothing new is accepted" in caplog.text


@pytest.mark.parametrize("name", ["port", "metrics_port"])
def test_a_taken_port_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / "weft.toml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(f"data_dir = 'data'\n{name} = {port}\n" + ("port = 0\n" if name != "port" else ""))
        message = refused("serve", "--config", str(file))
    says = f"cannot listen on 127.0.0.1 port {port}: Address already in use"
    assert message == f"weftd: {says}; end what listens there, or take another port\n"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("unbilled", ["storage", "operation", ""])
def test_a_price_list_that_begins_after_what_is_not_billed_yet_is_refused(tmp_path: Path, unbilled: str) -> None:
    """Such as when the built-in list is replaced by one that begins today: earlier work could then never be billed."""
    with serving(tmp_path):
        pass
    database, day = Database(f"sqlite:///{tmp_path / 'weft.db'}"), datetime(2026, 3, 1, tzinfo=UTC)
    row: dict[str, Any] = {"id": "x", "org_id": "o", "session_id": "s", "base_model": "m"}
    if unbilled == "operation":
        row |= {
            "lane": "l",
            "seq": 1,
            "kind": "forward",
            "state": "queued",
            "tokens": 1,
            "body_ref": "",
            "body_sha256": "",
        }
        add: Any = tables.Operation(**row, plan={}, accepted_at=day)
    else:
        row |= {"checkpoint_id": "c", "run_id": "r", "size_bytes": 1}
        add = tables.StorageSpan(**row, started_at=day, metered_until=day)
    if unbilled:
        database.write_now(lambda session: session.add(tables.Organisation(id="o", name="acme", created_at=day)))
        database.write_now(lambda session: session.add(add))
    database.close()
    file = tmp_path / "weft.toml"
    rates = "train = 1\nprefill = 1\ncached_prefill = 1\nsample = 1"
    file.write_text(f"[[prices]]\nversion = 'x'\neffective_from = 2026-03-02T00:00:00Z\n[prices.models.'*']\n{rates}\n")
    if unbilled:
        line = refused("serve", "--data-dir", str(tmp_path), "--config", str(file), "--port", "0")
        assert re.fullmatch(
            r"weftd: prices: what is not billed yet goes back to 2026-03-01T[^\n]+ 2026-03-02T[^\n]+\n", line
        )
    file.write_text(file.read_text().replace("2026-03-02", "2026-03-01"))
    with serving(tmp_path, "--config", str(file)):
        pass


#: Prints the modules that the real app, without workers, has loaded when it listens.
LISTENS = """
import json, sys
import api.server.workers.machines, api.server.serve
from api.server.listener import Server
api.server.serve.embedded_workers = lambda settings, models: []
api.server.workers.machines.embedded_workers = lambda settings, models: []
startup = Server.startup
async def listens(self, sockets=None):
    await startup(self, sockets)
    if self.started:
        print(json.dumps(sorted(sys.modules)), flush=True)
        self.should_exit = True
Server.startup = listens
from api.cli import main
main()
"""
#: Modules that a starting server does not need yet; most take longer to load than all of ours.
LATER = {"alembic", "authlib", "celery", "httpx", "obstore", "psycopg", "redis", "requests", "rich", "stripe", "torch"}
LATER |= {"matplotlib", "peft", "prometheus_client", "transformers", "triton", "vllm"}


def test_a_server_that_starts_again_loads_nothing_that_can_wait(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LISTENS, "serve", "--data-dir", str(tmp_path), "--port", "0"]
    for _ in range(2):  # the first start makes the tables
        out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=True).stdout
    loaded = {name.partition(".")[0] for name in json.loads(out.splitlines()[0])}
    assert {"api", "fastapi", "sqlalchemy"} <= loaded
    assert not loaded & LATER


def test_workers_that_never_come_up_end_the_server(tmp_path: Path) -> None:
    process = weftd("serve", "--data-dir", str(tmp_path), "--port", "0", mode="worker")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert re.search(r"weftd: the (trainer|generator) did not come up in \d starts: it exited with code 9\n$", err)


def test_an_app_that_cannot_start_is_told(tmp_path: Path) -> None:
    process = weftd("serve", "--data-dir", str(tmp_path), "--port", "0", mode="app")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "the app cannot start" in err
