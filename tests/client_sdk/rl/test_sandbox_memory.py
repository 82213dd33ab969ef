"""Attacks from inside of a sandbox on the memory of its machine."""

from __future__ import annotations

import asyncio
import platform
import time
from typing import Any

import pytest
from weft.rl.sandboxes import local
from weft.rl.sandboxes.sandbox import Sandbox

from tests.client_sdk.rl.boxes import SMALL, inside, marked, python
from tests.isolation import isolated

pytestmark = isolated


def test_a_fork_bomb_ends_with_its_time() -> None:
    with marked() as mark:
        code = (
            "import os, time\nwhile True:\n try:\n  if os.fork() == 0: os.setsid()\n"
            f" except OSError: time.sleep({mark}e-14)\n"
        )
        began = time.monotonic()
        done = python(code, time_s=1)
        assert done.limit == "time"
        assert time.monotonic() - began < 5
    crowd = python(
        "import os, time\nn = 0\ntry:\n while True:\n"
        "  if os.fork() == 0: time.sleep(60)\n  n += 1\nexcept OSError: print(n)"
    )
    assert 1 <= int(crowd.stdout) < SMALL.processes


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("x = bytearray(1 << 20)\nwhile True: x += bytes(x)", id="one process"),
        pytest.param(
            "import os, time\nfor _ in range(10): os.fork()or exec('x=b\"1\"*(30<<20);time.sleep(60)')\ntime.sleep(60)",
            id="several processes",
        ),
        pytest.param("import mmap\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(1 << 18): m[i << 12] = 1", id="shared"),
        pytest.param("import os; fd = os.memfd_create('x'); os.write(fd, bytes(1 << 20))", id="memfd"),
        pytest.param(
            "import mmap, time\nm = mmap.mmap(-1, 1 << 38, flags=mmap.MAP_PRIVATE | 32, prot=mmap.PROT_READ)\n"
            "for i in range(1 << 17): m[i << 21]\ntime.sleep(60)",
            id="page tables",
        ),
    ],
)
def test_a_memory_bomb_gets_no_more_than_its_share(code: str) -> None:
    before = _free_mib()
    lowest = [before]

    async def use(box: Sandbox) -> Any:
        async def look() -> None:
            while True:
                await asyncio.sleep(0.01)
                lowest[0] = min(lowest[0], _free_mib())

        looking = asyncio.ensure_future(look())
        try:
            return await box.exec("/usr/bin/python3", "-c", code, time_s=4)
        finally:
            looking.cancel()

    done = inside(use)
    assert done.limit == "memory" or b"MemoryError" in done.stderr or b"PermissionError" in done.stderr, done
    assert memory_limit_held(before - lowest[0])


CROWD = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
def hold():
    x = b"1" * (30 << 20)
    time.sleep(60)
{before}
for _ in range(8):
    if os.fork() == 0:
        {child}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("before", "child"),
    [
        pytest.param(r"libc.prctl(15, b'\xff')", "hold()", id="a name that is no text"),
        pytest.param(r"libc.prctl(15, b'\rRssAnon: x')", "hold()", id="a name that breaks its line"),
        pytest.param(r"libc.prctl(15, b'\rRssAnon:-9999')", "hold()", id="a name that takes memory off"),
        pytest.param("", "threading.Thread(target=hold).start(); libc.syscall(60)", id="a first thread that has ended"),
    ],
)
def test_memory_is_counted_whatever_a_process_says_of_itself(before: str, child: str) -> None:
    if platform.machine() == "aarch64":
        child = child.replace("syscall(60)", "syscall(93)")
    done = python(CROWD.format(before=before, child=child), time_s=3)
    assert done.limit == "memory", done


def test_a_command_whose_memory_cannot_be_told_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pid: int) -> int:
        raise PermissionError(pid)

    async def use(box: Sandbox) -> Any:
        assert (await box.exec("true")).limit is None
        monkeypatch.setattr(local, "memory_of", broken)
        return await box.exec("sleep", "60")

    done = inside(use)
    assert (done.limit, done.returncode) == ("memory", -9)
    assert done.seconds < 50


@pytest.mark.parametrize("file", ["-1", "os.open('/dev/zero', os.O_RDWR)"])
def test_memory_that_nobody_has_mapped_in_is_not_to_be_had(file: str) -> None:
    """Pages that a process has touched in a shared mapping remain when it ends, and then belong to no process."""
    code = (
        f"import mmap, os\nm = mmap.mmap({file}, 1 << 30, mmap.MAP_SHARED)\n"
        "if os.fork() == 0:\n for at in range(0, 100 << 20, 4096): m[at] = 1\n os._exit(0)\nos.wait(); print('kept')"
    )
    done = python(code)
    assert (done.stdout, done.limit) == (b"", None)
    assert b"PermissionError" in done.stderr or b"No such device" in done.stderr, done.text


def test_what_ordinary_programs_share_they_still_share() -> None:
    code = (
        "import mmap, multiprocessing as mp, subprocess, threading\n"
        "with mp.Pool(2) as pool: print(pool.map(abs, [-1, -2]))\n"
        "with mp.Manager() as manager: print(manager.list([3]))\n"
        "value = mp.Value('i', 0)\n"
        "def add():\n with value.get_lock(): value.value += 1\n"
        "made = [mp.Process(target=add) for _ in range(3)]\n"
        "for each in made: each.start()\n"
        "for each in made: each.join()\n"
        "print(value.value, mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)[0], open('/dev/zero', 'rb').read(3))\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "kept = SharedMemory(create=True, size=4096); print(kept.size); kept.unlink()\n"
        "import asyncio; print(asyncio.run(asyncio.to_thread(sum, [1, 2])))\n"
    )
    done = python(code)
    expected = [b"[1, 2]", b"[3]", rb"3 0 b'\x00\x00\x00'", b"4096", b"3"]
    assert done.stdout.splitlines() == expected, done.text


def memory_limit_held(taken_mib: int) -> bool:
    """Whether the memory limit holds. Other tests take memory meanwhile; a bomb would take all of the machine's."""
    return taken_mib < 128 + 1024


def _free_mib() -> int:
    return local._free_bytes() >> 20
