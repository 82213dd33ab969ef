"""Full disks and damaged files: what the clients and the operator are told, and whether an answer is ever wrong.

Each kind of damage has a fresh embedded service and one run that makes steps, whose answers a calm run tells. What may
come out of damage is the right answer, late or not at all, with a reason. A wrong answer is what nothing may give.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tinker

from bench.chaos.load import ADAM, BASE_MODEL, supervised, trained
from bench.chaos.service import DidNotStart, Embedded, embedded

#: How long a client waits for an answer before it gives up.
PATIENCE_S = 40.0
#: Size of the file system that is filled; a service refuses work at less free space than this.
DISK_BYTES = 1 << 30
FULL_S = 8.0
STEPS = 6
#: In lines of a log: words that report a fault; and patterns in which two equal complaints differ.
LOUD = ("WARN", "ERROR", "CRITICAL", "rror:", "failed", "weftd:")
TIME = re.compile(r"^(\[\w+\] )?\d{4}-\d\d-\d\d [\d:,]+ ")
NUMBERS = re.compile(r"\b[0-9a-f]{16,}\b|\b\d+\.\d+ s\b|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass
class Finding:
    """The result of one kind of damage. `answers`: how many of the later steps were right, wrong or none."""

    name: str
    client: list[str] = field(default_factory=list)
    operator: list[str] = field(default_factory=list)
    right: int = 0
    wrong: int = 0
    none: int = 0
    skipped: str = ""


class Steps:
    """One run of one client; step k has the same data in every service."""

    def __init__(self, service: Embedded) -> None:
        self.client = tinker.ServiceClient(base_url=service.url(0), api_key=service.key("acme"))
        self.run = self.client.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result(timeout=PATIENCE_S)

    def step(self, number: int, patience_s: float = PATIENCE_S) -> str:
        """A digest of the answers to a forward_backward and an optimizer step."""
        backward = self.run.forward_backward(supervised(number, 4, 20), "cross_entropy")
        update = self.run.optim_step(ADAM)
        outputs, measures = backward.result(timeout=patience_s), update.result(timeout=patience_s).metrics or {}
        found = trained(outputs), sorted(measures.items())
        return hashlib.sha256(repr(found).encode()).hexdigest()


class Case:
    """A service to be damaged, its run, and the finding."""

    def __init__(self, name: str, service: Embedded, calm: list[str]) -> None:
        self.service, self.calm = service, calm
        self.finding = Finding(name)
        self.steps = Steps(service)
        for number in range(3):
            if self.steps.step(number) != calm[number]:
                raise RuntimeError(f"step {number} differs before anything is damaged")
        self._read = len(service.log())

    def file(self, query: str) -> Path:
        """The largest file of the blob whose ref a query returns."""
        blob = self.service.data / "blobs" / self.service.rows(query)[0][0]
        return blob if blob.is_file() else max(blob.rglob("*"), key=lambda path: path.stat().st_size)

    def start(self) -> bool:
        """Start the server again; if it does not start, the reason is noted, and False returned."""
        try:
            self.service.start()
        except DidNotStart:
            self.finding.client.append("the server does not start")
            self.finding.none += 3
            return False
        return True

    def go_on(self, first: int = 3, end: int = STEPS) -> None:
        """Make more steps, and note what the client is told instead of an answer."""
        for number in range(first, end):
            try:
                right = self.steps.step(number) == self.calm[number]
            except Exception as error:
                self.finding.none += 1
                self.tell(error)
            else:
                self.finding.right += right
                self.finding.wrong += not right

    def tell(self, error: Exception) -> None:
        nothing = isinstance(error, TimeoutError)
        said = f"no answer for {PATIENCE_S:.0f} s" if nothing else f"{type(error).__name__}: {error}"
        self.finding.client.append(" ".join(said.split()))

    def close(self) -> Finding:
        """The finding, with what the operator could read since the damage."""
        lines = self.service.log()[self._read :].splitlines()
        loud = [line for line in lines if any(word in line for word in LOUD) and "SIGKILL" not in line]
        said = [NUMBERS.sub("..", TIME.sub("", line)).strip() for line in loud]
        self.finding.operator = list(dict.fromkeys(_shown(line)[:400] for line in said))
        self.finding.client = list(dict.fromkeys(_shown(line)[:400] for line in self.finding.client))
        return self.finding


def cut(path: Path) -> None:
    """Cut a file to its first half."""
    os.truncate(path, path.stat().st_size // 2)


# ---- the kinds of damage


def body_cut(case: Case) -> None:
    """Cut a body that a replay needs; there is no snapshot yet."""
    body = case.file("select body_ref from operations where kind = 'forward_backward' order by seq limit 1")
    case.service.kill()
    cut(body)
    if case.start():
        case.go_on()


def body_cut_beside_a_living_trainer(case: Case) -> None:
    """The same, but the trainer dies instead of the server, so nothing checks the folder first."""
    cut(case.file("select body_ref from operations where kind = 'forward_backward' order by seq limit 1"))
    case.service.worker("trainer").kill()
    case.go_on()


def wal_cut(case: Case) -> None:
    case.service.kill()
    cut(case.service.data / "weft.db-wal")
    if case.start():
        case.go_on()


def database_deleted(case: Case) -> None:
    case.service.kill()
    for name in ("weft.db", "weft.db-wal", "weft.db-shm"):
        (case.service.data / name).unlink(missing_ok=True)
    if case.start():
        case.go_on()


def snapshot_cut(case: Case) -> None:
    """Cut the snapshot of a run that a server wrote when it was stopped."""
    case.service.stop()
    snapshot = case.service.rows("select snapshot_ref from runs where snapshot_ref is not null")
    if not snapshot:
        case.finding.client.append("the server was stopped without a snapshot: there was nothing to cut")
    else:
        cut(case.file("select snapshot_ref from runs where snapshot_ref is not null"))
    if case.start():
        case.go_on()


def checkpoint_cut(case: Case) -> None:
    """Cut a saved state from which a new run is made."""
    path = case.steps.run.save_state("half").result(timeout=PATIENCE_S).path
    cut(case.file("select ref from checkpoints"))
    try:
        resume = case.steps.client.create_training_client_from_state_with_optimizer
        case.steps.run = resume(path).result(timeout=PATIENCE_S)
    except Exception as error:
        case.tell(error)
    case.go_on()


def result_cut(case: Case) -> None:
    """Cut the result of a finished operation, which its client asks for again after the server's death."""
    run = case.steps.run.model_id
    (seq,) = case.service.rows("select max(seq) + 1 from operations")[0]
    inputs = {"data": [plain(datum) for datum in supervised(9)], "loss_fn": "cross_entropy"}
    headers = {"X-API-Key": case.service.key("acme")}
    with httpx.Client(base_url=case.service.url(0), headers=headers, timeout=PATIENCE_S) as http:
        body = {"model_id": run, "seq_id": seq, "forward_backward_input": inputs}
        accepted = http.post("/api/v1/forward_backward", json=body).raise_for_status().json()
        asked = {"request_id": accepted["request_id"]}
        whole = http.post("/api/v1/retrieve_future", json=asked).raise_for_status()
    stored = case.file(f"select result_ref from operations where lane = '{run}' and seq = {seq}")  # noqa: S608
    case.service.kill()
    cut(stored)
    if not case.start():
        return
    with httpx.Client(base_url=case.service.url(0), headers=headers, timeout=PATIENCE_S) as http:
        reply = http.post("/api/v1/retrieve_future", json=asked)
    told = reply.status_code != 200 or reply.content.startswith(b'{"error')
    case.finding.right += reply.content == whole.content
    case.finding.wrong += reply.content != whole.content and not told
    case.finding.none += told
    said = " ".join(reply.text.split())[:200] if told else f"{len(reply.content)} bytes of {len(whole.content)}"
    case.finding.client.append(f"HTTP {reply.status_code}: {said}")


def plain(datum: Any) -> dict[str, Any]:
    """A datum as JSON."""
    tensors = datum.loss_fn_inputs.items()
    inputs = {name: {"data": x.tolist(), "dtype": x.dtype, "shape": list(x.shape)} for name, x in tensors}
    return {"model_input": datum.model_input.model_dump(), "loss_fn_inputs": inputs}


def disk_full(case: Case) -> None:
    """Fill the disk while a client submits steps; then there is room again, and then the trainer dies."""
    filler = fill(case)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(case.go_on, 3, 4)
        time.sleep(2)
        headers = {"X-API-Key": case.service.key("acme")}
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        reply = httpx.post(f"{case.service.url(0)}/api/v1/create_session", headers=headers, json=session, timeout=30)
        case.finding.client.append(f"create_session: HTTP {reply.status_code}: {' '.join(reply.text.split())[:200]}")
        time.sleep(FULL_S)
        filler.unlink()
        pending.result()
    case.service.worker("trainer").kill()
    case.go_on(4)


def disk_full_of_results(case: Case) -> None:
    """Fill the disk when a step was accepted that waits behind a large forward; then as above."""
    large = case.steps.run.forward(supervised(7, 48, 500), "cross_entropy")
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(case.go_on, 3, 4)
        while case.service.count("select count(*) from operations where kind = 'optim_step'") < 4:
            time.sleep(0.01)
        filler = fill(case)
        waits = case.service.count("select count(*) from operations where state = 'queued'")
        case.finding.client.append(f"{waits} operations were accepted and not done when the disk was full")
        time.sleep(FULL_S)
        filler.unlink()
        pending.result()
        try:
            large.result(timeout=PATIENCE_S)
        except Exception as error:
            case.tell(error)
    case.service.worker("trainer").kill()
    case.go_on(4)


def fill(case: Case) -> Path:
    """Fill the rest of the data folder's file system."""
    filler = case.service.data / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 24, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return filler


DAMAGE: dict[str, Callable[[Case], None]] = {
    "the disk is full while steps are submitted": disk_full,
    "the disk is full when results come": disk_full_of_results,
    "a body cut in half, the server killed": body_cut,
    "a body cut in half, the trainer killed": body_cut_beside_a_living_trainer,
    "weft.db-wal cut in half, the server killed": wal_cut,
    "weft.db deleted, the server killed": database_deleted,
    "a snapshot cut in half, the server stopped": snapshot_cut,
    "a saved state cut in half": checkpoint_cut,
    "a result cut in half, the server killed": result_cut,
}


@contextmanager
def small_disk(folder: Path) -> Iterator[str]:
    """A file system of its own on `folder`. Yields "", or the reason why there is none."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    try:
        refused = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        yield "there is no mount here"
        return
    if refused.returncode:
        yield refused.stderr.strip() or "mount is refused"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def all_of(tree: Path, folder: Path, only: str) -> list[Finding]:
    with embedded(tree, folder / "calm") as service:
        steps = Steps(service)
        calm = [steps.step(number) for number in range(STEPS)]
    found = []
    for number, (name, harm) in enumerate(DAMAGE.items()):
        if only in name:
            found.append(one(tree, folder / str(number), name, harm, calm))
            print(f"{name}: {found[-1]}", flush=True)
    return found


def one(tree: Path, folder: Path, name: str, harm: Callable[[Case], None], calm: list[str]) -> Finding:
    with ExitStack() as stack:
        fills = harm in (disk_full, disk_full_of_results)
        if fills and (reason := stack.enter_context(small_disk(folder / "data"))):
            return Finding(name, skipped=reason)
        with embedded(tree, folder) as service:
            case = Case(name, service, calm)
            harm(case)
            return case.close()


def _shown(line: str) -> str:
    """A log line without the facts of this one run, and without what the SDK adds."""
    line = re.sub(r"\S*/weft-chaos-\w+/\d+/data", "DATA_DIR", line).partition(" for self.request_id=")[0]
    line = re.sub(r" \[request=.*\]$", "", line)
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32}", "ID", line).replace("|", "/")
