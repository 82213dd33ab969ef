"""What sandboxes need of their machine; where it is missing, nothing runs."""

from __future__ import annotations

import asyncio
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from weft import rl
from weft.rl.sandboxes import local, seccomp
from weft.rl.sandboxes.sandbox import CannotIsolateError

from tests.client_sdk.rl.boxes import SMALL, cmdline, marked, pids
from tests.isolation import isolated

pytestmark = isolated


AS_USER = """
import asyncio, os, sys
from weft import rl
from weft.rl.sandboxes import local, prime, modal
asyncio.run(asyncio.sleep(0))
os.setgroups([]), os.setgid(65534), os.setuid(65534)
async def go():
    async with rl.sandboxes.opened(rl.sandboxes.Local()) as box:
        script = "id -u; ls /root /etc/passwd; kill -9 -1; touch /x; cat /proc/net/dev | wc -l"
        done = await box.exec("sh", "-c", script)
        print(done.stdout.split(), done.stderr.count(b"No such file"), done.stderr.count(b"Read-only"))
asyncio.run(go())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="is a user already")
def test_who_gives_up_while_a_sandbox_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that takes too long is cancelled wherever it is."""

    async def story() -> None:
        home = rl.sandboxes.Local(SMALL)
        with marked() as mark:
            monkeypatch.setattr(local, "_HOLD", f"exec sleep {mark}")
            making = asyncio.ensure_future(home._made(None))
            for _ in range(500):
                if any(cmdline(pid).startswith(f"sleep\0{mark}") for pid in pids()):
                    break
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            making.cancel()
            await asyncio.wait({making})
        assert home.open == 0

    asyncio.run(story())


def test_a_user_has_sandboxes_too() -> None:
    done = subprocess.run([sys.executable, "-c", AS_USER], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[b'1000', b'3'] 2 1\n", "")


def test_where_bubblewrap_is_missing_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "_PATH", str(tmp_path))
    with pytest.raises(CannotIsolateError, match="apt-get install bubblewrap util-linux"):
        asyncio.run(rl.sandboxes.Local().create())


FORBIDDEN = """
import asyncio, os, sys
from weft import rl
if sys.argv[1] == "user": os.geteuid = lambda: 1000
try:
    asyncio.run(rl.sandboxes.Local().create())
except rl.sandboxes.CannotIsolateError as error:
    print(error)
"""


@pytest.mark.parametrize(("who", "says"), [("user", "unshare failed"), ("root", "cannot run as user")])
def test_where_namespaces_are_forbidden_nothing_runs(who: str, says: str) -> None:
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" -c "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, sys.executable, FORBIDDEN, who]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert says in done.stdout, done.stderr
    assert "user namespaces are needed" in done.stdout


def judged(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """The filter's answer to a call: its program is run here, step by step."""
    arch = seccomp.MACHINES[machine][0] if arch is None else arch
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    place = held = 0
    while True:
        code, yes, no, value = steps[place]
        place += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            held &= value
        else:
            place += yes if (held == value if code == 0x15 else held >= value) else no


@pytest.mark.parametrize(
    ("machine", "mmap", "sockets", "uring"), [("x86_64", 9, (41, 53), 425), ("aarch64", 222, (198, 199), 425)]
)
def test_the_filter_answers_each_call(machine: str, mmap: int, sockets: tuple[int, int], uring: int) -> None:
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    refused = {*seccomp.MACHINES[machine][1].values()}
    assert uring in refused
    for number in range(500):
        expected = refuse if number in refused or number in sockets else allow
        assert judged(machine, number) == expected, number
        assert judged(machine, number | 0x40000000) == refuse
        assert judged(machine, number, arch=0x40000003) == kill
    for family in range(64):
        expected = allow if family in (1, 2, 10, 16) else refuse
        assert {judged(machine, number, family) for number in sockets} == {expected}
    for flags in range(64):
        expected = refuse if flags & 0x01 and flags & 0x20 else allow
        assert judged(machine, mmap, 0, 4096, 3, flags | 0x4000) == expected


def test_a_machine_without_a_filter_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(CannotIsolateError, match="vax"):
        asyncio.run(rl.sandboxes.Local().create())


@pytest.mark.parametrize(("name", "package"), [("Modal", "modal"), ("Prime", "prime_sandboxes")])
def test_a_provider_whose_client_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package.replace('_', '-')}"):
        getattr(rl.sandboxes, name)("x", most=1)
