"""The main job, end to end: serve, two tenants train on one shared base model, everyone sees their bill.

    make demo        (or: python examples/demo.py [--data my.jsonl] [--exit])

Starts `weftd` with a fresh data folder, makes two organisations, and runs examples/rl_arithmetic.py for one and
examples/sft_docs.py for the other at the same time. Prints live progress, then one table, and draws both curves.
Exits with 1 when the reward did not at least double, or when the ledger does not add up to the operations run.
The service keeps running afterwards so that you can look around; `--exit` stops it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import rl_arithmetic
import sft_docs
import weft
from demo_report import Curve, check_ledger, draw, table
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from weft.wire.account.usage import UsageResponse

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo-out"
BASE_MODEL = "weft/tiny-moe"
RL_STEPS = 40
SFT_STEPS = 100

console = Console()


def start_server(data_dir: Path, port: int) -> tuple[subprocess.Popen[str], str]:
    """A `weftd serve` on a fresh data folder; returns it and its address once it answers."""
    shutil.rmtree(data_dir, ignore_errors=True)
    data_dir.mkdir(parents=True)
    command = [Path(sys.executable).parent / "weftd", "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = (data_dir / "weftd.log").open("w")
    server = subprocess.Popen(
        [*map(str, command), "--data-dir", str(data_dir)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    line = server.stdout.readline().split()
    if len(line) != 2 or line[0] != "ready":
        console.print((data_dir / "weftd.log").read_text(), style="red")
        sys.exit("the server did not start")
    return server, line[1]


def make_key(data_dir: Path, organisation: str) -> str:
    command = [Path(sys.executable).parent / "weftd", "key", "create", "--data-dir", data_dir, "--org", organisation]
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout.strip()


class Tenant(threading.Thread):
    """One organisation's loop, in a thread of its own, as a laptop elsewhere would run it."""

    def __init__(self, organisation: str, url: str, key: str, metric: str, loop: Any, progress: Progress) -> None:
        super().__init__(name=organisation, daemon=True)
        self.organisation = organisation
        self.client: dict[str, Any] = {"base_url": url, "api_key": key}
        self.curve = Curve(organisation, metric)
        self.error: BaseException | None = None
        self.usage = UsageResponse(rows=[], total_nusd=0, total_usd="0", price_version="")
        self.sample = ""
        self._loop = loop
        self._progress = progress
        self._task = progress.add_task(organisation, total=None, text="starting")

    def run(self) -> None:
        try:
            with weft.ServiceClient(**self.client) as service:
                self._loop(service, self._on_step)
                self.usage = service.create_rest_client().get_usage().result()
        except BaseException as error:  # reported by the main thread
            self.error = error

    def _on_step(self, step: dict[str, Any]) -> None:
        if "sample" in step:
            self.sample = step["sample"]
            return
        value = step[self.curve.metric]
        self.curve.values.append(value)
        self.curve.operations += 2 if step["data"] else 0
        text = f"{self.curve.metric} {value:.3f}"
        self._progress.update(self._task, total=step["of"], completed=step["step"] + 1, text=text)


def train(url: str, data_dir: Path, conversations: list[sft_docs.Conversation]) -> list[Tenant]:
    """Both loops at the same time, with live progress."""
    columns = (TextColumn("{task.description:>14}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TextColumn("{task.fields[text]}"), TimeElapsedColumn(), console=console) as progress:

        def rl(service: weft.ServiceClient, on_step: Any) -> None:
            rl_arithmetic.run(service, BASE_MODEL, RL_STEPS, on_step=on_step)

        def sft(service: weft.ServiceClient, on_step: Any) -> None:
            sft_docs.run(service, BASE_MODEL, conversations, SFT_STEPS, on_step=on_step)

        tenants = [
            Tenant("sums-by-rl", url, make_key(data_dir, "sums-by-rl"), "reward", rl, progress),
            Tenant("docs-by-sft", url, make_key(data_dir, "docs-by-sft"), "loss", sft, progress),
        ]
        for tenant in tenants:
            tenant.start()
        for tenant in tenants:
            tenant.join()
    return tenants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a JSONL of conversations to fine-tune on")
    parser.add_argument("--port", type=int, default=0, help="port of the service; 0 takes a free one")
    parser.add_argument("--exit", action="store_true", help="stop the service at the end")
    args = parser.parse_args()
    started = time.monotonic()
    OUT.mkdir(exist_ok=True)
    data_dir = OUT / "data"
    jsonl = args.data or OUT / "docs.jsonl"
    if args.data is None:
        console.print(f"{sft_docs.write_jsonl(jsonl)} conversations from the standard library in {jsonl}")
    server, url = start_server(data_dir, args.port)
    console.print(f"weftd serves {BASE_MODEL} at {url}")
    keep = False
    try:
        tenants = train(url, data_dir, sft_docs.read_jsonl(jsonl))
        for tenant in tenants:
            if tenant.error is not None:
                console.print(f"{tenant.organisation} failed: {tenant.error!r}", style="red")
                return 1
        stats = weft.ServiceClient(**tenants[0].client).create_rest_client().get_stats().result()
        console.print(table([t.curve for t in tenants], {t.organisation: t.usage for t in tenants}, stats))
        console.print(f"after fine-tuning, os.path.join(a, *p): {tenants[1].sample!r}", markup=False)
        draw([t.curve for t in tenants], OUT / "demo.png")
        problems = check_ledger(data_dir / "weft.db", {t.organisation: t.usage for t in tenants})
        first, last = tenants[0].curve.ends()
        if last < 2 * first:
            problems.append(f"the mean reward went from {first:.3f} to {last:.3f}: it did not double")
        for problem in problems:
            console.print(problem, style="red")
        console.print(f"both curves: {OUT / 'demo.png'}; {time.monotonic() - started:.0f} s in all")
        keep = not args.exit
        return 1 if problems else 0
    finally:
        if keep:
            console.print(
                f"the service goes on at {url}; stop it with: kill {server.pid}\n"
                f"curves and bills are at {url}/console, for a key of the organisation to look at:\n"
                f"{Path(sys.executable).parent / 'weftd'} key create --data-dir {data_dir} --org sums-by-rl",
                soft_wrap=True,
            )
        else:
            os.kill(server.pid, signal.SIGTERM)
            server.wait(30)


if __name__ == "__main__":
    sys.exit(main())
