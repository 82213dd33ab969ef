"""What befalls the service while a program is played: how work is cut and mixed, who dies where, and what fails.

A *seam* is a place where one process touches something outside of it: a message, a blob, a commit, a request. The seams
of each role are counted, and a mishap names one by its number. So a schedule is plain data, and the fewer mishaps it
has, the simpler it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

#: Who touches something. Statements that the server sends to its database are counted apart from its other seams. In a
#: trainer of several ranks messages count as the trainer's, blobs and calls of other ranks as the rank's own.
Role = Literal["server", "trainer", "generator", "database", "rank 0", "rank 1", "rank 2", "rank 3"]
ROLES: tuple[Role, ...] = ("server", "trainer", "generator", "database")
RANKS: tuple[Role, ...] = ("rank 0", "rank 1", "rank 2", "rank 3")
#: How the base is spread over ranks: mapped by all, a part of each tensor on each, or whole experts.
Layout = Literal["mapped", "parts", "experts"]

#: At its seam the process dies, before or after anything happens there; or the touched thing fails, before or after it
#: took effect; or a file is cut short for good as it is written, or is read short once. Or, for `times` seconds: the
#: seam is slow, the whole machine stands still, or its wall clock is set forward or back. Or a rank hangs (SIGSTOP).
Kind = Literal[
    "dies before",
    "dies after",
    "hangs",
    "fails",
    "fails after",
    "cuts",
    "reads short",
    "is slow",
    "stands still",
    "sets clock",
]
DEATHS: tuple[Kind, ...] = ("dies before", "dies after")
FAULTS: tuple[Kind, ...] = ("fails", "fails after")
PAUSES: tuple[Kind, ...] = ("is slow", "stands still", "sets clock")


@dataclass(frozen=True, order=True)
class Mishap:
    """A mishap at seam `at` of `role`, counted over all its lives. A fault lasts for `times` seams of its kind, a pause
    for as many seconds."""

    role: Role
    at: int
    kind: Kind = "dies before"
    times: int = 1


@dataclass(frozen=True)
class Schedule:
    """All that may differ between two plays that are compared, but for `slice_tokens`: it defines sums, and so is part
    of the service's meaning."""

    pass_tokens: int = 100_000
    microbatch_tokens: int = 4096
    snapshot_every_tokens: int = 1 << 30
    resident_runs: int = 0  # memory for so many runs of rank 4; 0: for all
    most_tokens: int = 0  # computed at once; more raises out of memory. 0: no limit
    machine_runs: int = 0  # the machine's real memory for states, in runs of rank 4; 0: for all
    prefix_cache: bool = False
    slots: int = 4
    lookup: int = 0
    patient: bool = True  # each operation alone, when the one before has been answered
    seed: int = 0  # for delays, duplicates and the order of requests
    pace_s: float = 0.0  # from one operation to the next
    jitter_s: float = 0.0  # how far a request may fall behind its turn
    duplicates: float = 0.0  # share of requests that are sent again
    lost_replies: float = 0.0  # share of requests whose answer is lost
    mishaps: tuple[Mishap, ...] = ()
    ranks: Layout | Literal[""] = ""  # for a trainer of several ranks; "": one process
    rank_count: int = 2
    guests: int = 0  # memory runs out for one in so many parts that a rank computes for another; 0: for none
    steps: int = 0  # memory runs out in all but one in so many of the first calls that update runs; 0: in none

    @property
    def damages(self) -> bool:
        return any(mishap.kind == "cuts" for mishap in self.mishaps)


SLICE_TOKENS = 16

PATIENT = Schedule()


@dataclass
class Seams:
    """Counts the seams of one role, over all its lives."""

    role: Role
    mishaps: tuple[Mishap, ...]
    met: Counter[str] = field(default_factory=Counter)
    count: int = 0
    _failing: dict[str, int] = field(default_factory=dict)  # how many further seams of a kind fail
    _due: list[Mishap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._due = sorted(m for m in self.mishaps if m.role == self.role)

    def close(self) -> None:
        """No mishap comes any more."""
        self._due.clear()
        self._failing.clear()

    def touch(self, kind: str, can: frozenset[Kind]) -> Mishap | None:
        """The process is at a seam of this kind (`blob`, `commit`, `message`, `request`, ...), where the mishaps `can`
        may happen. Returns the one that does."""
        self.count += 1
        if self._failing.get(kind, 0) > 0 and "fails" in can:
            self._failing[kind] -= 1
            self.met[f"{self.role}: {kind} fails"] += 1
            return Mishap(self.role, self.count, "fails")
        if not self._due or self._due[0].at > self.count:
            return None
        mishap = self._due[0]
        if mishap.kind not in can:
            return None  # it comes at the next seam where it can
        self._due.pop(0)
        if mishap.kind in FAULTS:
            self._failing[kind] = mishap.times - 1
        self.met[f"{self.role}: {kind} {mishap.kind}"] += 1
        return mishap
