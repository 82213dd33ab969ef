"""What a worker does before it knows its role's work."""

from __future__ import annotations

import socket

import pytest

from scheduler.links.configs import OF_ANOTHER_VERSION, Basics, TrainerConfig
from scheduler.links.sockets import frame
from workers import __main__ as program


def test_one_of_another_version_than_its_server_leaves_by_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files were replaced while the server ran."""
    monkeypatch.setattr(program, "_rename", lambda name: None)
    server, worker = socket.socketpair()
    with server:
        server.sendall(frame(TrainerConfig(Basics("", {}, form="older"))))
        assert program.work("trainer", worker.detach()) == OF_ANOTHER_VERSION
