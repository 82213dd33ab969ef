"""A backup that is taken while tenants work is restored elsewhere: runs go on to the same bits, at the same cost."""

from __future__ import annotations

import itertools
import sqlite3
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd, weftd_command
from tests.e2e.data import ADAM, prompt, supervised
from tests.waiting import until

pytestmark = pytest.mark.server

#: Steps of each tenant before the backup begins, and after it is made.
BEFORE, AFTER = 4, 4
#: A snapshot every few steps, each of which deletes the one before: files that a backup may miss.
CONFIG = "[trainer]\nsnapshot_every_tokens = 100\n"


class Tenant:
    """A tenant with an official client that trains step by step, samples in between, and notes all answers."""

    def __init__(self, server: Weftd, name: str) -> None:
        self.service = tinker.ServiceClient(base_url=server.url, api_key=server.key(name))
        self.run = self.service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
        self.losses: list[float] = []
        self.stop = threading.Event()

    def train(self, start: int, end: int | None = None) -> None:
        """Train up to step `end`, or until told to stop; step k is the operations 2k + 1 and 2k + 2 of the run."""
        for step in itertools.count(start):
            if step == end or self.stop.is_set():
                return
            backward = self.run.forward_backward(supervised(seed=step), "cross_entropy")
            self.run.optim_step(ADAM).result(timeout=60)
            self.losses.append(backward.result(timeout=60).metrics["loss:sum"])

    def last_words(self) -> list[int]:
        sampler = self.run.save_weights_and_get_sampling_client().result(timeout=60)
        drawn = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=8, seed=3, stop=[])).result(timeout=60)
        return list(drawn.sequences[0].tokens)


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{folder}/weft.db?mode=ro", uri=True) as database:
        return database.execute(query).fetchall()


def test_a_backup_under_load_goes_on_with_the_same_bits_and_the_same_money(
    own_weftd: Callable[..., Weftd], tmp_path: Path
) -> None:
    config = tmp_path / "weft.toml"
    config.write_text(CONFIG)
    server = own_weftd("--config", str(config))
    tenants = [Tenant(server, name) for name in ("acme", "globex")]
    threads = [threading.Thread(target=tenant.train, args=(0,)) for tenant in tenants]
    for thread in threads:
        thread.start()
    wait_for_steps(tenants, BEFORE)
    made = weftd_command("backup", tmp_path / "backup", "--data-dir", server.data_dir)
    assert made.returncode == 0, made.stderr
    wait_for_steps(tenants, max(len(tenant.losses) for tenant in tenants) + AFTER)
    for tenant, thread in zip(tenants, threads, strict=True):
        tenant.stop.set()
        thread.join(60)
    told = [(tenant.losses, tenant.last_words()) for tenant in tenants]
    spent = money(server.data_dir)
    assert server.stop() == 0, server.log()
    sums = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "backup")
    assert sums.returncode == 0

    restored = tmp_path / "elsewhere"
    assert (put := weftd_command("restore", tmp_path / "backup", "--data-dir", restored)).returncode == 0, put.stderr
    done = dict(rows(restored, "select lane, max(seq) from operations where kind != 'sample' group by lane"))
    assert all(2 * BEFORE <= done[tenant.run.model_id] < 2 * len(tenant.losses) for tenant in tenants), done
    server.data_dir = restored
    server.start()
    for tenant in tenants:
        go_on(tenant, done[tenant.run.model_id], end=len(tenant.losses))
    assert [tenant.last_words() for tenant in tenants] == [words for _, words in told]
    for tenant, (losses, _) in zip(tenants, told, strict=True):
        assert tenant.losses == losses[-len(tenant.losses) :]
    assert money(restored) == spent
    assert weftd_command("billing", "reconcile", "--data-dir", restored).stdout == "the books agree\n"
    assert "Traceback" not in server.log()


def wait_for_steps(tenants: list[Tenant], count: int) -> None:
    until(lambda: min(len(tenant.losses) for tenant in tenants) >= count, 120)


def go_on(tenant: Tenant, last_seq: int, end: int) -> None:
    """Go on like a client that stopped when the backup was taken: from the number of the last operation in it."""
    step, half = divmod(last_seq, 2)
    tenant.run._request_id_counter = tenant.run._turn_counter = last_seq
    tenant.losses = []
    tenant.stop.clear()
    if half:  # the backup has the gradient of that step, but not its optimizer step
        tenant.run.optim_step(ADAM).result(timeout=60)
    tenant.train(step + half, end)


def money(folder: Path) -> Counter[tuple[str, str, str]]:
    """Tokens and nano-dollars of each organisation and kind, without storage, whose cost depends on the clock."""
    query = """select o.name, kind, sum(quantity), sum(amount_nusd) from usage_events u join organisations o
               on o.id = u.org_id where kind != 'storage' group by o.name, kind"""
    found = Counter[tuple[str, str, str]]()
    for name, kind, tokens, amount in rows(folder, query):
        found[name, kind, "tokens"], found[name, kind, "nusd"] = tokens, amount
    return found
