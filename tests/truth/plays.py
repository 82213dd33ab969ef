"""One play of a program under a schedule, its visible results, and the comparison of two plays.

Two plays of one program must agree to the bit, whatever their schedules: in the clients' answers, in the saved weights,
moments and step counts, and in the bill. `differences` lists where they do not."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import SafetensorError
from safetensors.numpy import load_file
from sqlalchemy import func, select
from weft.wire.binary.train_codec import decode_train_output

from store import tables
from tests.truth import clock
from tests.truth.clients import Clients, Outcome
from tests.truth.memory import little_memory
from tests.truth.programs import Forward, ForwardBackward, Operation, Planned, SaveSampler, TwoPass, steps_of
from tests.truth.schedules import PATIENT, Schedule
from tests.truth.world import Ground, World
from tests.workers.trainer.allocations import short_steps


@dataclass
class Found:
    """The results of a play. `outcomes` by the operation's place and its part; `checkpoints` by path, with a digest of
    each tensor's bits; `bill` by (organisation, run, operation, kind); `charged_nusd` by organisation."""

    steps: Sequence[Planned]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, str]] = field(default_factory=dict)
    bill: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    charged_nusd: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # faults that no play may have
    statistics: Counter[str] = field(default_factory=Counter)


def play(ground: Ground, folder: Path, program: Sequence[Operation], schedule: Schedule = PATIENT) -> Found:
    """Play a program in a new data folder, which is deleted afterwards."""
    steps = steps_of(program)
    try:
        states_bytes = schedule.machine_runs * ground.run_bytes()
        with (
            quiet(),
            same_ids(schedule.seed),
            little_memory(schedule.most_tokens, states_bytes) as splits,
            short_steps(schedule.steps) as short,
        ):
            found = clock.run(_play(ground, folder, steps, schedule))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found.statistics["out of memory"] += splits["refused"]
    found.statistics["no memory for a run"] += splits["no run"]
    found.statistics["no memory for a step"] += short["no step"]
    return found


async def _play(ground: Ground, folder: Path, steps: Sequence[Planned], schedule: Schedule) -> Found:
    world = World(ground, folder, schedule)
    clients = Clients(world, steps)
    await world.open()
    await clients.play()
    await world.quiet()
    for seams in world.seams.values():
        seams.close()
    found = Found(steps, clients.outcomes)
    _collect(found, world, clients)
    await world.close()
    found.statistics += clients.counts + world.statistics
    found.wrong += [f"a worker ended with {error!r}" for error in world.faults]
    for seams in world.seams.values():
        found.statistics += seams.met
        found.statistics[f"{seams.role} seams"] += seams.count
    return found


def _collect(found: Found, world: World, clients: Clients) -> None:
    assert world.server is not None
    database, root = world.server.database, world.folder / "blobs"
    with database.read() as session:
        names = {row.id: row.name for row in session.scalars(select(tables.Organisation))}
        for row in session.scalars(select(tables.Checkpoint)):
            path = clients.plain(f"{row.run_id}/{row.kind}/{row.name}")
            found.checkpoints[path] = bits_of(root / row.ref)
        for event in session.scalars(select(tables.UsageEvent)):
            label = clients.request_ids.get(event.operation_id, event.operation_id)
            key = (names[event.org_id], clients.plain(event.run_id or ""), label, event.kind)
            if key in found.bill:
                found.wrong.append(f"billed twice: {key}")
            found.bill[key] += event.quantity
        for org_id, total in session.execute(
            select(tables.UsageEvent.org_id, func.sum(tables.UsageEvent.amount_nusd)).group_by(tables.UsageEvent.org_id)
        ):
            found.charged_nusd[names[org_id]] = total
        _check_money(found, session, names)
        for op in session.scalars(select(tables.Operation).where(tables.Operation.state == "queued")):
            found.wrong.append(f"operation {clients.request_ids.get(op.id, op.id)} ({op.kind}) never ended")


def _check_money(found: Found, session: Any, names: dict[str, str]) -> None:
    """Ledger, wallet and events agree, and no hold is left."""
    for wallet in session.scalars(select(tables.Wallet)):
        entries = select(func.coalesce(func.sum(tables.LedgerEntry.amount_nusd), 0)).filter_by(org_id=wallet.org_id)
        ledger, charged = session.scalar(entries), found.charged_nusd.get(names[wallet.org_id], 0)
        if not ledger == wallet.balance_nusd == -charged:
            found.wrong.append(
                f"{names[wallet.org_id]}: ledger {ledger}, wallet {wallet.balance_nusd}, events {charged}"
            )
        if wallet.held_nusd:
            found.wrong.append(f"{names[wallet.org_id]}: {wallet.held_nusd} nUSD are held for nothing")


def bits_of(folder: Path) -> dict[str, str]:
    """A digest of every tensor in a checkpoint's folder, and the contents of its config."""
    if not folder.is_dir():
        return {"folder": "is missing"}
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors = load_file(file)
        except SafetensorError:
            return {"folder": "is damaged"}
        for name, tensor in tensors.items():
            found[f"{file.stem}/{name}"] = hashlib.sha256(tensor.tobytes()).hexdigest()[:16]
    config = folder / "adapter_config.json"
    if config.exists():
        found["config"] = json.dumps(json.loads(config.read_text()), sort_keys=True)
    return found


def differences(one: Found, other: Found, *, damaged: bool = False) -> list[str]:
    """What differs in the second play, and what is wrong in either; empty if they agree.

    Where files were `damaged`, a client may be told so instead of a result; later operations of the same run, and of
    what is made of it, may then differ. But a number that is answered must be right."""
    lines = [f"first: {line}" for line in one.wrong] + [f"second: {line}" for line in other.wrong]
    excused = _excused(one, other) if damaged else set()
    for label in sorted({*one.outcomes, *other.outcomes}, key=_by_place):
        mine, theirs = one.outcomes.get(label), other.outcomes.get(label)
        each = one.steps[int(label.partition(".")[0])]
        if mine != theirs and _ordered(mine, each.op) != _ordered(theirs, each.op) and each.place not in excused:
            lines.append(f"operation {label}, {each.op}: {_brief(mine)} against {_brief(theirs)}")
    if damaged:
        return lines
    for path in sorted({*one.checkpoints, *other.checkpoints}):
        mine_, theirs_ = one.checkpoints.get(path, {}), other.checkpoints.get(path, {})
        apart = sorted(name for name in {*mine_, *theirs_} if mine_.get(name) != theirs_.get(name))
        if apart:
            lines.append(f"checkpoint {path}: {len(apart)} of {len(mine_)} tensors differ: {', '.join(apart[:4])}")
    return lines + _unequal_bills(one, other)


def _ordered(outcome: Outcome | None, op: Operation) -> object:
    """An outcome without protobuf's order of names in a result, which differs from process to process."""
    if outcome is None or outcome[0] != "result" or not isinstance(op, Forward | ForwardBackward | TwoPass):
        return outcome
    outputs, metrics = decode_train_output(outcome[1])
    tensors = [[(name, str(x.dtype), x.shape, x.tobytes()) for name, x in sorted(each.items())] for each in outputs]
    return sorted(metrics.items()), tensors


def _excused(one: Found, other: Found) -> set[int]:
    """Places of operations whose client was told, by then at the latest, that something of their run was lost."""
    told: set[int] = set()  # runs and, as -1 - number, samplers
    excused: set[int] = set()
    saves = [each.op for each in one.steps if isinstance(each.op, SaveSampler)]
    followed = {op.sampler: op.run for op in saves if op.kind == "inflight"}
    for each in one.steps:
        op: Any = each.op
        about = {getattr(op, "run", None), (getattr(op, "source", None) or (None,))[0]}
        about = (about | {followed.get(getattr(op, "sampler", None))}) - {None}
        if getattr(op, "sampler", None) is not None:
            about.add(-1 - op.sampler)
        labels = [label for label in {*one.outcomes, *other.outcomes} if label.startswith(f"{each.place}.")]
        lost = any(
            other.outcomes.get(label, ("nothing",))[0] != "result"
            and one.outcomes.get(label) != other.outcomes.get(label)
            for label in labels
        )
        if lost or about & told:
            excused.add(each.place)
            made = {getattr(op, "run", None)} - {None}
            told |= made | ({-1 - op.sampler} if isinstance(op, SaveSampler) else set())
    return excused


def _unequal_bills(one: Found, other: Found) -> list[str]:
    """Prompt tokens from the prefix cache cost less, and how many come from it depends on earlier requests. So cached
    and other prompt tokens are compared as one sum, and money only if nothing came from the cache."""
    lines = []
    mine, theirs = _joined(one.bill), _joined(other.bill)
    for key in sorted({*mine, *theirs}):
        if mine[key] != theirs[key]:
            lines.append(f"bill of {key}: {mine[key]} against {theirs[key]}")
    cached = any(kind == "cached_prefill" for found in (one, other) for *_, kind in found.bill)
    if not cached and one.charged_nusd != other.charged_nusd:
        lines.append(f"charged {one.charged_nusd} against {other.charged_nusd}")
    return lines


def _joined(bill: Counter[tuple[str, str, str, str]]) -> Counter[tuple[str, str, str, str]]:
    joined: Counter[tuple[str, str, str, str]] = Counter()
    for (organisation, run, label, kind), quantity in bill.items():
        joined[organisation, run, label, kind.removeprefix("cached_")] += quantity
    return joined


def _by_place(label: str) -> tuple[int, ...]:
    return tuple(int(part) for part in label.split("."))


def _brief(outcome: Outcome | None) -> str:
    if outcome is None:
        return "nothing"
    shown = outcome[-1]
    if isinstance(shown, bytes):
        shown = f"{len(shown)} bytes {hashlib.sha256(shown).hexdigest()[:8]}"
    return f"{outcome[0]} {shown}"[:240]


@contextmanager
def same_ids(seed: int) -> Iterator[None]:
    """Ids are drawn from `seed`, so that what is sorted by ids comes in the same order in each play."""
    rng = random.Random(seed)
    with mock.patch("uuid.uuid4", side_effect=lambda: uuid.UUID(int=rng.getrandbits(128), version=4)):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what workers and server would log about intended mishaps."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
