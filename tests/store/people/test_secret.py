"""Ids, whose random bytes are drawn for many at once."""

from __future__ import annotations

import subprocess
import sys

from store.people.secret import new_id

FORKS = """
import os
from store.people import secret
first = secret.new_id()
secret._drawing.acquire()  # as another thread might
if os.fork() == 0:
    print(secret.new_id(), flush=True)
    os._exit(0)
os.wait()
secret._drawing.release()
print(secret.new_id())
"""


def test_no_id_is_drawn_twice() -> None:
    drawn = [new_id() for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert {len(bytes.fromhex(each)) for each in drawn} == {16}


def test_a_forked_process_draws_ids_of_its_own() -> None:
    said = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True)
    child, parent = said.stdout.split()
    assert child != parent
