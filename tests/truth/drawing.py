"""Draws a program and a schedule for each number, such that likely faults come often: operations of one run close
together, operations of several slices and passes, deaths where something is half done.

Operations are drawn independently; `steps_of` leaves out those that make no sense. So any of them can be removed and
the rest is still a program (`shrinking`)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.truth.programs import (
    CUSTOM,
    FAULTS,
    RL_LOSSES,
    Bad,
    Batch,
    Create,
    EndSession,
    Forward,
    ForwardBackward,
    Load,
    Operation,
    Program,
    Resume,
    Sample,
    SaveSampler,
    SaveState,
    Step,
    TwoPass,
)
from tests.truth.schedules import DEATHS, FAULTS as FAILURES, PAUSES, RANKS, ROLES, Kind, Layout, Mishap, Role, Schedule

#: No slice is longer, so none is cut for lack of memory.
LONGEST = 24
#: Loading needs the memory of a run twice. So many runs of rank 4 take as much as two of rank 4, or two of the largest.
LEAST_RUNS = {4: 2, 7: 4}
#: The most deaths of a worker: an operation that was in its hands at three deaths is given up.
MOST_DEATHS = 2
#: About how many seams a role has in one play.
SEAMS: dict[Role, int] = {"trainer": 130, "server": 450, "generator": 14}
#: For a trainer of several ranks: about how many seams its messages and each rank have, and how a rank may end there.
RANK_SEAMS: dict[Role, int] = {"trainer": 60, **dict.fromkeys(RANKS, 90)}
RANK_ENDS: dict[Role, tuple[Kind, ...]] = {"trainer": DEATHS, **dict.fromkeys(RANKS, (*DEATHS, "hangs"))}
#: And about how many statements its server sends to the database.
STATEMENTS = 1500

#: Kinds of operations, and how often each is drawn.
_KINDS = {
    ForwardBackward: 34,
    Step: 22,
    Forward: 8,
    TwoPass: 4,
    SaveState: 7,
    Load: 5,
    SaveSampler: 6,
    Sample: 7,
    Bad: 4,
    Resume: 2,
    EndSession: 1,
}


def draw(number: int, *, faults: bool = True, most_operations: int = 22) -> tuple[Program, Schedule]:
    """The program and schedule of a number, always the same. With `faults` blobs and commits fail as well."""
    rng = Random(number)
    program, schedule = draw_program(rng, most_operations), draw_schedule(rng, faults)
    largest = max(op.rank for op in program if isinstance(op, Create))
    if rng.random() < 0.4:  # the trainer has not been told
        schedule = replace(schedule, machine_runs=LEAST_RUNS[max(4, largest)], resident_runs=0)
    return program, replace(schedule, steps=rng.choice((0, 0, 2, 3, 5)))


def draw_ranks(
    number: int, layout: Layout, *, faults: bool = True, rank_counts: tuple[int, ...] = (2,)
) -> tuple[Program, Schedule]:
    """The same program, for a trainer of several ranks, some of which die or hang."""
    program, schedule = draw(number, faults=faults)
    rng = Random(number)
    count = Random(f"ranks {number}").choice(rank_counts)
    ranks = RANKS[:count]
    others = [each for each in schedule.mishaps if each.role != "trainer" or each.kind in PAUSES]
    for _ in range(rng.choice((0, 1, MOST_DEATHS))):
        role = rng.choice(("trainer", *ranks))
        others.append(Mishap(role, rng.randint(1, RANK_SEAMS[role]), rng.choice(RANK_ENDS[role])))
    if faults and rng.random() < 0.3:
        role = rng.choice(ranks)
        others.append(Mishap(role, rng.randint(1, RANK_SEAMS[role]), rng.choice(FAILURES), rng.choice((1, 2, 5))))
    guests, pass_tokens = rng.choice((0, 0, 1, 2, 3)), rng.choice((24, 40, 100, 100))
    given = {"guests": guests, "pass_tokens": pass_tokens, "mishaps": tuple(others)}
    return program, replace(schedule, ranks=layout, rank_count=count, **given)


def draw_program(rng: Random, most_operations: int) -> Program:
    """Up to four runs and some of their operations; often several of one run in a row."""
    runs = rng.choice((1, 2, 2, 3, 4))
    program: list[Operation] = [_create(rng, run) for run in range(runs)]
    run = 0
    for _ in range(rng.randint(4, most_operations)):
        run = run if rng.random() < 0.6 else rng.randrange(runs)
        program.append(_operation(rng, run, runs))
    return tuple(program)


def _create(rng: Random, run: int) -> Create:
    parts = rng.choice([(True, True, True)] * 3 + [(True, False, False), (False, True, True), (False, True, False)])
    optimizer = "dimuon" if rng.random() < 0.25 else "adamw"
    rank = rng.choice((4, 4, 4, 2, 7))
    return Create(run, rng.choice((0, 0, 1, 2)), rank, rng.randrange(50), *parts, optimizer=optimizer)  # type: ignore[arg-type]


def draw_batch(rng: Random) -> Batch:
    """From one datum to many: in one slice, in several, and in several passes."""
    lengths = tuple(rng.randint(1, LONGEST) for _ in range(rng.choice((1, 1, 2, 3, 5, 8))))
    loss = rng.choice(["cross_entropy"] * 3 + [*RL_LOSSES, CUSTOM])
    config: tuple[tuple[str, float], ...] = ()
    if loss == "dro" and rng.random() < 0.5:
        config = (("beta", 0.5),)
    elif loss == "ppo" and rng.random() < 0.5:
        config = (("clip_low_threshold", 0.5), ("clip_high_threshold", 2.0))
    targets = 3 if loss == "cross_entropy" and rng.random() < 0.2 else 1
    return Batch(lengths, rng.randrange(50), loss, config, targets)


def _operation(rng: Random, run: int, runs: int) -> Operation:
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    source = (run if rng.random() < 0.7 else rng.randrange(runs), rng.randrange(2))
    if kind is ForwardBackward:
        return ForwardBackward(run, draw_batch(rng), rng.choice((1, 1, 1, 2, 3)))
    if kind is Step:
        return _step(rng, run)
    if kind is Forward:
        return Forward(run, draw_batch(rng), rng.choice((1, 2)))
    if kind is TwoPass:
        return TwoPass(run, draw_batch(rng))
    if kind is SaveState:
        return SaveState(run, rng.randrange(2), rng.random() < 0.5)
    if kind is Load:
        return Load(run, source, rng.random() < 0.6)
    if kind is SaveSampler:
        return SaveSampler(run, rng.randrange(4), rng.choice(("snapshot", "named", "inflight", "inflight")))  # type: ignore[arg-type]
    if kind is Sample:
        return Sample(
            None if rng.random() < 0.3 else rng.randrange(4),
            session=rng.randrange(2),
            seed=rng.randrange(50),
            temperature=rng.choice((1.0, 0.0)),
            prompt=rng.choice((1, 5, 33, 40)),
            max_tokens=rng.randint(1, 5),
            num_samples=rng.randint(1, 2),
        )
    if kind is Bad:
        return Bad(run, rng.choice(FAULTS))
    if kind is Resume:
        return Resume(rng.randint(5, 6), rng.randrange(3), source, rng.random() < 0.6)
    return EndSession(rng.randint(1, 2))


def _step(rng: Random, run: int) -> Step:
    return Step(
        run,
        learning_rate=rng.choice((1e-2, 1e-3, 0.1, 0.0)),
        beta1=rng.choice((0.9, 0.5, 0.0)),
        beta2=rng.choice((0.95, 0.999)),
        weight_decay=rng.choice((0.0, 0.0, 0.1)),
        grad_clip_norm=rng.choice((0.0, 0.0, 1.0)),
    )


def draw_schedule(rng: Random, faults: bool) -> Schedule:
    """A schedule in which clients do not wait for answers before they send more."""
    mishaps: list[Mishap] = []
    for role, seams in SEAMS.items():
        deaths = rng.choice((0, 1, MOST_DEATHS))
        for _ in range(deaths):
            mishaps.append(Mishap(role, rng.randint(1, seams), rng.choice(DEATHS)))
        for _ in range(rng.choice((0, 1, 2)) if faults else 0):
            mishaps.append(Mishap(role, rng.randint(1, seams), rng.choice(FAILURES), rng.choice((1, 2, 5))))
    if faults and rng.random() < 0.2:
        for _ in range(rng.choice((1, 1, 3))):
            role = rng.choice(("trainer", "server"))
            mishaps.append(Mishap(role, rng.randint(1, SEAMS[role]), "cuts"))  # type: ignore[arg-type,index]
    if faults:
        mishaps += _lesser(rng)
    return Schedule(
        pass_tokens=rng.choice((24, 17, 40, 100)),
        microbatch_tokens=rng.choice((32, 64)),
        snapshot_every_tokens=rng.choice((1 << 30, 1 << 30, 1, 20, 60)),
        resident_runs=rng.choice((0, 2, 1)),
        most_tokens=rng.choice((0, LONGEST, 40)),
        prefix_cache=rng.random() < 0.5,
        slots=rng.choice((2, 4)),
        patient=False,
        seed=rng.randrange(1000),
        pace_s=rng.choice((0.0, 0.01, 0.1)),
        jitter_s=rng.choice((0.0, 0.05, 0.3, 2.0)),
        duplicates=rng.choice((0.0, 0.3)),
        lost_replies=rng.choice((0.0, 0.2)),
        mishaps=tuple(mishaps),
        lookup=rng.choice((0, 4)),
    )


def _lesser(rng: Random) -> list[Mishap]:
    """Smaller mishaps: failing statements, short reads, slow disks, and clocks."""
    mishaps = [
        Mishap("database", rng.randint(1, STATEMENTS), rng.choice(FAILURES), rng.choice((1, 1, 2, 5)))
        for _ in range(rng.choice((0, 1, 2, 3)))
    ]
    for role, seams in SEAMS.items():
        if rng.random() < 0.3:
            mishaps.append(Mishap(role, rng.randint(1, seams), "reads short"))
        if rng.random() < 0.5:
            mishaps.append(Mishap(role, rng.randint(1, seams), rng.choice(PAUSES), rng.choice((1, 5, 40, 3600))))
    if rng.random() < 0.3:
        mishaps.append(Mishap(rng.choice(ROLES), rng.randint(1, 130), "sets clock", rng.choice((-3600, -5, 86400))))
    return mishaps
