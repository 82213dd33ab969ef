"""What a worker does before its role's work begins."""

from __future__ import annotations

import socket

import pytest

from scheduler.links.configs import OF_ANOTHER_VERSION, Basics, TrainerConfig
from scheduler.links.sockets import frame
from workers import __main__ as program


def test_a_worker_of_another_version_than_its_server_exits_with_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens when the files are replaced while the server runs."""
    monkeypatch.setattr(program, "_rename", lambda name: None)
    server, worker = socket.socketpair()
    with server:
        server.sendall(frame(TrainerConfig(Basics("", {}, form="older"))))
        assert program.work("trainer", worker.detach()) == OF_ANOTHER_VERSION
