"""The command weftd: one line on stdout when it serves, one line on stderr when it cannot, exit code 0 after a drain.

The app behind it is a stand-in with stub workers, so these tests are about the command alone."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner
from weft.version import __version__

from api.cli import COMMANDS, main, weftd as command
from api.server.serve import Away, CannotServe, _serve, only_one, open_database
from billing.prices import load_prices
from store import tables
from store.database.db import Database
from store.load_settings import load_settings
from store.people import keys
from store.settings import Settings
from tests.forked import Forked
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]

#: A worker that says hello after a while and leaves when told. `MODE` is what the test wants to go wrong, or a file
#: that the server waits for before it is built.
STAND_IN = """
import asyncio, os, sys, time, types
from contextlib import asynccontextmanager
from fastapi import FastAPI
from api.server.workers import supervisor as s
s.START_ATTEMPTS = 2
from api.server.workers.nursery import Nursery
Nursery.ahead = lambda nursery: None  # the real ones
mode = os.environ.get("MODE", "")
WORKER = '''
import socket, sys, time
link = socket.socket(fileno=int(sys.argv[-1]))
time.sleep(0.3)
link.sendall(b"hello")
link.recv(10)
'''
if mode == "worker":
    WORKER = "raise SystemExit(9)"

def create_app(settings, cards, database, blobs, prices):
    while mode and not mode[:1].isalpha() and not os.path.exists(mode):
        time.sleep(0.05)
    links = []
    async def attach(role, sock):
        links.append(sock)
        while await asyncio.get_running_loop().sock_recv(sock, 10):
            pass
        sock.close()
    @asynccontextmanager
    async def lifespan(app):
        if mode == "app":
            raise ValueError("the app cannot start")
        workers = [s.WorkerProgram(role, [sys.executable, "-c", WORKER]) for role in ("trainer", "generator")]
        supervisor = s.Supervisor(workers, attach)
        app.state.ready = supervisor.wait_attached
        supervisor.start()
        yield
        supervisor.retire()
        for link in links:
            link.send(b"bye")
        await supervisor.stop(settings.drain_s)
        print("drained", [w.last_exit for w in supervisor.status()], file=sys.stderr)
    app = FastAPI(lifespan=lifespan)
    poll = asyncio.Event()
    app.state.stopping = poll.set
    @app.get("/models")
    async def models():
        return sorted(cards)
    @app.get("/poll")
    async def long_poll():
        await poll.wait()
        return "try again"
    return app

app = types.ModuleType("api.server.app")
app.create_app = create_app
sys.modules["api.server.app"] = app
from api.cli import main
main()
"""


def weftd(*arguments: str, mode: str = "") -> Forked:
    """Run `weftd` in a forked process; its start as a program is tested by `operators_weftd`."""
    return Forked("-c", STAND_IN, *arguments, env={**os.environ, "MODE": mode})


def operators_weftd(*arguments: str, mode: str = "") -> subprocess.Popen[str]:
    """Run `weftd` as a process that imports everything by itself."""
    return subprocess.Popen(
        [sys.executable, "-c", STAND_IN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MODE": mode},
        cwd=ROOT,
    )


Process = Forked | subprocess.Popen[str]
Start = Callable[..., Process]


@contextmanager
def serving(data_dir: Path, *arguments: str, start: Start = weftd) -> Iterator[tuple[Process, str]]:
    process = start("serve", "--data-dir", str(data_dir), "--port", "0", *arguments)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert re.fullmatch(r"ready http://127\.0\.0\.1:[1-9]\d*\n", line), (
            line,
            process.stderr and process.stderr.read(),
        )
        yield process, line.split()[1]
    finally:
        process.kill()
        process.wait()


def refused(*arguments: str, mode: str = "") -> str:
    """The one line that a refused command prints."""
    process = weftd(*arguments, mode=mode)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, ""), err
    return err


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


@pytest.mark.parametrize("name", ["migrate", "jobs worker", "jobs beat", "key create --org x", "backup to"])
def test_every_command_says_that_its_database_may_be_there_later(tmp_path: Path, name: str) -> None:
    config = tmp_path / "weft.toml"
    config.write_text(f'database_url = "postgresql+psycopg://w:w@127.0.0.1:{free_port()}/weft"\ndata_dir = "data"\n')
    found = CliRunner().invoke(command, [*name.split(), "--config", str(config)])
    assert (found.exit_code, found.output.count("\n")) == (1, 1), found.output


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, Away), (errno.ESTALE, Away), (errno.EACCES, CannotServe), (errno.EROFS, CannotServe)],
)
def test_a_folder_without_room_is_no_mistake_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[CannotServe]
) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(number, "no")))
    with pytest.raises(CannotServe) as refused, only_one(tmp_path):
        pass
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


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (["--model", "m=/nonexistent/folder"], "", "/nonexistent/folder"),
        (["--model", "m"], "", "not NAME=PATH"),
        (["--model", "m=/a", "--model", "m=/b"], "", "named twice"),
        (["--prot", "1"], "", "--prot"),
        (["--host", "no.such.host.invalid"], "", r"no\.such\.host\.invalid: .*; host is an address of this machine"),
        (
            ["--host", "192.0.2.1"],
            "",
            "cannot listen on 192.0.2.1 .*; host is an address of this machine, or 0.0.0.0 for",
        ),
        ([], "prot = 1", "prot"),
        ([], "[[prices]]\nversion = 'x'", "effective_from"),
        ([], "database_url = 'sqlite:////nonexistent/weft.db'", "unable to open"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: Sequence[str], config: str, message: str) -> None:
    file = tmp_path / "weft.toml"
    file.write_text(config)
    line = refused("serve", "--data-dir", str(tmp_path), "--config", str(file), "--port", "0", *arguments)
    assert re.search(message, line)
    assert re.fullmatch(r"weftd: [^\n]+\n", line)


LONG, NOT_UTF8 = "n" * 300, os.fsdecode(b"\xff\xfe")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["backup", ""], "TARGET: name a new folder"),
        (["backup", "/"], "TARGET: name a new folder"),
        (["backup", LONG], "n{300}: File name too long"),
        (["org", "list", "--data-dir", LONG], "n{300}.*: File name too long"),
        (["credit", "grant", "--org", NOT_UTF8, "--usd", "1"], r"'\\udcff\\udcfe' is not UTF-8"),
        (["tco", "--gpu-hour", "nan"], "--gpu-hour.*nan"),
        (["tco", "--gpu-hour", "inf"], "--gpu-hour.*inf"),
        (["simulate", "--hours", "nan"], "--hours.*nan"),
        (["simulate", "--plot", "waits.pdf"], r"--plot: name a file that ends in \.png or \.svg"),
        (["plan", "--model", "m", "--gpu-gib", "nan"], "--gpu-gib.*nan"),
        (["tco", "--gpu-hour", "1e308"], r"--gpu-hour.*1e\+308 is not in the range"),
        (["simulate", "--gpu-hour", "1e308"], r"--gpu-hour.*1e\+308 is not in the range"),
        (["simulate", "--model", "m", "--gpu-gib", "1e308"], r"--gpu-gib.*1e\+308 is not in the range"),
        (["simulate", "--model", "m", "--busiest", "1e308"], r"--busiest.*1e\+308 is not in the range"),
        (["backup", "/proc/x"], "/proc/x.partial: .*: name a folder"),
        (["migrate", "--data-dir", "/proc/x"], "data folder /proc/x: .*: name a folder"),
        (["serve", "--data-dir", "/dev/null"], "data folder /dev/null: .*: name a folder"),
        (["org", "limits", "acme", "--max-in-flight", "9" * 30], "is not in the range 0<=x<=2147483647"),
        (["tco", "--gpus", "9" * 400], "is not in the range 1<=x<=100000"),
        (["billing", "mode", "--org", "acme"], "Choose from: prepaid, postpaid, unlimited"),
    ],
)
def test_what_no_file_number_or_text_can_be_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "weft.db").touch()
    of = [] if "--data-dir" in arguments or arguments[0] in ("simulate", "plan") else ["--data-dir", str(tmp_path)]
    line = refused(*arguments, *of)
    assert re.fullmatch(r"weftd: [^\n]+\n", line)
    assert re.search(message, line)


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


HELP = """
import click, sys
from click.testing import CliRunner
from api.cli import COMMANDS, weftd
print(CliRunner().invoke(weftd, ["--help"]).output)
assert not {"numpy", "sqlalchemy", "fastapi", "httpx", "pydantic", "asyncio"} & set(sys.modules), "loaded for help"
for name in {*COMMANDS} - {"doctor"}:  # which looks at everything
    weftd.get_command(click.Context(weftd), name)
assert not {"numpy", "torch", "fastapi", "httpx"} & set(sys.modules), "loaded before anything is computed"
"""


def test_help_names_every_command_and_loads_none() -> None:
    out = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    told = re.findall(r"^  (\w+) {2,}\w.*\.$", out.stdout, re.MULTILINE)
    assert told == sorted([*COMMANDS, "serve"])


def test_help_that_finds_no_room_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(click.decorators, "echo", full)
    monkeypatch.setattr(sys, "argv", ["weftd", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "weftd: the output cannot be written: No space left on device\n"


def test_a_folder_without_a_model_is_named_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["simulate", "--gpus", "2", "--model", str(tmp_path)])
    assert (done.exit_code, done.output.count(str(tmp_path))) == (2, 1)


@pytest.mark.parametrize(("argument", "output"), [("--version", "stdout"), ("--no-such", "stderr")])
def test_an_output_that_finds_no_room_has_its_exit_code_at_the_end_of_the_process(argument: str, output: str) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "api.cli", argument]
        done = subprocess.run(command, **(pipes | {output: full}), text=True, check=False)  # type: ignore[call-overload]
    assert (done.returncode, (done.stderr or "\n").count("\n")) == (2, 1)


@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_a_process_ends_with_its_own_code_whatever_its_outputs_could_not_take(output: str) -> None:
    said = f"import sys\nfrom workers.leave import leave, let_go\nsys.{output}.write('lost')\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        for end in ("let_go()", "leave(0)"):
            command = [sys.executable, "-c", said + end]
            assert subprocess.call(command, cwd=ROOT, env=environment, **{output: full}) == 0  # type: ignore[arg-type]


CHILD_OF_MAIN = """
import os, subprocess, sys
from api.cli import main
sys.argv = ["weftd", "--version"]
main()
null = os.stat(os.devnull)
sys.exit(subprocess.call([sys.executable, "-c", "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"])
    or not all(os.path.samestat(os.fstat(number), null) for number in range(3)))
"""


def test_workers_of_a_server_without_outputs_have_outputs() -> None:
    closed = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, CHILD_OF_MAIN]
    assert subprocess.call(closed, cwd=ROOT) == 0


def test_its_version_is_its_client_s() -> None:
    assert CliRunner().invoke(command, ["--version"]).output == f"weftd {__version__}\n"


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


def test_key_create_prints_a_key_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path):  # keys are made beside a running server
        done = operators_weftd("key", "create", "--data-dir", str(tmp_path), "--org", "acme")
        out, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (0, "")
    assert re.fullmatch(r"tml-[A-Za-z0-9]{8}_[A-Za-z0-9]{43}\n", out)
    database = Database(f"sqlite:///{tmp_path}/weft.db")
    with database.read() as session:
        assert keys.find(session, out.strip()) is not None
    database.close()


def test_a_key_for_a_folder_that_no_server_has_used_is_made_with_a_warning(tmp_path: Path) -> None:
    """The folder's name may be mistyped."""
    out, err = weftd("key", "create", "--data-dir", str(tmp_path / "slip"), "--org", "acme").communicate(timeout=60)
    assert re.fullmatch(r"tml-\w{8}_.{43}\n", out)
    assert err == f"weftd: {tmp_path / 'slip'} is new: the key is good for a server that is started on it\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["key", "list"],
        ["org", "list"],
        ["org", "export", "acme", "{out}"],
        ["org", "status", "acme", "closed"],
        ["user", "list", "--org", "acme"],
        ["jobs", "list"],
        ["audit", "verify"],
        ["billing", "reconcile"],
        ["credit", "grant", "--org", "acme", "--usd", "5"],
        ["backup", "{out}"],
    ],
    ids=" ".join,
)
def test_who_looks_into_a_folder_that_is_not_there_makes_none(tmp_path: Path, arguments: list[str]) -> None:
    """The folder's name is mistyped: an empty list, or a backup of nothing, would look like an answer."""
    slip = tmp_path / "slip"
    given = [argument.format(out=tmp_path / "out") for argument in arguments]
    found = CliRunner().invoke(command, [*given, "--data-dir", str(slip)])
    assert (found.exit_code, str(slip) in found.output, len(found.output.splitlines())) == (2, True, 1)
    assert list(tmp_path.iterdir()) == []


def test_key_list_and_revoke(tmp_path: Path) -> None:
    def key(*arguments: str) -> str:
        out, err = weftd("key", *arguments, "--data-dir", str(tmp_path)).communicate(timeout=60)
        assert err == "" or "is new" in err
        return out

    secret = key("create", "--org", "acme").strip()
    assert re.fullmatch(rf"{secret[:12]}\tacme\t\d{{4}}-\d\d-\d\d\tactive\t1\n", key("list"))
    assert key("revoke", secret[:12]) == ""
    assert "revoked" in key("list")
    assert "no key in use" in refused("key", "revoke", secret[:12], "--data-dir", str(tmp_path))


@pytest.mark.parametrize("org", ["", " a", "a\n", "x" * 129])
def test_org_names(tmp_path: Path, org: str) -> None:
    assert "--org must be" in refused("key", "create", "--data-dir", str(tmp_path), "--org", org)


@pytest.mark.parametrize("name", ["x" * 129, "two\nlines"])
def test_what_a_key_is_called_fits_a_line_and_every_database(tmp_path: Path, name: str) -> None:
    message = refused("key", "create", "--data-dir", str(tmp_path), "--org", "acme", "--name", name)
    assert message == "weftd: --name must be at most 128 printable characters\n"


def test_a_database_that_cannot_be_opened_or_asked_is_one_line(tmp_path: Path) -> None:
    """Such as on a read-only disk, or in another user's folder."""
    (tmp_path / "weft.db").mkdir()
    found = CliRunner().invoke(command, ["key", "list", "--data-dir", str(tmp_path)])
    assert found.exit_code == 2
    assert found.output == f"weftd: cannot use the database of {tmp_path}: unable to open database file\n"
    (tmp_path / "weft.db").rmdir()
    assert CliRunner().invoke(command, ["migrate", "--data-dir", str(tmp_path)]).exit_code == 0
    with sqlite3.connect(tmp_path / "weft.db") as database:
        database.execute("ALTER TABLE api_keys RENAME TO elsewhere")
    found = CliRunner().invoke(command, ["key", "list", "--data-dir", str(tmp_path)])
    assert found.exit_code == 2
    assert found.output == f"weftd: the database of {tmp_path} does not do it: no such table: api_keys\n"
