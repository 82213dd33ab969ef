"""The link between server and worker: what was sent arrives, however the other end leaves."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from scheduler.links.messages import Done, Drain, Pass, PassOver, PullPass
from scheduler.links.sockets import ServerLink, WorkerLink, frame

COUNT = 2000

#: Says all that it has to say, and leaves without having read a word.
LEAVES = f"""
import sys
from scheduler.links.sockets import WorkerLink
from scheduler.links.messages import Snapshot
link = WorkerLink(int(sys.argv[1]))
for number in range({COUNT}):
    link.send(Snapshot("run", number, "x" * 100))
"""


def started(script: str, link: socket.socket) -> subprocess.Popen[bytes]:
    """A worker process with this end of the link, which from now on belongs to the worker alone."""
    with link:
        return subprocess.Popen([sys.executable, "-c", script, str(link.fileno())], pass_fds=(link.fileno(),))


@pytest.mark.parametrize("unread", [0, 1, 500], ids=["all-read", "one-unread", "more-than-the-link-takes"])
def test_everything_a_worker_has_sent_is_read_though_writing_to_it_fails(unread: int) -> None:
    async def run() -> list[int]:
        ours, theirs = socket.socketpair()
        link, found = ServerLink(ours), []
        for _ in range(unread):
            link.send(Pass(1, "y" * 10_000, []))
        worker = started(LEAVES, theirs)
        async for message in link.messages():
            if not message.seq % 100:  # it reads slowly, as if it wrote to its database in between
                await asyncio.sleep(0.01)
            found.append(message.seq)
            link.send(Drain())
        assert await asyncio.to_thread(worker.wait, 60) == 0
        link.send(Drain())
        link.close()
        return found

    assert asyncio.run(asyncio.wait_for(run(), 60)) == list(range(COUNT))


def test_messages_longer_than_the_link_takes_arrive_whole() -> None:
    echo = "import sys; from scheduler.links.sockets import WorkerLink; from scheduler.links.messages import PullPass\n"
    echo += "link = WorkerLink(int(sys.argv[1]))\n"
    echo += "for _ in range(3): link.send(PullPass([link.recv().base_model] * 2))"

    async def run() -> list[list[str]]:
        ours, theirs = socket.socketpair()
        link = ServerLink(ours)
        worker = started(echo, theirs)
        for word in "abc":
            link.send(Pass(1, word * 3_000_000, []))
        found = [[name[:1] + str(len(name)) for name in message.models] async for message in link.messages()]
        assert await asyncio.to_thread(worker.wait, 60) == 0
        link.close()
        return found

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [[f"{word}3000000"] * 2 for word in "abc"]


def test_what_is_told_together_leaves_in_one_piece_and_the_end_of_a_pass_with_what_comes_next() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps the pieces apart
    with ours:
        ours.setblocking(False)
        link = WorkerLink(theirs.detach())
        done, over, pull = [Done(str(number)) for number in range(3)], PassOver(1, 0, 3, 0.5), PullPass(["m"])
        link.send(*done)
        assert ours.recv(1 << 16) == b"".join(map(frame, done))
        link.send(over)
        with pytest.raises(BlockingIOError):
            ours.recv(1 << 16)
        link.send(pull)
        assert ours.recv(1 << 16) == frame(over) + frame(pull)
        link.close()
