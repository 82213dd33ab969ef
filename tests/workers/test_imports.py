"""A worker brings nothing of the server with it: no database, no billing, no journal, no HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SHOW = """
import json, sys
import workers.__main__, workers.trainer.process, workers.generator.process
import scheduler.links.sample_link, scheduler.links.train_link
print(json.dumps(sorted(sys.modules)))
"""


def test_what_workers_import_of_ours_and_of_the_servers_libraries() -> None:
    """Both kinds, with their links to Redis: more than any of them has before its config."""
    out = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names: list[str] = json.loads(out)
    rooms = {name for name in names if name.partition(".")[0] in ("api", "billing", "scheduler", "store", "weft")}
    of_store = ("store.blobs", "store.logs", "store.tracing")
    allowed = ("scheduler.links", *of_store, "weft.wire")
    assert {n for n in rooms if not n.startswith(allowed)} == {"scheduler", "store", "weft"}
    assert not rooms & {"store.blobs.bucket", "store.blobs.objects", "store.blobs.owner"}  # where blobs lie in a folder
    libraries = {name.partition(".")[0] for name in names}
    assert not libraries & {"sqlalchemy", "alembic", "psycopg", "fastapi", "starlette", "uvicorn", "celery", "stripe"}
