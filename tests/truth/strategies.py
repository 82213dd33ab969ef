"""Programs and schedules at random, drawn so that Hypothesis can make what it finds small.

Operations are drawn one by one, without looking at each other; those that make no sense are left out by `steps_of`. So
any of them can be taken away and the rest is still a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from hypothesis import strategies as st

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
from tests.truth.schedules import Kind, Mishap, Role, Schedule

#: No slice is longer, so none is cut by what fits in memory.
LONGEST = 24
#: What may befall a role at most: an operation that was in the hands of a worker three times when it died is given up.
MOST_DEATHS = 2

_sessions = st.integers(0, 2)
_names = st.integers(0, 1)
_samplers = st.integers(0, 3)
_seeds = st.integers(0, 50)
_losses = st.sampled_from(["cross_entropy", "cross_entropy", "cross_entropy", *RL_LOSSES, CUSTOM])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """From one datum to many: of one slice, of several, and of several passes."""
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=8))
    loss = draw(_losses)
    config: tuple[tuple[str, float], ...] = ()
    if loss == "dro" and draw(st.booleans()):
        config = (("beta", 0.5),)
    elif loss == "ppo" and draw(st.booleans()):
        config = (("clip_low_threshold", 0.5), ("clip_high_threshold", 2.0))
    targets = draw(st.sampled_from([1, 1, 1, 3])) if loss == "cross_entropy" else 1
    return Batch(tuple(lengths), draw(_seeds), loss, config, targets)


def _creates(run: int) -> st.SearchStrategy[Create]:
    trained = st.sampled_from(
        [(True, True, True)] * 3 + [(True, False, False), (False, True, True), (False, True, False)]
    )
    return st.builds(
        lambda session, rank, seed, parts, optimizer: Create(run, session, rank, seed, *parts, optimizer=optimizer),
        _sessions,
        st.sampled_from([4, 4, 4, 2, 7]),
        _seeds,
        trained,
        st.sampled_from(["adamw", "adamw", "adamw", "dimuon"]),
    )


_samples = st.builds(
    Sample,
    st.one_of(_samplers, st.none()),
    session=_sessions,
    seed=_seeds,
    temperature=st.sampled_from([1.0, 0.0]),
    prompt=st.sampled_from([1, 5, 33, 40]),
    max_tokens=st.integers(1, 5),
    num_samples=st.integers(1, 2),
)


@cache
def operations(count: int) -> st.SearchStrategy[Operation]:
    """Any operation, where there are `count` runs."""
    runs = st.integers(0, count - 1)
    sources = st.tuples(runs, _names)
    steps = st.builds(
        Step,
        runs,
        learning_rate=st.sampled_from([1e-2, 1e-3, 0.1, 0.0]),
        beta1=st.sampled_from([0.9, 0.5, 0.0]),
        beta2=st.sampled_from([0.95, 0.999]),
        weight_decay=st.sampled_from([0.0, 0.1]),
        grad_clip_norm=st.sampled_from([0.0, 1.0]),
    )
    backwards = st.builds(ForwardBackward, runs, batches(), st.sampled_from([1, 1, 1, 2, 3]))
    return st.one_of(
        backwards,
        steps,
        backwards,
        steps,
        st.builds(Forward, runs, batches(), st.sampled_from([1, 2])),
        backwards,
        st.builds(SaveState, runs, _names, st.booleans()),
        st.one_of(st.builds(Load, runs, sources, st.booleans()), st.builds(TwoPass, runs, batches())),
        st.builds(SaveSampler, runs, _samplers, st.sampled_from(["snapshot", "named", "inflight", "inflight"])),
        _samples,
        st.builds(Bad, runs, st.sampled_from(FAULTS)),
        st.one_of(
            st.builds(Resume, st.integers(3, 4), _sessions, sources, st.booleans()),
            st.builds(EndSession, st.integers(1, 2)),
        ),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Up to three runs, and some operations of theirs."""
    count = draw(st.integers(1, 3))
    creates = [draw(_creates(run)) for run in range(count)]
    body = [op for _ in range(4) for op in draw(st.lists(operations(count), max_size=12))]
    return (*creates, *body)


def _mishaps(role: Role, kinds: Iterable[Kind], most: int) -> st.SearchStrategy[list[Mishap]]:
    far = {"server": 200, "trainer": 80, "generator": 12}[role]
    one: Any = st.builds(
        Mishap, st.just(role), st.integers(1, far), st.sampled_from(list(kinds)), times=st.sampled_from([1, 2, 5])
    )
    return st.lists(one, max_size=most)


@st.composite
def schedules(draw: st.DrawFn, faults: bool = True) -> Schedule:
    """Eager ones. With `faults`, blobs and commits fail as well."""
    pick: Callable[..., Any] = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    mishaps: list[Mishap] = []
    roles: tuple[Role, ...] = ("trainer", "server", "generator")
    for role in roles:
        mishaps += draw(_mishaps(role, ("dies before", "dies after"), MOST_DEATHS))
        if faults:
            mishaps += draw(_mishaps(role, ("fails", "fails after"), 2))
    return Schedule(
        pass_tokens=pick(24, 17, 40, 100),
        microbatch_tokens=pick(32, 64),
        snapshot_every_tokens=pick(1 << 30, 1, 20, 60),
        resident_runs=pick(0, 2, 1),
        most_tokens=pick(0, LONGEST, 40),
        prefix_cache=pick(False, True),
        slots=pick(4, 2),
        patient=False,
        seed=draw(st.integers(0, 1000)),
        pace_s=pick(0.0, 0.01, 0.1),
        jitter_s=pick(0.0, 0.05, 0.3, 2.0),
        duplicates=pick(0.0, 0.3),
        lost_replies=pick(0.0, 0.2),
        mishaps=tuple(mishaps),
    )
