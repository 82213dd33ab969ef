"""How a program begins and ends: a server that is not there, a last line that nobody waits for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import uvicorn
import weft

from tests.client_sdk.stub_server import SESSION, Stub, serve

ROOT = Path(__file__).parents[2]

OPEN = """
import weft
service = weft.ServiceClient(base_url={url!r}, api_key="tml-x")
service.create_sampling_client(base_model="org/tiny").result()
"""

#: The end of a program, or a server that has never answered, is given ten seconds; here fewer.
SOON = """
import weft.future, weft.service_client, weft.transport.contact
weft.future.EXIT_S = weft.service_client.EXIT_S = weft.transport.contact.FIRST_S = {soon_s}
"""


def start(script: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "client_sdk")}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    "last_line",
    [
        "service.close()",
        "service.close('errored', detail='late')",
        "import atexit; atexit.register(service.close)",
        "import atexit; atexit.register(service.close); weft.ServiceClient(base_url='http://x', api_key='x').close()",
    ],
)
def test_a_last_line_that_nobody_awaits_ends_the_session(stub: Stub, last_line: str) -> None:
    done = start(OPEN.format(url=stub.base_url.replace("127.0.0.1", "localhost")) + last_line)
    assert done.communicate(timeout=60)[1] == ""
    assert done.returncode == 0
    assert stub.paths().count(f"/sessions/{SESSION}/finish") == 1


def connections(stub: Stub) -> list[object]:
    """This process's connections to the stub, seen from the client's end."""
    port = int(stub.base_url.rsplit(":", 1)[1])
    return [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]


def test_a_closed_client_leaves_no_connection_and_what_it_made_opens_another(stub: Stub) -> None:
    with weft.ServiceClient(base_url=stub.base_url, api_key="tml-x") as service:
        service.create_sampling_client(base_model="org/tiny").result()
        rest = service.create_rest_client()
        assert connections(stub)
    assert not connections(stub)
    rest.delete_checkpoint("5e55:train:0", "weights/s1").result()
    assert connections(stub)


LOG = """
runs = [service.create_lora_training_client("org/tiny").result() for _ in range(24)]
print("made", flush=True)
sys.stdin.readline()
for run in runs:
    run.log({{"reward": 1.0}})
"""


def test_the_end_waits_for_all_that_is_logged_together() -> None:
    gone = Stub()
    server = serve(gone)
    script = "import sys" + SOON.format(soon_s=3.0) + OPEN.format(url=gone.base_url) + LOG.format()
    began = ended_without(server, script, "made")[1]
    assert time.monotonic() - began < 60  # 24 times three seconds


def ended_without(server: uvicorn.Server, script: str, ready: str) -> tuple[str, float]:
    """What a program printed that goes on once its server is gone, and when it ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "client_sdk")}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", script]
    done = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert done.stdout is not None
    assert done.stdout.readline() == f"{ready}\n"
    server.should_exit = True
    while any(each.is_serving() for each in server.servers):
        time.sleep(0.01)
    began = time.monotonic()
    return done.communicate("\n", timeout=400)[1], began


def test_the_end_waits_for_nothing_where_nothing_is_closed(stub: Stub) -> None:
    done = start(OPEN.format(url=stub.base_url))
    assert done.wait(60) == 0, done.stderr
    assert f"/sessions/{SESSION}/finish" not in stub.paths()


def test_a_server_that_is_not_there_is_named_at_once_and_given_up_soon() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    done = start(SOON.format(soon_s=1.0) + OPEN.format(url=url))
    assert done.stderr is not None
    assert done.stderr.readline().startswith(f"cannot reach {url} (")
    assert done.stderr.read().splitlines()[-1].startswith(f"weft.errors.APIConnectionError: cannot reach {url}: ")
    assert done.wait() == 1
    assert time.monotonic() - began < 60  # of a budget of 300


def test_a_server_that_starts_meanwhile_is_waited_for(stub: Stub) -> None:
    port = free_port()
    done = start(OPEN.format(url=f"http://127.0.0.1:{port}") + "service.close()")
    assert done.stderr is not None
    assert "retrying" in done.stderr.readline()
    late = Stub()
    server = serve(late, port)
    assert done.wait(60) == 0, done.stderr.read()
    assert "answers again" in done.stderr.read()
    assert late.paths().count(f"/sessions/{SESSION}/finish") == 1
    server.should_exit = True


PLAIN = """
with weft.ServiceClient(base_url={url!r}, api_key="tml-x") as service:
    service.create_sampling_client(base_model="org/tiny").result()
    print("opened", flush=True)
    sys.stdin.readline()
    raise KeyError("mine")
"""
ASYNC = """
async def main():
    async with weft.ServiceClient(base_url={url!r}, api_key="tml-x") as service:
        await service.create_sampling_client(base_model="org/tiny")
        print("opened", flush=True)
        sys.stdin.readline()
        raise KeyError("mine")
asyncio.run(main())
"""


@pytest.mark.parametrize("script", [PLAIN, ASYNC])
def test_what_goes_wrong_is_told_soon_though_the_server_is_away(script: str) -> None:
    """A user who presses Ctrl-C because the server is away would otherwise press it again and again."""
    gone = Stub()
    server = serve(gone)
    script = "import asyncio, sys, weft" + SOON.format(soon_s=1.0) + script.format(url=gone.base_url)
    said, began = ended_without(server, script, "opened")
    assert said.splitlines()[-1] == "KeyError: 'mine'"
    assert time.monotonic() - began < 60  # of a budget of 300
