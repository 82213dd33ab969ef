"""What a process logs: as text or as JSON, with the request or run it is about, and never a secret. An error that
says that a service is away is one line."""

from __future__ import annotations

import errno
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis
from sqlalchemy.exc import OperationalError

from api import errors
from scheduler.links.contract import QueueUnreachable
from store import logs
from store.blobs.contract import StoreAway

KEY = "tml-" + "A" * 8 + "_" + "B" * 43
SECRETS = [
    KEY,
    "eyJhbGciOiJIUzI1NiJ9.eyJrZXkiOjF9.c2lnbmF0dXJl",
    "whsec_0123456789abcdef",
    "rk_live_0123456789abcdef",
    "hunter2",
    "dG9rZW4tb2Ytc29tZWJvZHk=",
]
SAID = (
    f"key {SECRETS[0]}, token {SECRETS[1]}, {SECRETS[2]} and {SECRETS[3]}; "
    f"postgresql+psycopg://weft:{SECRETS[4]}@db:5432/weft redis://:{SECRETS[4]}@redis:6379/0 "
    f"Authorization: Bearer {SECRETS[5]}"
)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Put the log back as pytest had set it up."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in (*logs.OURS, *logs.QUIET)}
    yield
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)
    logging.captureWarnings(False)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)
    logs._Shape.json = False


def lines(err: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in err.splitlines()]


def test_a_line_is_an_object_that_says_what_it_is_about(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", program="api")
    log = logging.getLogger("scheduler.somewhere")
    with logs.on(request="r-1", org="acme", run=None):
        logs.note(operation="op")
        log.info("two\nlines of %s", "text")
    log.debug("too much")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it failed")
    first, second = lines(capfd.readouterr().err)
    about = {"request": "r-1", "org": "acme", "operation": "op"}
    assert {name: value for name, value in first.items() if name != "time"} == {
        "level": "info",
        "program": "api",
        "logger": "scheduler.somewhere",
        "message": "two\nlines of text",
        **about,
    }
    assert not about.keys() & second.keys()
    assert "ValueError: no" in second["exception"]


def test_for_people_it_is_text(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "debug")
    with logs.on(request="r-1", org="acme"):
        logging.getLogger("api.somewhere").debug("done")
    logging.getLogger("others").debug("too much")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(" DEBUG api.somewhere: done [request=r-1 org=acme]")


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_logged_whoever_says_it(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure(form)
    logging.getLogger("others").warning("%s", SAID)
    try:
        raise RuntimeError(SAID)
    except RuntimeError:
        logging.getLogger("api").exception("failed")
    with logs.on(request=KEY):
        logging.getLogger("api").info("a client that takes its key for an id")
    logs.pass_on("trainer", SAID.encode())
    err = capfd.readouterr().err
    assert not [secret for secret in SECRETS if secret in err]
    assert "postgresql+psycopg://[hidden]@db:5432/weft" in err


def test_what_workers_print_stays_one_object_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", program="api")
    said = '{"time":"t","level":"info","program":"trainer","logger":"l","message":"m"}'
    logs.pass_on("trainer", said.encode())
    logs.pass_on("generator-2", b"a library's own \xff words")
    logs.pass_on("generator-2", b"")
    theirs, wrapped = lines(capfd.readouterr().err)
    assert theirs == json.loads(said)
    assert (wrapped["logger"], wrapped["message"]) == ("generator-2", "a library's own � words")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_costs_lines_and_nothing_else(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                self.full = False  # whatever comes next finds room
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", disk := Disk())
    logs.configure(form)
    logging.getLogger("api.somewhere").info("lost")
    assert disk.getvalue() == ""
    disk.full = True
    logs.pass_on("trainer", b'{"time": "lost"}')
    disk.truncate(0)
    disk.full = False
    logs.pass_on("trainer", b"kept")
    assert "kept" in disk.getvalue()


def test_the_end_of_a_process_is_logged_too() -> None:
    code = "from store import logs; logs.configure('json', program='trainer'); raise OSError('gone')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = lines(ran.stderr)
    assert ran.returncode == 1
    assert (line["level"], line["program"]) == ("critical", "trainer")
    assert "OSError: gone" in line["exception"]


def away() -> list[Exception]:
    """The errors by which drivers and clients say that something is away."""
    refused = OperationalError("", None, Exception("connection failed: refused\n\tIs the server running?"))
    lost = OperationalError("SELECT 1", None, Exception("the connection is lost"), connection_invalidated=True)
    return [
        refused,
        lost,
        QueueUnreachable("Redis cannot be reached"),
        redis.ConnectionError("Error 111"),
        StoreAway("the object store does not answer (Unreachable)"),
    ]


@pytest.mark.parametrize("form", ["text", "json"])
def test_something_that_is_away_is_logged_in_one_line_without_a_traceback_and_seldom(
    form: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.configure(form)
    log = logging.getLogger("scheduler.somewhere")
    for error in away():
        for _ in range(3):
            log.warning("asking again", exc_info=error)
        said = capfd.readouterr().err.splitlines()
        why = str(getattr(error, "orig", error)).splitlines()[0]
        assert [f"asking again: {why}" in line for line in said] == [True], said
        log.warning("it failed: %s", error, exc_info=error)
        assert capfd.readouterr().err.count(why) == 1
    with logs.on(request="r-2"):
        log.warning("asking again", exc_info=away()[0])  # the request is found by its id
    monkeypatch.setattr(logs, "SAY_AGAIN_S", 0.0)
    log.warning("asking again", exc_info=away()[0])
    assert capfd.readouterr().err.count("asking again") == 2


def test_what_every_request_finds_away_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("text")
    for number in range(3):
        with logs.on(request=f"r-{number}"):
            errors.away(OperationalError("SELECT 1", None, Exception("the connection is lost")))
            errors.away(OSError(28, "No space left on device"))
    said = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said] == ["the database does not answer", "the disk does not answer"]


@pytest.mark.parametrize(
    "error", [OperationalError("SELECT x", None, Exception("no such column: x")), OSError(5, "EIO")]
)
def test_any_other_error_keeps_its_traceback(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("text")
    for _ in range(2):
        try:
            raise error
        except Exception:
            logging.getLogger("scheduler.somewhere").exception("it failed")
    assert capfd.readouterr().err.count("Traceback") == 2
