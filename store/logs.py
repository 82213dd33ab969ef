"""How a process of Weft logs: set up here and nowhere else, for servers, workers and jobs.

A line is text for people, or one JSON object. What it is about (request, organisation, run, operation) travels in a
context variable, like the caller (`store.database.caller`), and stands on every line that is logged meanwhile. Keys,
tokens and passwords in URLs are removed from every line, whichever code logs it; requests' bodies are never logged. An
unreachable database, Redis or object store gets one line without a traceback, at most once in SAY_AGAIN_S.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

import orjson

#: Our own loggers, to which the level applies; others log warnings, and library-specific information.
OURS = ("api", "billing", "generator", "migrations", "scheduler", "store", "trainer", "weft", "workers")
#: Loggers whose INFO lines nobody needs.
QUIET = ("alembic", "httpx", "uvicorn")
#: Seconds between two equal lines about something unreachable, which is tried several times a second.
SAY_AGAIN_S = 5.0
#: Errors that mean "unreachable", by package and name: this module imports none of these packages.
_AWAY = {
    ("redis", "ConnectionError"),
    ("redis", "TimeoutError"),
    ("scheduler", "QueueUnreachable"),
    ("sqlalchemy", "TimeoutError"),
    ("store", "StoreAway"),
}
#: The beginning of a JSON line; the server passes such lines of workers on as they are.
_BEGINS = b'{"time":'

#: Matches API keys, their tokens, Stripe's secrets, passwords in URLs, and credentials in quoted headers.
_SECRETS = re.compile(
    r"tml-[\w-]{8,}"
    r"|eyJ[\w-]+\.[\w-]+(?:\.[\w-]*)?"
    r"|\b(?:sk|rk|whsec)_\w{8,}"
    r"|(?<=://)[^\s/@]*:[^\s@]*(?=@)"
    r"|(?<=[Bb]earer )\S+"
)
_HIDDEN = "[hidden]"

_about: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039  nobody changes it in place


class _Shape:
    """The form of this process's lines."""

    json = False


def about() -> Mapping[str, str]:
    """The facts that the current task's log lines name: `request`, `org`, `run`, `operation`, those that are known."""
    return _about.get()


def note(**facts: str) -> None:
    """Add facts to the lines logged in the rest of this task (a request's) or thread."""
    _about.set({**_about.get(), **{name: fact for name, fact in facts.items() if fact}})


class on:
    """`with on(...)`: lines in the block carry these facts, and no others."""

    def __init__(self, **facts: str | None) -> None:
        self._facts = {name: fact for name, fact in facts.items() if fact}

    def __enter__(self) -> None:
        self._token = _about.set(self._facts)

    def __exit__(self, *_error: object) -> None:
        _about.reset(self._token)


class _Stderr(logging.StreamHandler[TextIO]):
    """A line that finds no room on the disk is lost, without the traceback that `logging` would try to write of it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def configure(form: str = "text", level: str = "info", program: str = "weftd") -> None:
    """Log to stderr: `form` text or json, our own lines from `level` on. `program` says who logs: api, jobs, trainer,
    generator-2, ..."""
    _Shape.json = form == "json"
    handler = _Stderr(sys.stderr)
    handler.setFormatter(_Json(program) if _Shape.json else _Text())
    handler.addFilter(_Seldom())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.excepthook = _uncaught


def pass_on(role: str, line: bytes) -> None:
    """Pass on a line printed by the worker `role`: unchanged if it is JSON, else with the worker's name. One that finds
    no room on the disk is lost, and the worker's next one is read."""
    text = line.decode(errors="replace")
    with suppress(OSError):
        if not _Shape.json:
            print(f"[{role}] {hide(text)}", file=sys.stderr, flush=True)
        elif line.startswith(_BEGINS):
            print(text, file=sys.stderr, flush=True)
        elif line.strip():
            logging.getLogger(role).info("%s", text)


def hide(text: str) -> str:
    """`text` without what looks like a secret."""
    return _SECRETS.sub(_HIDDEN, text)


def in_a_line(error: BaseException) -> str:
    """The first line of an error's text; for an error of the database without the statement."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0] or type(error).__name__


def _away(record: logging.LogRecord) -> BaseException | None:
    """The error in a log record, if it means that something is unreachable."""
    error = record.exc_info[1] if record.exc_info else None
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if ("sqlalchemy", "OperationalError") in kinds:  # other OperationalErrors are about the statement
        return error if getattr(error, "connection_invalidated", False) or not getattr(error, "statement", "") else None
    return None if kinds.isdisjoint(_AWAY) else error


def _brief(record: logging.LogRecord) -> logging.LogRecord:
    """The record without its traceback, if it is about something unreachable: a traceback would only show where it was
    tried."""
    error = _away(record)
    if error is None:
        return record
    brief, message, why = copy.copy(record), record.getMessage(), in_a_line(error)
    brief.msg, brief.args, brief.exc_info, brief.exc_text = message, (), None, None
    if why not in message:
        brief.msg = f"{message}: {why}"
    return brief


#: `extra` of a line that each request logs while something is unreachable: it is the same line whoever asks.
SELDOM = {"seldom": True}


class _Seldom(logging.Filter):
    """Drops repeated lines about something unreachable, within SAY_AGAIN_S."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        brief = _brief(record)
        seldom = getattr(record, "seldom", False)
        if brief is record and not seldom:
            return True
        line, now = f"{record.name} {brief.getMessage()} {'' if seldom else _facts(record)}", time.monotonic()
        if now - self._said.get(line, -SAY_AGAIN_S) < SAY_AGAIN_S:
            return False
        if len(self._said) >= 1000:
            self._said.clear()
        self._said[line] = now
        return True


class _Text(logging.Formatter):
    """TIME LEVEL logger: message [request=... org=...]"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(facts)s")

    def format(self, record: logging.LogRecord) -> str:
        record = _brief(record)
        facts = " ".join(f"{name}={fact}" for name, fact in _facts(record).items())
        record.facts = f" [{facts}]" if facts else ""
        return hide(super().format(record))


class _Json(logging.Formatter):
    """One object on one line: time (UTC), level, program, logger, message; what it is about; an exception's
    traceback."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        record = _brief(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps({name: hide(str(value)) for name, value in line.items()}).decode()


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """The facts of a line: those of its task, and those of its logger (`extra={"given": {...}}`)."""
    return {**_about.get(), **getattr(record, "given", {})}


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("weft").critical("ended by an error that nobody expected", exc_info=(kind, error, trace))
