"""What a worker does before it knows its role's work."""

from __future__ import annotations

import socket

import pytest

from scheduler.links.configs import Basics, TrainerConfig
from scheduler.links.sockets import frame
from workers import __main__ as program


def test_one_of_another_version_than_its_server_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files were replaced while the server ran."""
    monkeypatch.setattr(program, "_rename", lambda name: None)
    server, worker = socket.socketpair()
    with server:
        server.sendall(frame(TrainerConfig(Basics("", {}, form="older"))))
        assert program.work("trainer", worker.detach()) == 1
    assert capsys.readouterr().err == f"{program.OF_ANOTHER_VERSION}\n"
