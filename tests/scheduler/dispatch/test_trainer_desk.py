"""What a trainer is handed when one organisation floods it with work without tokens, by the real journal."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from billing.prices import load_prices
from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.journal.journal import Journal
from scheduler.links.messages import Done, Pass, PassOver, PullPass, RunSpec
from scheduler.order.light_work import Sizes
from scheduler.order.operations import NewOperation
from scheduler.order.plans import BODY_ONLY, Create, ForwardBackward, Plan, Slice
from store import tables
from store.blobs.folder import FolderBlobs
from tests import rows
from tests.migrated import database_in
from tests.scheduler.dispatch.link import Link

NOW = datetime.now(UTC)
PASS_TOKENS = 4096
#: The sizes of weft/tiny-moe at rank 128.
SIZES = Sizes(3_227_648, 987_136)
#: A dimuon step of such a run took 0.22 s, a pass of tokens 0.55 s (bench/results/light_work.json).
STEPS_OF_A_PASS = 3


def new(org: str, run: str, seq: int, kind: str, tokens: int = 0, plan: Plan = BODY_ONLY) -> NewOperation:
    return NewOperation(org, f"s-{org}", run, seq, kind, "m", tokens, b"body", plan)


def create(org: str, run: str) -> NewOperation:
    spec = RunSpec(run, "m", 128, 32.0, 0, True, True, True, "dimuon")
    return new(org, run, 0, "create", plan=Create(spec, "interactive"))


async def a_pass(link: Link) -> Pass:
    """Ask for a pass, and answer all of it."""
    pass_ = await link.ask(PullPass(["m"]))
    assert isinstance(pass_, Pass)
    for op in pass_.ops:
        link.say(Done(op.op_id, b"{}", {"tokens": 200}))
    link.say(PassOver(pass_.pass_id, 0, 1, 0.1))
    return pass_


def test_a_flood_of_steps_leaves_a_neighbours_pass_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        database = database_in(tmp_path)
        runs = {"attacker": [f"s-attacker:train:{i}" for i in range(8)], "small": ["s-small:train:0"]}

        def make(session: object) -> None:
            for org in runs:
                session.add(tables.Organisation(id=org, name=org, created_at=NOW))  # type: ignore[attr-defined]
                session.flush()  # type: ignore[attr-defined]
                session.add(rows.session_row(org, NOW, f"s-{org}"))  # type: ignore[attr-defined]

        database.write_now(make)
        journal = Journal(database, FolderBlobs(tmp_path / "blobs"), load_prices(), sizes=lambda spec: SIZES)
        desk, link = TrainerDesk(journal.training, PASS_TOKENS), Link()
        serving = asyncio.create_task(desk.serve(link))  # type: ignore[arg-type]
        for org, ids in runs.items():
            for run in ids:
                await journal.accept(create(org, run), rows.run_row(org, NOW, run, f"s-{org}"))
        created = 0
        while created < 9:
            created += len((await a_pass(link)).ops)
        steps = [new("attacker", run, seq, "optim_step") for seq in range(1, 61) for run in runs["attacker"]]
        await asyncio.gather(*(journal.accept(step) for step in steps))
        assert len((await a_pass(link)).ops) <= STEPS_OF_A_PASS
        plan = ForwardBackward((Slice(0, 1, 200),))
        mine = await journal.accept(new("small", runs["small"][0], 1, "forward_backward", 200, plan))
        pass_ = await a_pass(link)
        assert mine in [op.op_id for op in pass_.ops]
        assert len(pass_.ops) <= STEPS_OF_A_PASS + 1
        link.close()
        await serving
        await journal.flush()
        database.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
