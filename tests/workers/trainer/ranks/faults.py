"""Faults for a trainer of several ranks: a step fails on one rank, or memory is short on several. Each fault is called
with the rank that it runs on."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from scheduler.links.messages import Done
from tests.workers.trainer.allocations import NO_MEMORY, short_steps
from workers.model.adapters.adapter import Adapter
from workers.model.owned.owner import Owner
from workers.model.owned.travel import Travel
from workers.trainer import computing
from workers.trainer.ranks.leader import Leader
from workers.trainer.runs.arena import Arena
from workers.trainer.runs.held import HeldRuns

Fault = Callable[[int], AbstractContextManager[Any]]

#: The faults that have occurred on this rank in the current scenario.
FAILURES: list[str] = []

#: One of this run's first operations fails by its user's fault, beside operations of other runs.
FAULTY = "r2"

USUAL, LITTLE = {"microbatch_tokens": 64}, {"microbatch_tokens": 64, "resident_bytes": 300_000}


def scenario(name: str) -> tuple[Fault, dict[str, int]]:
    """The fault of the scenario of this name, and the bounds of every trainer; numbers may follow the name."""
    *words, numbers = [*name.rstrip("0123456789 ").split(), [int(word) for word in name.split() if word.isdigit()]]
    match " ".join(words):
        case "plain":
            return nullcontext, USUAL
        case "paged":
            return nullcontext, LITTLE
        case "recomputed":
            return recomputed, USUAL
        case "short of memory":
            return short_of_memory, USUAL
        case "owner short":
            return partial(failing_owner, "forward", torch.OutOfMemoryError), USUAL
        case "owner short, back":
            return partial(failing_owner, "backward", torch.OutOfMemoryError), USUAL
        case "owner fails":
            return partial(failing_owner, "forward", ValueError), USUAL
        case "poor":
            return partial(on, numbers[0], poor), USUAL
        case "full":
            return partial(on, numbers[0], partial(full, numbers[1])), LITTLE
        case "short steps":
            return partial(on, numbers[0], partial(few_steps, numbers[1])), USUAL
        case "drawn":
            return partial(drawn, numbers[0]), Random(numbers[0]).choice((USUAL, LITTLE))
        case "killed":
            return killed, USUAL
    raise KeyError(name)


def on(which: int, fault: Callable[[], AbstractContextManager[Any]], rank: int) -> AbstractContextManager[Any]:
    return fault() if rank == which else nullcontext()


@contextmanager
def recomputed(rank: int) -> Iterator[None]:
    """Rank 1 alone computes layers again in the backward: the other ranks gather the same, whatever it keeps."""
    with (
        patch("workers.model.memory.ALWAYS_FITS_BYTES", -1 if rank == 1 else 1 << 60),
        patch("workers.model.memory.SHARE", 0.0),
    ):
        yield


@contextmanager
def short_of_memory(rank: int) -> Iterator[None]:
    """Memory runs out in the middle of a forward on one rank, and of a backward on the other, above 40 tokens."""
    run_microbatch = vars(computing)["run_microbatch"]

    def run(decoder: Any, parts: Any, *, trains: bool) -> None:
        def fail(*_: Any) -> None:
            raise NO_MEMORY

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
    """Memory runs out on rank 0 whenever all ranks have sent many pairs; another `error` is raised there only once."""
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
    """Rank 1 dies while the others wait for its rows. The failures that rank 0 reports are printed, except those that
    are the user's fault."""
    travels, execute, turns = Travel.rows, Leader.execute, itertools.count()

    def rows(self: Travel, *args: Any) -> Any:
        if rank == 1 and next(turns) == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        return travels(self, *args)

    def speak(self: Leader, pass_: Any, send: Any) -> None:
        own = {op.op_id for op in pass_.ops if op.run_id == FAULTY}

        def say(*told: Any) -> None:
            for message in told:
                failure = message.failure if isinstance(message, Done) else None
                if failure is not None and not (message.op_id in own and failure.category == "user"):
                    print(json.dumps({"failed": failure.message}), flush=True)
            send(*told)

        execute(self, pass_, say)

    with patch.object(Travel, "rows", rows), patch.object(Leader, "execute", speak):
        yield


@contextmanager
def poor() -> Iterator[None]:
    """There is no memory for every third guest. Of the guests that are there every third is too large to be computed,
    and so are some of the rank's own parts while it has guests."""
    run_microbatch, of_guest = vars(computing)["run_microbatch"], Arena.of_guest
    turns, parts_here = itertools.count(1), itertools.count(1)
    gradients: weakref.WeakSet[Arena] = weakref.WeakSet()

    def made(kind: Any, weights: Adapter, **how: bool) -> Arena:
        if next(turns) % 3 == 0:
            FAILURES.append("no guest")
            raise NO_MEMORY
        gradients.add(arena := of_guest(kind, weights, **how))
        return arena

    def run(decoder: Any, parts: Any, *, trains: bool) -> None:
        guests = [part for part in parts if part.progress.run.guest]
        if (guests and next(parts_here) % 3 == 0) or (not guests and gradients and next(parts_here) % 3 == 0):
            FAILURES.append("guest" if guests else "own")
            for part in parts:
                if part.progress.grad is not None:
                    part.progress.grad.flat.add_(1.0)
            raise NO_MEMORY
        run_microbatch(decoder, parts, trains=trains)

    with patch.object(Arena, "of_guest", made), patch.object(computing, "run_microbatch", run):
        yield


@contextmanager
def full(first: int) -> Iterator[None]:
    """Bringing the states of runs into memory fails, but less and less often."""
    bring, left, gap = HeldRuns.bring, first, first

    def brought(self: HeldRuns, *runs: Any) -> None:
        nonlocal left, gap
        left -= any(not run.guest for run in runs)
        if left == 0:
            left = gap = gap + 1
            FAILURES.append("no run")
            raise OSError(errno.ENOMEM, "no memory for the states of runs")
        bring(self, *runs)

    with patch.object(HeldRuns, "bring", brought):
        yield


@contextmanager
def few_steps(most: int) -> Iterator[None]:
    """There is no memory for most optimizer steps."""
    with short_steps(most) as counts:
        yield
    FAILURES.extend(["no step"] * counts["no step"])


@contextmanager
def drawn(seed: int, rank: int) -> Iterator[None]:
    """Each rank is short of memory in its own ways."""
    rng = Random(f"{seed} {rank}")
    ways: list[Fault] = [
        short_of_memory,
        lambda _: poor(),
        lambda _: full(rng.randint(2, 6)),
        lambda _: few_steps(rng.choice((2, 3, 7))),
        lambda _: failing_owner(rng.choice(("forward", "backward")), torch.OutOfMemoryError, 0),
    ]
    with ExitStack() as stack:
        for way in rng.sample(ways, rng.choice((0, 1, 1, 2, 3))):
            stack.enter_context(way(rank))
        yield
