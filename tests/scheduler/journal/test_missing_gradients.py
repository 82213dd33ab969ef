"""What a step is sent with when a forward_backward before it has failed; also after the trainer or the server is lost
in between, so that only the journal knows of the failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from weft.wire.checks.runs import step_not_taken

from scheduler.journal.recovery import recover
from scheduler.links.messages import Done, Failure, Pass, PullPass, TrainOp
from scheduler.order.plans import Step
from tests.scheduler.journal.kit import Service, first_pass, go, outcome, train

BAD = Failure("datum 3 is not finite", "user")
TOLD = step_not_taken("forward_backward", BAD.message)
UNTOLD = Step({}, heard_of=0)
NOTHING = (0, "")


def step_of(pass_: Pass) -> TrainOp:
    [step] = [op for op in pass_.ops if op.kind == "optim_step"]
    return step


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("lost", ["trainer", "server"])
def test_a_step_lacks_what_failed_before_it(folder: Path, refused: bool, lost: str) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            bad = await service.journal.accept(replace(train(1), refused=BAD.message if refused else None))
            step = await service.journal.accept(train(2, "optim_step", plan=UNTOLD))
            sent = step_of(await service.ask(link, PullPass(["m"])))
            assert sent.lacks == ((1, TOLD) if refused else NOTHING)  # else its trainer knows
            if not refused:
                link.send(Done(bad, failure=BAD))
            assert (await outcome(service, bad)).error == BAD.message
        if lost == "server":
            service.database.close()
            service = Service(folder)
            recover(service.journal, service.database)
        async with service.worker(service.trainer) as link:
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            again = step_of(await service.ask(link, PullPass(["m"])))
            assert again.lacks == (1, TOLD)
            link.send(Done(step, failure=Failure(TOLD, "user")))
            await outcome(service, step)
            await service.journal.accept(train(3, "optim_step", plan=UNTOLD))
            assert step_of(await service.ask(link, PullPass(["m"]))).lacks == NOTHING  # said once

    go(scenario())


@pytest.mark.parametrize("says", [True, False])
def test_a_step_knows_what_its_client_was_told(folder: Path, says: bool) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            bad = await service.journal.accept(train(1))
            await service.ask(link, PullPass(["m"]))
            link.send(Done(bad, failure=BAD))
            await outcome(service, bad)
            if not says:
                await service.journal.tell_failure("org", bad)
            good = await service.journal.accept(train(2))
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            await outcome(service, good)
            await service.journal.accept(train(3, "optim_step", plan=Step({}, heard_of=1) if says else Step({})))
            sent = step_of(await service.ask(link, PullPass(["m"])))
            assert (sent.lacks, sent.knows) == (NOTHING, 1)
        service.database.close()
        service = Service(folder)
        recover(service.journal, service.database)
        async with service.worker(service.trainer) as link:
            await service.answer(link, await service.ask(link, PullPass(["m"])))
            sent = step_of(await service.ask(link, PullPass(["m"])))
            assert (sent.lacks, sent.knows) == (NOTHING, 1)

    go(scenario())
