"""One rank of a trainer, beside a trainer of one process.

    python -m tests.workers.trainer.ranks.worlds MODEL FOLDER LAYOUT STEPS TENANTS SCENARIO ...

Rank 0 plays the same program in one process and, in each of the scenarios, on all ranks, and compares every byte of
the results. It prints what it has found as JSON, a line for each scenario. All compute on `RANKS_DEVICE` in
`RANKS_DTYPE`; each rank has a GPU of its own.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from weft.wire import SaveWeightsExternalRequest
from weft.wire.binary.train_codec import decode_train_output
from weft.wire.checks.custom_format import encode_custom_loss

from scheduler.links.configs import Basics, TrainerConfig
from scheduler.links.messages import Done, OpKind, SetAside, Snapshot, loss_ref
from store.blobs.folder import FolderBlobs
from tests.workers.trainer.kit import MODEL, Bench, ce_data, replayed, rl_data, sliced
from tests.workers.trainer.ranks.faults import FAILURES, FAULTY, LITTLE, USUAL, scenario
from workers.leave import leave
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.base.sharded import held_bytes, load_sharded
from workers.model.base.shared import Mapped
from workers.model.base.stored import Stored
from workers.model.base.weights import load_decoder
from workers.model.device import ModelDevice
from workers.model.owned.load import is_of_experts, load_owned
from workers.trainer.progress import Progress
from workers.trainer.ranks import guests
from workers.trainer.ranks.group import Base, Group
from workers.trainer.ranks.leader import Leader, Member, Word, announce, follow
from workers.trainer.ranks.process import map_together, mesh_of
from workers.trainer.ranks.spread import spread
from workers.trainer.trainer import Trainer
from workers.trainer.watchdog import no_limit

RANK = int(os.environ.get("RANK", "0"))
DEVICE = torch.device(os.environ.get("RANKS_DEVICE", "cpu"), RANK if "RANKS_DEVICE" in os.environ else None)
WHERE = ModelDevice(DEVICE, getattr(torch, os.environ.get("RANKS_DTYPE", "float32")))
#: The adapter's rank in each run. "few" leaves some of the trainer's ranks without a run.
TENANTS_OF = {
    "usual": {f"r{i}": rank for i, rank in enumerate((2, 4, 8, 3, 16, 4, 1, 5))},
    "wide": {f"r{i}": rank for i, rank in enumerate((64, 1, 32, 2, 64, 33, 1, 8))},
    "few": {"r0": 4, "r2": 64},
}
#: The runs of this program, from `TENANTS_OF`.
TENANTS: dict[str, int] = {}
DIMUON = ("r1", "r4")
#: The run whose operations are larger than a rank's share.
LARGE = "r3"
#: The run whose adapter does not share the outer factors of experts.
IMPORTED = "r0"
#: The runs that are exported; in "few" these are all.
EXPORTED = ("r0", "r2")
#: The runs whose loss is uploaded; they live on different ranks.
UPLOADED, LOSS_ID = ("r6", "r7"), "s:loss:0"


class ManyRanks(Bench):
    """A bench of the trainer of many ranks."""

    leader: Leader

    def restart(self) -> None:
        self.trainer = self.leader  # type: ignore[assignment]


def program(bench: Bench, steps: int) -> list[bytes]:
    """Play the program: the answer of every operation, and every byte of every saved run."""
    bench.blobs.put(loss_ref(LOSS_ID), SUM_OF_LOGPROBS)
    imported(bench, TENANTS[IMPORTED])
    answers(bench, [create(bench, run_id, rank) for run_id, rank in TENANTS.items()])
    said: list[bytes] = []
    for step in range(steps):
        ops = []
        for i, run_id in enumerate(TENANTS):
            ops += work(bench, run_id, 10 * step + i)
            if run_id == FAULTY and step == 0:  # the step is told of the failure, and sent again
                ops += [bench.fb(run_id, too_far(), "ppo"), stepped(bench, run_id)]
            ops.append(stepped(bench, run_id))
        if step == 1 and LARGE in TENANTS:  # two passes, the large operation in both
            cut = next(at for at, op in enumerate(ops) if op.run_id == LARGE and not op.final) + 1
            said += answers(bench, ops[:cut])
            said += answers(bench, ops[cut:])
        else:
            said += answers(bench, ops)
    if LARGE in TENANTS:
        said += [*answers(bench, work(bench, LARGE, 99)), snapshots(bench)]
    body = SaveWeightsExternalRequest(model_id="", path="x").model_dump_json().encode()
    saves = [bench.op(run_id, OpKind.SAVE_STATE, target_ref=f"saved/{run_id}") for run_id in TENANTS]
    exports = [bench.op(run_id, OpKind.SAVE_EXTERNAL, body, target_ref=f"export/{run_id}") for run_id in EXPORTED]
    said += answers(bench, [*saves, *exports])
    for save in (*saves, *exports):
        names = sorted(name for name in bench.blobs.files(save.target_ref) if name.endswith(".safetensors"))
        said += [(bench.blobs.path(save.target_ref) / name).read_bytes() for name in names]
    return said


def stepped(bench: Bench, run_id: str) -> Any:
    """An optimizer step with settings that depend on the run."""
    number = int(run_id[1:])
    clip = (0.0, 1e-3, 1.0)[number % 3]
    if run_id in DIMUON:
        return bench.dimuon(run_id, grad_clip_norm=clip)
    return bench.optim(run_id, grad_clip_norm=clip, weight_decay=0.1 * (number % 2), beta2=0.9 + 0.01 * number)


def snapshots(bench: Bench) -> bytes:
    """The last operation in each run's snapshot: those after it would be replayed."""
    told: list[Any] = []
    for _ in range(3):  # the next drain saves what this one could not, and nothing else
        bench.trainer.drain(told.append)
    return repr(sorted((each.run_id, each.seq) for each in told if isinstance(each, Snapshot))).encode()


def create(bench: Bench, run_id: str, rank: int) -> Any:
    source_ref = IMPORTED if run_id == IMPORTED else ""
    return bench.create(run_id, rank, source_ref=source_ref, optimizer=optimizer(run_id))


def imported(bench: Bench, rank: int) -> None:
    """An adapter with a pair of factors for each expert."""
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


def too_far() -> list[Any]:
    """Data for several ranks; one datum has a ratio beyond float32."""
    data = rl_data([30, 40, 31], seed=0)
    data[1].inputs["logprobs"][7], data[1].inputs["advantages"][7] = -300.0, -1.0
    return data


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
            *sliced(bench.fb(run_id, ce_data([20, 7, 9, 16, 12, 11], seed), kind=OpKind.FORWARD), 2, 4),
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
            if op.run_id == run_id and not failed(op, done)
            if op.op_id in waits or not told.kept or overtaken(run_id, ops, waits)
        ]
    log_of(bench).extend(op for op in ops if not failed(op, done))
    return [plain(op, done[op.op_id]) for op in ops if op.final]


def failed(op: Any, done: Mapping[str, Done]) -> bool:
    """Whether the operation failed: then it has changed nothing, and is no part of a replay."""
    return op.op_id in done and done[op.op_id].failure is not None


def overtaken(run_id: str, ops: list[Any], waits: set[str]) -> bool:
    """Whether an operation behind a waiting one is answered: then the run is rebuilt, as in the server
    (`RunLane.pause`)."""
    left = [op.op_id in waits for op in ops if op.run_id == run_id]
    return True in left and False in left[left.index(True) :]


def answered(bench: Bench, ops: list[Any]) -> Mapping[str, Done]:
    done = bench.go(*ops)
    assert all(op.run_id == FAULTY or not failed(op, done) for op in ops), done
    return done


def log_of(bench: Bench) -> list[Any]:
    """The operations that a bench has been given. A run that lost its state is given them again, as replays."""
    return LOGS.setdefault(bench, [])


def plain(op: Any, done: Done) -> bytes:
    """A result with its entries in a fixed order, which protobuf leaves open; or the failure in its place."""
    payload = done.payload
    if done.failure is not None:
        return repr(done.failure).encode()
    if op.kind not in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD):
        return payload
    outputs, metrics = decode_train_output(payload)
    return repr((sorted(metrics.items()), [fields["logprobs"].tobytes() for fields in outputs])).encode()


#: The runs that were set aside in the current scenario.
ASIDE: list[str] = []
LOGS: weakref.WeakKeyDictionary[Bench, list[Any]] = weakref.WeakKeyDictionary()


def main(model: Path, folder: Path, layout: str, steps: int, tenants: str, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    TENANTS.update(TENANTS_OF[tenants])
    on_gpu, read = DEVICE.type == "cuda", list[int]()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    group = Group(dist.new_group(backend="gloo") if on_gpu else None)
    with patch.object(Stored, "rows", counted(Stored.rows, read)):
        base = load(model, layout, group, folder)
    held, files = zip(*group.exchange((memory_of(base, group), sum(read))), strict=True)
    total, experts, usual, little = 0, 0, list[bytes](), list[bytes]()
    if group.leads:
        whole = load_decoder(model, WHERE.dtype, DEVICE)
        total = sum(weight.nbytes for weight in whole.parameters())
        of_experts = [each for name, each in whole.named_parameters() if is_of_experts(whole, name)]
        experts = sum(weight.nbytes for weight in of_experts)
        usual = little = program(Bench(whole, folder / "one", **USUAL), steps)
        if on_gpu:  # other bounds make other batches, and a GPU's products round by a batch's size
            little = program(Bench(whole, folder / "one-with-little", **LITTLE), steps)
            ASIDE.clear()
    if not group.leads and not any(name.startswith(("poor", "full", "drawn")) for name in chosen):
        # The server is told of an uploaded loss at once: by rank 0, which computes it.
        patch("workers.trainer.microbatch.custom_loss", side_effect=AssertionError).start()
    moved: list[int] = []
    welcome, welcomed = Trainer.welcome, Counter[str]()

    def noted(self: Trainer, guest: Progress, send: Any) -> None:
        has_gradient = guest.run.own_grad.flat.device == DEVICE
        welcomed[f"{guest.op.kind} {'with' if has_gradient else 'without'} a gradient"] += 1
        welcome(self, guest, send)

    for name in chosen:
        fault, bounds = scenario(name)
        with (
            fault(group.rank),
            patch.object(guests, "spread", counted(spread, moved)),
            patch.object(Trainer, "welcome", noted),
        ):
            found = play(group, base, little if bounds == LITTLE else usual, folder / name, bounds, steps)
        failures = Counter(each for own in group.exchange(FAILURES) for each in own)
        came = sum(group.exchange(welcomed), Counter[str]())
        if group.leads:
            found |= {
                "scenario": name,
                "moves": sum(moved),
                "guests": came,
                "total": total,
                "experts": experts,
                "failures": failures,
                "aside": len(ASIDE),
            }
            found |= {"held": held, "read": files}
            print(json.dumps(found))
        moved.clear()
        welcomed.clear()
        FAILURES.clear()
        ASIDE.clear()
    dist.barrier()


def load(model: Path, layout: str, group: Group, folder: Path) -> Base:
    if layout == "experts":
        return load_owned(model, WHERE.dtype, DEVICE, group.control)
    # Four ranks are two nodes, each of which has the whole base.
    basics, ranks = Basics("", {}, base_dir=str(folder)), min(group.size, 2)
    nodes = TrainerConfig(basics, ranks=ranks, nodes=group.size // ranks, shard="node")
    if layout == "mapped":
        base = map_together(model, nodes, WHERE, group)
        assert base is not None
        return base
    return load_sharded(model, WHERE.dtype, DEVICE, mesh_of(nodes, WHERE))


def memory_of(base: Base, group: Group) -> int:
    """The bytes of the base that this rank has. Of a mapped base it is the rank's share by the kernel's account, once
    all ranks use it."""
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

        return Member(group, {MODEL: base}, DEVICE, make)

    if not group.leads:
        follow(group, begin)
        return {}
    announce(group, Word.BEGIN, no_limit)
    ManyRanks.leader = Leader(begin())
    found = program(ManyRanks(base.decoder, folder / "many", **bounds), steps)
    homes = [ManyRanks.leader.home_of(run_id) for run_id in TENANTS]
    pages = ManyRanks.leader.residency.page_ins
    announce(group, Word.STOP, no_limit)
    return {"same": [x == y for x, y in zip(found, wanted, strict=True)], "homes": homes, "pages": pages}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6:])
    leave(0)  # as a worker's ranks do: gloo's threads may abort a process during its exit
