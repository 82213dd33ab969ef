"""What a worker weighs before it loads a model: `python bench/idle_worker.py [MODULE[+MODULE...]...]`.

Imports the modules in a process of its own, from the current folder, and prints its memory (RSS; in PSS and USS pages
that others have too count in part and not at all), the time, how many modules came with them, how many of them are
ours, and which of the libraries are there that only the server has a use for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

#: The links alone; then workers before their config, and as they come to Redis.
MODULES = (
    "scheduler.links.sockets",
    "scheduler.links.sample_link",
    "scheduler.links.train_link",
    "workers.trainer.process",
    "workers.generator.process",
    "workers.trainer.process+scheduler.links.train_link",
    "workers.generator.process+scheduler.links.sample_link",
)
SERVER_ONLY = (
    "sqlalchemy",
    "alembic",
    "psycopg",
    "fastapi",
    "starlette",
    "uvicorn",
    "stripe",
    "celery",
    "httpx",
    "api",
)
OURS = ("api", "billing", "scheduler", "store", "weft", "workers")

MEASURE = """
import importlib, json, sys
for module in sys.argv[1].split("+"):
    importlib.import_module(module)
rollup = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
mib = {name: int(rollup[name].split()[0]) / 1024 for name in ("Rss", "Pss", "Private_Clean", "Private_Dirty")}
print(json.dumps([mib, sorted(sys.modules)]))
"""


def measure(module: str) -> str:
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "client_sdk")])}
    command = [sys.executable, "-c", MEASURE, module]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    mib, names = json.loads(out)
    tops = {name.partition(".")[0] for name in names}
    counts = " ".join(f"{ours} {n}" for ours in OURS if (n := sum(name.startswith(f"{ours}.") for name in names)))
    heavy = ", ".join(sorted(tops & set(SERVER_ONLY))) or "nothing"
    uss = mib["Private_Clean"] + mib["Private_Dirty"]
    seconds = time.monotonic() - began
    return (
        f"{module:54} rss {mib['Rss']:6.1f}  pss {mib['Pss']:6.1f}  uss {uss:6.1f} MiB  {seconds:5.1f} s"
        f"  {len(names):5} modules; ours: {counts or 'none'}; of the server: {heavy}"
    )


def main() -> None:
    for module in sys.argv[1:] or MODULES:
        print(measure(module), flush=True)


if __name__ == "__main__":
    main()
