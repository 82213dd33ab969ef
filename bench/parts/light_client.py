"""A client that costs next to nothing, in a process of its own: what is measured is the server.

    python bench/parts/light_client.py URL SECONDS < runs.json

Each of the runs in the JSON list [[api key, run id, next number], ...] keeps one empty optim_step in flight: it is
sent, then its future is asked for, over one connection of HTTP/1.1. Prints one line of JSON: milliseconds of each
operation, and the runs with their next numbers.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

Run = tuple[str, str, int]
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader, self._writer, self._key = reader, writer, key

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nx-api-key: {self._key}\r\ncontent-length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return int(answer.split(b" ", 2)[1]), json.loads(await self._reader.readexactly(length))


async def step(run: Run, connection: _Connection) -> Run:
    key, run_id, seq = run
    body = {"type": "optim_step", "model_id": run_id, "seq_id": seq, "adam_params": ADAM}
    status, future = await connection.post("/api/v1/optim_step", body)
    asked = {"request_id": future.get("request_id"), "allow_metadata_only": True}
    while status in (200, 408):
        status, answer = await connection.post("/api/v1/retrieve_future", asked)
        if status == 200 and "error" not in answer:
            return key, run_id, seq + 1
        if status == 200:
            break
    raise RuntimeError(f"operation {seq} of {run_id}: {status}")


async def go(url: str, seconds: float, runs: list[Run]) -> dict[str, Any]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    taken_ms: list[float] = []

    async def client(run: Run) -> Run:
        connection = _Connection(*await asyncio.open_connection(host, int(port)), run[0])
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            run = await step(run, connection)
            taken_ms.append(1e3 * (time.perf_counter() - start))
        return run

    runs = list(await asyncio.gather(*map(client, runs)))
    return {"taken_ms": taken_ms, "runs": runs}


def measure(url: str, server: int, seconds: float, runs: list[Run]) -> tuple[list[float], dict[str, float], list[Run]]:
    """Let these runs step for that long. Returns the milliseconds of each operation, the processor time per operation
    of each process of the `server`, and the runs for the next time."""
    before = _cpu_s(server)
    command = [sys.executable, str(Path(__file__)), url, str(seconds)]
    done = subprocess.run(command, input=json.dumps(runs), check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    taken_ms: list[float] = found["taken_ms"]
    spent = {name: 1e3 * (now - before.get(name, 0.0)) / len(taken_ms) for name, now in _cpu_s(server).items()}
    return taken_ms, {name: ms for name, ms in spent.items() if ms >= 0.01}, found["runs"]


def _cpu_s(server: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in (psutil.Process(server), *psutil.Process(server).children(recursive=True)):
        times = one.cpu_times()
        found[one.name()] = found.get(one.name(), 0.0) + times.user + times.system
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(go(sys.argv[1], float(sys.argv[2]), json.load(sys.stdin)))))
