"""One rank of a trainer, beside a trainer of one process.

    python -m tests.workers.trainer.ranks.worlds MODEL FOLDER LAYOUT STEPS TENANTS SCENARIO ...

Rank 0 plays the same program in one process and, in each of the scenarios, on all ranks, and compares every byte that
comes out. It prints what it has found as JSON, a line for each scenario.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from weft.wire.binary.codec import decode_train_output
from weft.wire.checks.custom_format import encode_custom_loss

from scheduler.links.configs import Basics, TrainerConfig
from scheduler.links.messages import Done, OpKind, SetAside, Snapshot, loss_ref
from store.blobs.folder import FolderBlobs
from tests.workers.trainer.kit import MODEL, Bench, ce_data, replayed, rl_data, sliced
from workers.leave import leave
from workers.model.adapters.adapter import Adapter, AdapterShape, save_adapter
from workers.model.base.sharded import held_bytes, load_sharded
from workers.model.base.shared import Mapped
from workers.model.base.stored import Stored
from workers.model.base.weights import load_decoder
from workers.model.device import ModelDevice
from workers.model.owned.load import is_of_experts, load_owned
from workers.model.owned.owner import Owner
from workers.model.owned.travel import Travel
from workers.trainer import computing
from workers.trainer.microbatch import run_microbatch
from workers.trainer.ranks import guests
from workers.trainer.ranks.group import Base, Group
from workers.trainer.ranks.leader import Leader, Member, Word, follow
from workers.trainer.ranks.process import map_together, mesh_of
from workers.trainer.ranks.spread import spread
from workers.trainer.runs.arena import Arena
from workers.trainer.runs.held import HeldRuns
from workers.trainer.trainer import Trainer

#: The rank of each run. "few" leave ranks without any.
TENANTS_OF = {
    "usual": {f"r{i}": rank for i, rank in enumerate((2, 4, 8, 3, 16, 4, 1, 5))},
    "wide": {f"r{i}": rank for i, rank in enumerate((64, 1, 32, 2, 64, 33, 1, 8))},
    "few": {"r0": 4, "r2": 64},
}
#: Those of this program.
TENANTS: dict[str, int] = {}
DIMUON = ("r1", "r4")
#: Whose operations are larger than a rank's share.
LARGE = "r3"
#: Whose adapter does not share the outer factors of experts.
IMPORTED = "r0"
#: Whose loss is uploaded; they live on different ranks.
UPLOADED, LOSS_ID = ("r6", "r7"), "s:loss:0"


class ManyRanks(Bench):
    """A bench of the trainer of many ranks."""

    leader: Leader

    def restart(self) -> None:
        self.trainer = self.leader  # type: ignore[assignment]


def program(bench: Bench, steps: int) -> list[bytes]:
    """What every operation answers, and every byte of every saved run."""
    bench.blobs.put(loss_ref(LOSS_ID), SUM_OF_LOGPROBS)
    imported(bench, TENANTS[IMPORTED])
    answers(bench, [create(bench, run_id, rank) for run_id, rank in TENANTS.items()])
    said: list[bytes] = []
    for step in range(steps):
        ops = []
        for i, run_id in enumerate(TENANTS):
            ops += work(bench, run_id, 10 * step + i)
            ops.append(bench.dimuon(run_id) if run_id in DIMUON else bench.optim(run_id))
        if step == 1 and LARGE in TENANTS:  # two passes, the large operation in both
            cut = next(at for at, op in enumerate(ops) if op.run_id == LARGE and not op.final) + 1
            said += answers(bench, ops[:cut])
            said += answers(bench, ops[cut:])
        else:
            said += answers(bench, ops)
    if LARGE in TENANTS:
        said += [*answers(bench, work(bench, LARGE, 99)), snapshots(bench)]
    saves = [bench.op(run_id, OpKind.SAVE_STATE, target_ref=f"saved/{run_id}") for run_id in TENANTS]
    said += answers(bench, saves)
    for run_id in TENANTS:
        folder = bench.blobs.path(f"saved/{run_id}")
        said += [file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix == ".safetensors"]
    return said


def snapshots(bench: Bench) -> bytes:
    """Of each run, the last operation that its snapshot holds: what came after it would be done again."""
    told: list[Any] = []
    for _ in range(3):  # what could not be saved, and nothing else, is saved by the next
        bench.trainer.drain(told.append)
    return repr(sorted((each.run_id, each.seq) for each in told if isinstance(each, Snapshot))).encode()


def create(bench: Bench, run_id: str, rank: int) -> Any:
    source_ref = IMPORTED if run_id == IMPORTED else ""
    return bench.create(run_id, rank, source_ref=source_ref, optimizer=optimizer(run_id))


def imported(bench: Bench, rank: int) -> None:
    """An adapter of which each expert has a pair of its own."""
    shape = AdapterShape(bench.decoder.config, rank, shared=False)
    adapter = Adapter.init(shape, 3, scale=8.0 / rank)  # the alpha of all runs here
    adapter.flat.add_(0.01)
    save_adapter(adapter, bench.blobs.path(IMPORTED), base_model=MODEL)


def node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}


SUM_OF_LOGPROBS = encode_custom_loss(
    "sum",
    [("logprobs", 1)],
    {
        "format": 1,
        "nodes": [
            node("placeholder", "logprobs", "logprobs"),
            node("call_method", "total", "sum", {"ref": "logprobs"}),
            node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}),
        ],
    },
)


def optimizer(run_id: str) -> str:
    return "dimuon" if run_id in DIMUON else "adamw"


def work(bench: Bench, run_id: str, seed: int) -> list[Any]:
    if run_id == LARGE:
        large = sliced(bench.fb(run_id, ce_data([30, 17, 25, 9, 40, 28, 31, 12], seed)), 2, 4, 6)
        return [*large, bench.fb(run_id, ce_data([6], seed)), bench.fb(run_id, ce_data([4, 5], seed))]
    if run_id in UPLOADED:
        return [bench.fb(run_id, ce_data([5, 4], seed), "custom", loss_id=LOSS_ID)]
    if run_id == "r5":
        return [
            bench.fb(run_id, ce_data([20, 7], seed), kind=OpKind.FORWARD),
            bench.fb(run_id, rl_data([9], seed), "ppo"),
        ]
    return [bench.fb(run_id, ce_data([3 + seed % 7, 11], seed))]


def answers(bench: Bench, ops: list[Any]) -> list[bytes]:
    done: dict[str, Done] = {}
    left = ops
    while left:
        done |= answered(bench, left)
        aside = {told.run_id: told for told in bench.sent if isinstance(told, SetAside)}
        assert not any(told.lasting for told in aside.values())
        ASIDE.extend(aside)
        waits = {op.op_id for op in ops} - set(done)
        left = [
            op if op.op_id in waits else replayed(op)
            for run_id, told in aside.items()
            for op in (*log_of(bench), *ops)
            if op.run_id == run_id and (not told.kept or op.op_id in waits)
        ]
    log_of(bench).extend(ops)
    return [plain(op, done[op.op_id].payload) for op in ops if op.final]


def answered(bench: Bench, ops: list[Any]) -> Mapping[str, Done]:
    done = bench.go(*ops)
    assert not (failed := [each for each in done.values() if each.failure is not None]), failed
    return done


def log_of(bench: Bench) -> list[Any]:
    """What a bench has been given: a run that is not what it was is given that again, as replays."""
    return LOGS.setdefault(bench, [])


def plain(op: Any, payload: bytes) -> bytes:
    """A result without protobuf's choice of the order of its entries."""
    if op.kind not in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD):
        return payload
    outputs, metrics = decode_train_output(payload)
    return repr((sorted(metrics.items()), [fields["logprobs"].tobytes() for fields in outputs])).encode()


@contextmanager
def recomputed(rank: int) -> Iterator[None]:
    """On one rank alone: the others gather the same, whatever it keeps."""
    with (
        patch("workers.model.memory.ALWAYS_FITS_BYTES", -1 if rank == 1 else 1 << 60),
        patch("workers.model.memory.SHARE", 0.0),
    ):
        yield


@contextmanager
def short_of_memory(rank: int) -> Iterator[None]:
    """Memory runs out in the middle of a forward on one rank, and of a backward on the other, above 40 tokens."""

    def run(decoder: Any, parts: Any, *, trains: bool) -> None:
        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        def late(module: Any, args: Any, out: torch.Tensor) -> None:
            out.register_hook(fail)

        if sum(part.tokens for part in parts) <= 40 or len(parts) == 1:
            run_microbatch(decoder, parts, trains=trains)
            return
        layer = decoder.layers[rank % len(decoder.layers)]
        handle = layer.register_forward_hook(late if trains and rank % 2 else fail)
        try:
            run_microbatch(decoder, parts, trains=trains)
        finally:
            handle.remove()

    with patch.object(computing, "run_microbatch", run):
        yield


@contextmanager
def failing_owner(name: str, error: type[Exception], rank: int) -> Iterator[None]:
    """Memory runs out on rank 0 whenever all ranks have sent many pairs; or something else happens there once."""
    real = getattr(Owner, name)

    def serve(self: Owner, *args: Any) -> Any:
        many = max(len(each) for each in args if isinstance(each, torch.Tensor)) > 70
        if rank == 0 and many and not (FAILURES and error is ValueError):
            FAILURES.append(name)
            raise error("on purpose")
        return real(self, *args)

    with patch.object(Owner, name, serve):
        yield


@contextmanager
def killed(rank: int) -> Iterator[None]:
    """Rank 1 dies with what others wait for on its way. What rank 0 says of a failure is printed."""
    travels, execute, turns = Travel.rows, Leader.execute, itertools.count()

    def rows(self: Travel, *args: Any) -> Any:
        if rank == 1 and next(turns) == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        return travels(self, *args)

    def speak(self: Leader, pass_: Any, send: Any) -> None:
        def say(*told: Any) -> None:
            for message in told:
                if isinstance(message, Done) and message.failure is not None:
                    print(json.dumps({"failed": message.failure.message}), flush=True)
            send(*told)

        execute(self, pass_, say)

    with patch.object(Travel, "rows", rows), patch.object(Leader, "execute", speak):
        yield


@contextmanager
def poor(which: int, rank: int) -> Iterator[None]:
    """On one rank there is no memory for every third guest, every third that is there is too large to be computed, and
    while there are guests some of its own parts are."""
    of_guest, turns, parts_here = Arena.of_guest, itertools.count(1), itertools.count(1)
    gradients: weakref.WeakSet[Arena] = weakref.WeakSet()

    def made(kind: Any, weights: Adapter) -> Arena:
        if next(turns) % 3 == 0:
            FAILURES.append("no guest")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        gradients.add(arena := of_guest(kind, weights))
        return arena

    def run(decoder: Any, parts: Any, *, trains: bool) -> None:
        guests = [part for part in parts if part.progress.run.guest]
        if (guests and next(parts_here) % 3 == 0) or (not guests and gradients and next(parts_here) % 3 == 0):
            FAILURES.append("guest" if guests else "own")
            for part in parts:
                if part.progress.grad is not None:
                    part.progress.grad.flat.add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        run_microbatch(decoder, parts, trains=trains)

    if rank != which:
        yield
        return
    with patch.object(Arena, "of_guest", made), patch.object(computing, "run_microbatch", run):
        yield


@contextmanager
def full(which: int, first: int, rank: int) -> Iterator[None]:
    """On one rank there is no memory for the states of runs, less and less often."""
    bring, left, gap = HeldRuns.bring, first, first

    def brought(self: HeldRuns, *runs: Any) -> None:
        nonlocal left, gap
        left -= any(not run.guest for run in runs)
        if left == 0:
            left = gap = gap + 1
            FAILURES.append("no run")
            raise OSError(errno.ENOMEM, "no memory for the states of runs")
        bring(self, *runs)

    if rank != which:
        yield
        return
    with patch.object(HeldRuns, "bring", brought):
        yield


#: On this rank, in one scenario: what has failed there.
FAILURES: list[str] = []
#: In one scenario: runs that were set aside.
ASIDE: list[str] = []
LOGS: weakref.WeakKeyDictionary[Bench, list[Any]] = weakref.WeakKeyDictionary()

SCENARIOS: dict[str, tuple[Any, dict[str, int]]] = {
    "plain": (None, {"microbatch_tokens": 64}),
    "recomputed": (recomputed, {"microbatch_tokens": 64}),
    "short of memory": (short_of_memory, {"microbatch_tokens": 64}),
    "owner short": (partial(failing_owner, "forward", torch.OutOfMemoryError), {"microbatch_tokens": 64}),
    "owner short, back": (partial(failing_owner, "backward", torch.OutOfMemoryError), {"microbatch_tokens": 64}),
    "owner fails": (partial(failing_owner, "forward", ValueError), {"microbatch_tokens": 64}),
    "paged": (None, {"microbatch_tokens": 64, "resident_bytes": 300_000}),
    **{f"poor {rank}": (partial(poor, rank), {"microbatch_tokens": 64}) for rank in (0, 1, 2)},
    **{
        f"full {rank} {first}": (partial(full, rank, first), {"microbatch_tokens": 64, "resident_bytes": 300_000})
        for rank in (0, 1)
        for first in (2, 3)
    },
    "killed": (killed, {"microbatch_tokens": 64}),
}


def main(model: Path, folder: Path, layout: str, steps: int, tenants: str, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    TENANTS.update(TENANTS_OF[tenants])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group, read = Group(), list[int]()
    with patch.object(Stored, "rows", counted(Stored.rows, read)):
        base = load(model, layout, group, folder)
    held, files = zip(*group.exchange((memory_of(base, group), sum(read))), strict=True)
    total, experts, wanted = 0, 0, list[bytes]()
    if group.leads:
        whole = load_decoder(model)
        total = sum(weight.nbytes for weight in whole.parameters())
        of_experts = [each for name, each in whole.named_parameters() if is_of_experts(whole, name)]
        experts = sum(weight.nbytes for weight in of_experts)
        wanted = program(Bench(whole, folder / "one", microbatch_tokens=64), steps)
    if not group.leads and not any(name.startswith("poor") for name in chosen):
        # The server is told of an uploaded loss at once: by rank 0, which computes it.
        patch("workers.trainer.microbatch.custom_loss", side_effect=AssertionError).start()
    moved: list[int] = []
    for name in chosen:
        fault, bounds = SCENARIOS[name]
        with ExitStack() as stack:
            if fault is not None:
                stack.enter_context(fault(group.rank))
            stack.enter_context(patch.object(guests, "spread", counted(spread, moved)))
            found = play(group, base, wanted, folder / name, bounds, steps)
        failures = Counter(each for own in group.exchange(FAILURES) for each in own)
        if group.leads:
            found |= {
                "scenario": name,
                "moves": sum(moved),
                "total": total,
                "experts": experts,
                "failures": failures,
                "aside": len(ASIDE),
            }
            found |= {"held": held, "read": files}
            print(json.dumps(found))
        moved.clear()
        FAILURES.clear()
        ASIDE.clear()
    dist.barrier()


def load(model: Path, layout: str, group: Group, folder: Path) -> Base:
    where = ModelDevice(torch.device("cpu"), torch.float32)
    if layout == "experts":
        return load_owned(model, where.dtype, where.device)
    # Four ranks are two nodes, each of which has the whole base.
    nodes = TrainerConfig(Basics("", {}, base_dir=str(folder)), ranks=2, nodes=group.size // 2, shard="node")
    if layout == "mapped":
        base = map_together(model, nodes, where, group)
        assert base is not None
        return base
    return load_sharded(model, where.dtype, where.device, mesh_of(nodes, where))


def memory_of(base: Base, group: Group) -> int:
    """Of the base, what this rank has of it; of what is mapped, its share by the kernel's account, once all use it."""
    if not isinstance(base, Mapped):
        return held_bytes(base.decoder)
    for weight in base.decoder.parameters():
        weight.sum()
    group.exchange(None)
    start = min(weight.data_ptr() for weight in base.decoder.parameters())
    pss_kb = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            low, high = (int(end, 16) for end in first.split("-"))
        elif first == "Pss:" and low <= start < high:
            pss_kb = int(line.split()[1])
    group.exchange(None)
    return pss_kb << 10


def counted(real: Any, into: list[int]) -> Any:
    def call(*args: Any) -> Any:
        result = real(*args)
        into.append(result.nbytes if isinstance(result, torch.Tensor) else len(result))
        return result

    return call


def play(
    group: Group, base: Base, wanted: list[bytes], folder: Path, bounds: dict[str, int], steps: int
) -> dict[str, Any]:
    def begin() -> Member:
        def make(others: Any) -> Trainer:
            of = Bench(base.decoder, folder / "many", **bounds)
            pages = folder / f"pages-{group.rank}"
            return Trainer({MODEL: base.decoder}, FolderBlobs(folder / "many"), of.bounds, pages, others=others)

        return Member(group, {MODEL: base}, torch.device("cpu"), make)

    if not group.leads:
        follow(group, begin)
        return {}
    group.tell([Word.BEGIN] * group.size)
    ManyRanks.leader = Leader(begin())
    found = program(ManyRanks(base.decoder, folder / "many", **bounds), steps)
    homes = [ManyRanks.leader.home_of(run_id) for run_id in TENANTS]
    pages = ManyRanks.leader.residency.page_ins
    group.tell([Word.STOP] * group.size)
    return {"same": [x == y for x, y in zip(found, wanted, strict=True)], "homes": homes, "pages": pages}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6:])
    leave(0)  # as ranks do: gloo's threads may abort a process that is taken apart
