"""The contract of sandboxes, and attacks on it from inside."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import types
import uuid
from pathlib import Path
from typing import Any

import pytest
from weft import rl
from weft.rl.sandboxes.sandbox import FOLDER, Limits, Sandbox, SandboxError, opened, require

from tests.client_sdk.rl.boxes import MIB, SMALL, cmdline, inside, marked, pids, python
from tests.isolation import isolated

pytestmark = isolated


def test_commands_files_and_what_they_say() -> None:
    async def use(box: Sandbox) -> None:
        await box.write(
            "a/b.py", b"import sys; print(sys.stdin.read()[::-1]); print('no', file=sys.stderr); sys.exit(3)"
        )
        done = await box.exec("python3", "a/b.py", stdin=b"abc")
        assert (done.returncode, done.stdout, done.stderr, done.limit) == (3, b"cba\n", b"no\n", None)
        assert await box.read("a/b.py") == await box.read(f"{FOLDER}/a/b.py")
        blob = os.urandom(3 * MIB)
        await box.write("blob", blob)
        assert await box.read("blob") == blob
        with pytest.raises(SandboxError, match="nothing: No such file"):
            await box.read("nothing")
        with pytest.raises(SandboxError, match="No space left"):
            await box.write("large", bytes(9 * MIB))
        assert (await box.exec("no-such-program")).returncode != 0
        together = await asyncio.gather(*(box.exec("sh", "-c", f"sleep 0.1; echo {n}") for n in range(3)))
        assert [each.stdout for each in together] == [b"0\n", b"1\n", b"2\n"]
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.exec("true")

    inside(use)


def test_a_snapshot_begins_another_and_neither_sees_the_other() -> None:
    async def go() -> None:
        home = rl.sandboxes.Local(SMALL)
        async with opened(home) as first:
            await first.write("kept", b"1")
            snapshot = await first.snapshot()
            await first.write("kept", b"2")
            async with opened(home, snapshot) as second, opened(home) as third:
                assert await second.read("kept") == b"1"
                await second.write("own", b"x")
                for other in (first, third):
                    with pytest.raises(SandboxError, match="No such file"):
                        await other.read("own")
        assert home.open == 0

    asyncio.run(go())


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/etc/passwd", "/root", "/home", "/var", "/sys/kernel", "/proc/1/root/root", "/mnt"]
)
def test_files_of_the_host_are_not_there(path: str) -> None:
    done = inside(lambda box: box.exec("ls", path))
    assert done.returncode != 0, done.text


def test_secrets_of_the_caller_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "tml-secret")
    (tmp_path / "secret").write_text("tml-secret")
    done = inside(lambda box: box.exec("sh", "-c", f"env; cat /proc/*/environ /proc/*/cmdline {tmp_path}/secret"))
    assert b"tml-secret" not in done.stdout
    assert b"PATH=" in done.stdout


def test_root_and_devices_cannot_be_written_and_no_privilege_is_to_be_had() -> None:
    attacks = [
        *("touch /x", "touch /usr/x", "touch /dev/x", "mount -t tmpfs x /tmp", "unshare --user true", "chroot /"),
        *("mknod /tmp/null c 1 3", "cat /dev/vda", "umount /usr", "echo 1 > /proc/sys/kernel/panic", "nsenter -t 1 -m"),
    ]
    script = "".join(f"({attack}) 2>/dev/null </dev/null && echo 'open: {attack}'\n" for attack in attacks)
    assert inside(lambda box: box.exec("sh", "-c", script)).stdout == b""
    caps = inside(lambda box: box.exec("grep", "-E", "CapEff|CapPrm|NoNewPrivs|Seccomp:", "/proc/self/status"))
    assert [line.split()[1] for line in caps.stdout.decode().splitlines()] == ["0" * 16, "0" * 16, "1", "2"]


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as local_one:
        name = f"\0weft-{uuid.uuid4().hex}"
        local_one.bind(name)
        local_one.listen()
        done = python(
            "import socket\n"
            f"for family, address in ((socket.AF_INET, {listening.getsockname()!r}), (socket.AF_UNIX, {name!r}),\n"
            "    (socket.AF_INET, ('192.0.2.1', 80)), (socket.AF_INET, ('169.254.169.254', 80))):\n"
            "    made = socket.socket(family); made.settimeout(1)\n"
            "    try: made.connect(address); print('open', address)\n"
            "    except OSError as error: print('shut', error)\n"
        )
        assert done.stdout.count(b"shut") == 4, done.text


def test_no_socket_reaches_beyond_the_namespaces() -> None:
    code = (
        "import socket\n"
        "for family in range(64):\n"
        "    try: socket.socket(family, socket.SOCK_DGRAM).close(); print(family, 'open')\n"
        "    except PermissionError: pass\n"
        "    except OSError: print(family, 'asked')\n"
        "for each in socket.socketpair(): each.close()\n"
        "try: socket.socketpair(30)\n"
        "except PermissionError: print('pair')\n"
    )
    done = python(code)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [b"1", b"2", b"10", b"16", b"pair"], done.text


def test_process_1_is_out_of_reach() -> None:
    """Process 1 is bubblewrap's: rewritten from inside, it might not end with its command."""
    code = (
        "import ctypes, os\n"
        "try: open('/proc/1/mem', 'r+b'); print('mem')\n"
        "except OSError: pass\n"
        "libc, place = ctypes.CDLL(None), ctypes.create_string_buffer(16)\n"
        "for number in (16, 0x4206):\n"
        "    if libc.ptrace(number, 1, 0, 0) == 0: print('traced'); break\n"
        "libc.process_vm_writev.restype = ctypes.c_ssize_t\n"
        "if libc.process_vm_writev(1, place, 0, place, 0, 0) == 0: print('written')\n"
        "try: open('/proc/1/x', 'w')\n"
        "except OSError as error: print(os.listdir('/proc/1'), error.strerror)\n"
    )
    assert python(code).stdout == b"[] Read-only file system\n"


def test_a_full_disk_is_its_own() -> None:
    done = python(
        "import os\n"
        "for folder in ('/work', '/tmp', '/dev/shm'):\n"
        "    size = 0\n"
        "    try:\n"
        "        with open(folder + '/x', 'wb') as file:\n"
        "            while True: size += file.write(bytes(1 << 16)); file.flush()\n"
        "    except OSError as error: print(size >> 20, error.strerror)\n"
        "    os.remove(folder + '/x')\n"
        "count = 0\n"
        "try:\n"
        "    while True: open(f'/tmp/{count}', 'w').close(); count += 1\n"
        "except OSError: print(count)\n"
    )
    *sizes, count = done.stdout.decode().splitlines()
    assert len(sizes) == 3, done.text
    assert all(int(line.split()[0]) <= 8 for line in sizes), done.text
    assert int(count) < 5000


def test_processes_outside_cannot_be_killed_nor_seen() -> None:
    with subprocess.Popen(["sleep", "60"]) as outside:
        code = (
            f"import os\nfor pid in ({outside.pid}, {os.getpid()}):\n"
            " try: os.kill(pid, 9); print('killed')\n except ProcessLookupError: pass\n"
        )
        done = python(code + "print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))\nos.kill(-1, 9)")
        assert outside.poll() is None
        outside.kill()
    assert b"killed" not in done.stdout
    assert eval(done.stdout) == list(range(1, len(eval(done.stdout)) + 1))


@pytest.mark.parametrize("end", ["it ends", "its time ends", "it is cancelled", "it is closed"])
def test_nothing_outlives_its_command(end: str) -> None:
    async def use(box: Sandbox) -> None:
        script = f"trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP; sleep {mark}' &) ; sleep 0.1; "
        if end == "it ends":
            assert (await box.exec("sh", "-c", script)).returncode == 0
            return
        running = asyncio.ensure_future(
            box.exec("sh", "-c", script + f"sleep {mark}", time_s=0.6 if end == "its time ends" else 60)
        )
        await asyncio.sleep(0.5)
        assert [pid for pid in pids() if mark in cmdline(pid)]
        if end == "its time ends":
            done = await running
            assert done.limit == "time"
            assert done.seconds < 3
        elif end == "it is cancelled":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            await box.close()
            assert (await running).returncode < 0

    with marked() as mark:
        inside(use)


def test_processor_time_is_limited() -> None:
    done = python("while True: pass", Limits(cpu_s=1, time_s=20))
    assert (done.returncode, done.limit) == (128 + signal.SIGKILL, None)
    assert done.seconds < 10


def test_a_flood_of_output_ends_it_and_its_beginning_is_kept() -> None:
    for stream in ("stdout", "stderr"):
        done = inside(lambda box, stream=stream: box.exec("sh", "-c", f"yes {'1>&2' if stream == 'stderr' else ''}"))
        assert done.limit == "output"
        assert getattr(done, stream) == b"y\n" * (SMALL.output_bytes // 2)


def test_output_of_just_the_limit_is_no_flood() -> None:
    async def use(box: Sandbox) -> None:
        for more in (0, 1):
            done = await box.exec("head", "-c", str(SMALL.output_bytes + more), "/dev/zero")
            assert (done.limit, done.stdout) == ("output" if more else None, bytes(SMALL.output_bytes))

    inside(use)


KILLED = """
import asyncio, sys
from weft import rl
async def go():
    async with rl.sandboxes.opened(rl.sandboxes.Local()) as box:
        print("up", flush=True)
        await box.exec("sh", "-c", f"setsid sleep {sys.argv[1]} & sleep {sys.argv[1]}", time_s=600)
asyncio.run(go())
"""


def test_nothing_outlives_a_caller_that_is_killed() -> None:
    with marked() as mark:
        caller = subprocess.Popen([sys.executable, "-c", KILLED, mark], stdout=subprocess.PIPE)
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 10
        while not [pid for pid in pids() if cmdline(pid).startswith(f"sleep\0{mark}")]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        caller.kill()
        caller.wait()
        caller.stdout.close()


def test_the_quota_is_known_before_and_kept() -> None:
    async def go() -> None:
        home = rl.sandboxes.Local(SMALL, most=2)
        await require(home, 2)
        with pytest.raises(SandboxError, match=r"up to 3 sandboxes .* room for 2 \(most=2, 0 are open\)"):
            await require(home, 3)
        async with opened(home), opened(home):
            assert (await home.quota()).left == 0
            with pytest.raises(SandboxError, match="most=2"):
                await home.create()
        huge = rl.sandboxes.Local(Limits(memory_bytes=1 << 50))
        with pytest.raises(SandboxError, match="MiB of memory are free"):
            await require(huge, 1)

    asyncio.run(go())


def test_commands_side_by_side_at_prime_read_each_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prime's published client, over a shell of this machine: a command's input is its own, and is gone afterwards."""

    class Client:
        async def execute_command(self, id: str, line: str, **options: Any) -> Any:
            line = line.replace("/tmp/", f"{tmp_path}/")
            shell = await asyncio.create_subprocess_shell(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            out, err = await shell.communicate()
            return types.SimpleNamespace(stdout=out.decode(), stderr=err.decode(), exit_code=shell.returncode)

        async def upload_bytes(self, id: str, path: str, data: bytes, name: str) -> None:
            await asyncio.to_thread((tmp_path / name).write_bytes, data)

    module = types.SimpleNamespace(AsyncSandboxClient=Client, CommandTimeoutError=TimeoutError, APIError=OSError)
    monkeypatch.setitem(sys.modules, "prime_sandboxes", module)

    async def go() -> None:
        box = rl.sandboxes.prime.PrimeSandbox(rl.sandboxes.Prime("x", most=1), "1")
        said = await asyncio.gather(
            *(box.exec("sh", "-c", "sleep 0.1; cat; exit 3", stdin=str(n).encode()) for n in range(4))
        )
        assert [(each.stdout, each.returncode) for each in said] == [(str(n).encode(), 3) for n in range(4)]

    asyncio.run(go())
    assert list(tmp_path.iterdir()) == []
