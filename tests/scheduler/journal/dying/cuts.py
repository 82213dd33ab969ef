"""Connections to a database die at a round trip: before it, amid what is sent, while the database works, or with its
answer lost. None of our code is patched: PostgreSQL is behind a proxy, SQLite behind a driver."""

from __future__ import annotations

import select
import socket
import sqlite3
import struct
import threading
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import psycopg
from sqlalchemy import event
from sqlalchemy.engine import Engine

#: What becomes of a round trip: nothing is sent, a part of it is, all is and nobody waits for the answer, the answer is
#: lost; the backend is terminated before it, or after all was sent.
CUTS = ("before", "half", "sent", "answered", "killed", "killed while it works")


class Cutter:
    """A TCP proxy in front of PostgreSQL. `often`: how often it cuts a round trip that begins or commits a transaction
    of the writer; others are hardly ever cut. `cut` counts how."""

    def __init__(self, server_port: int, admin: str, draw: Random, often: float) -> None:
        self._target, self._admin, self._draw, self.often = server_port, admin, draw, often
        self.cut = Counter[str]()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        pid = 0
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as far:
            while not self._closed:
                ready = select.select([near, far], [], [], 0.2)[0]
                if far in ready:
                    data = far.recv(1 << 20)
                    pid = pid or _pid_of(data)
                    if not data:
                        return
                    near.sendall(data)
                if near in ready:
                    data = near.recv(1 << 20)
                    if not data or not self._pass_on(data, far, pid):
                        return

    def _pass_on(self, data: bytes, far: socket.socket, pid: int) -> bool:
        """Returns False when the connection has ended."""
        cut = self._choose(data)
        if cut is not None:
            self.cut[f"COMMIT {cut}" if b"COMMIT" in data else cut] += 1
        if cut == "killed":
            self._terminate(pid)
        if cut in ("before", "half"):
            far.sendall(data[: self._draw.randrange(len(data)) if cut == "half" else 0])
            return False
        far.sendall(data)
        if cut == "killed while it works":
            self._terminate(pid)
        if cut == "answered":
            far.settimeout(0.5)  # a part of a request gets no answer
            far.recv(1 << 20)
        return cut not in ("sent", "answered")

    def _choose(self, data: bytes) -> str | None:
        """How to cut a round trip of an open connection, if at all; its start is never cut."""
        writes = b"COMMIT" in data or b"BEGIN" in data
        chance = self.often if writes else self.often / 20
        return self._draw.choice(CUTS) if data[0] and self._draw.random() < chance else None

    def _terminate(self, pid: int) -> None:
        with psycopg.connect(self._admin, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))


def _pid_of(data: bytes) -> int:
    """The process id of a backend, from the message that tells it."""
    at = data.find(b"K\x00\x00\x00\x0c")
    return int(struct.unpack(">i", data[at + 5 : at + 9])[0]) if at >= 0 else 0


class Driver:
    """SQLite's writer, whose statements fail as on a failing disk: `often` before they take effect or, for COMMIT,
    after. Savepoints within a transaction write nothing."""

    def __init__(self, engine: Engine, draw: Random, often: float) -> None:
        self._draw, self.often, self.cut = draw, often, Counter[str]()
        maybe = self._maybe

        class Dying(sqlite3.Connection):
            """Statements that are run directly fail, too."""

            def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
                if not statement.startswith("PRAGMA"):
                    maybe("before", 0.2)
                return super().execute(statement, *parameters)

            def commit(self) -> None:
                maybe("COMMIT before")
                super().commit()
                maybe("COMMIT answered")

        @event.listens_for(engine, "do_connect")
        def connect(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
            parameters["factory"] = Dying

        @event.listens_for(engine, "do_execute")
        def execute(_cursor: Any, statement: str, *_: Any) -> None:
            if "SAVEPOINT" not in statement:
                maybe("before", 0.2)

        @event.listens_for(engine, "do_executemany")
        def execute_many(*_: Any) -> None:
            maybe("before", 0.2)

        engine.dispose()

    def close(self) -> None:
        self.often = 0

    def _maybe(self, what: str, less: float = 1.0) -> None:
        if self._draw.random() < self.often * less:
            self.cut[what] += 1
            raise sqlite3.OperationalError("disk I/O error")
