"""The contract of sandboxes, and attacks on it from inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from weft import rl
from weft.rl.sandboxes import local, seccomp
from weft.rl.sandboxes.sandbox import FOLDER, CannotIsolateError, Limits, Sandbox, SandboxError, opened, require

from tests.isolation import isolated

pytestmark = isolated
MIB = 1 << 20
SMALL = Limits(time_s=5, cpu_s=2, memory_bytes=128 * MIB, disk_bytes=8 * MIB, processes=24, output_bytes=64 << 10)


def inside(use: Callable[[Sandbox], Awaitable[Any]], limits: Limits = SMALL, **options: Any) -> Any:
    async def go() -> Any:
        async with opened(rl.sandboxes.Local(limits, **options)) as box:
            return await use(box)

    return asyncio.run(go())


def python(code: str, limits: Limits = SMALL, time_s: float | None = None) -> Any:
    """Run code inside, as an attacker would."""
    return inside(lambda box: box.exec("/usr/bin/python3", "-c", code, time_s=time_s), limits)


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """A command line that no other process has; within a second no process of it may be left."""
    mark = f"9{uuid.uuid4().int % 10**12}"
    yield mark
    deadline = time.monotonic() + 1
    while left := [pid for pid in _pids() if mark in _cmdline(pid)]:
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.02)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


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


def memory_limit_held(taken_mib: int) -> bool:
    """Whether the memory limit holds. Other tests take memory meanwhile; a bomb would take all of the machine's."""
    return taken_mib < 128 + 1024


def _free_mib() -> int:
    return local._free_bytes() >> 20


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
        assert [pid for pid in _pids() if mark in _cmdline(pid)]
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
        while not [pid for pid in _pids() if _cmdline(pid).startswith(f"sleep\0{mark}")]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        caller.kill()
        caller.wait()
        caller.stdout.close()


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
                if any(_cmdline(pid).startswith(f"sleep\0{mark}") for pid in _pids()):
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


@pytest.mark.parametrize(("name", "package"), [("Modal", "modal"), ("Prime", "prime_sandboxes")])
def test_a_provider_whose_client_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package.replace('_', '-')}"):
        getattr(rl.sandboxes, name)("x", most=1)


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
