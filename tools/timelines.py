"""Draws docs/images/timelines.svg: where the time of a loop goes in each schedule, and what of it is billed.

`python -m tools.timelines`. An example with made-up lengths; which group starts, is trained or comes too late is
decided by the machine that decides it in `rl.train` (`weft.rl.schedule.pacer`). Time is in units of a token drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from weft.rl.schedule.pacer import Pacer
from weft.rl.schedule.schedules import Async, Schedule, Sync

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "timelines.svg"
#: Groups sampled at a time, groups in a batch, and how long a batch trains.
PLACES, BATCH, TRAINING = 4, 4, 7
LENGTHS = (9, 13, 6, 17, 8, 11, 7, 26, 10, 6, 14, 9)
END = 96
SCHEDULES: tuple[tuple[str, Schedule], ...] = (
    ("Sync(): sample a batch, train it, sample the next", Sync()),
    ("Async(max_lag=1, inflight=False): each rollout keeps its weights", Async(1, inflight=False)),
    ("Async(max_lag=1): rollouts under way move to the newest weights", Async(1)),
)


@dataclass
class Bar:
    """A stretch of one row. `versions` are the weights that drew it, each with the time from which on it did."""

    row: int
    start: int
    end: int = END
    versions: list[tuple[int, int]] = field(default_factory=list)
    late: bool = False


def simulated(schedule: Schedule) -> list[Bar]:
    """The bars of one panel: rows 0 to PLACES - 1 are places of the generator, row PLACES is the trainer."""
    pacer, lengths = Pacer(schedule, BATCH), cycle(LENGTHS)
    under_way: dict[int, tuple[Bar, int]] = {}
    bars: list[Bar] = []
    trained_at: int | None = None
    for now in range(END):
        for group, (bar, end) in list(under_way.items()):
            if now == end:
                pacer.finish(group, end - bar.start)
                bar.end = under_way.pop(group)[1]
        if now == trained_at:
            pacer.stepped()
            trained_at = None
            if schedule.inflight:
                for bar, _ in under_way.values():
                    bar.versions.append((now, pacer.version))
        if pacer.take():
            trained_at = now + TRAINING
            bars.append(Bar(PLACES, now, min(END, trained_at), [(now, pacer.version)]))
        for group in pacer.late():
            if group in under_way:
                bar = under_way.pop(group)[0]
                bar.end, bar.late = now, True
        free = sorted(set(range(PLACES)) - {bar.row for bar, _ in under_way.values()})
        for row in free[: pacer.room()]:
            bar = Bar(row, now, versions=[(now, pacer.version)])
            under_way[pacer.start()] = bar, now + next(lengths)
            bars.append(bar)
    return bars


SCALE, LEFT, ROW, PANEL, TOP = 8, 92, 16, 118, 56
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 } .small { font-size: 11px; fill: #555 }
.back { fill: #fff } .idle { fill: #e9ecef } .late { fill: url(#late) } .prompt { fill: #222 } .step { stroke: #222 }
.v0 { fill: #8fb8de } .v1 { fill: #f2b872 } .v2 { fill: #9fcf9b } .v3 { fill: #d8a6cf }
.stripe { stroke: #b3261e }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e6eb } .small { fill: #a6acb8 } .back { fill: #1e2129 } .idle { fill: #2d323d }
  .prompt { fill: #e4e6eb } .step { stroke: #e4e6eb }
  .v0 { fill: #4f7fae } .v1 { fill: #b57b34 } .v2 { fill: #5b9556 } .v3 { fill: #99648f }
  .stripe { stroke: #ff8a80 }
}
"""
LEGEND = (
    ("prompt", 4, "prompt: prefill, once a group"),
    ("v0", 14, "generator: sample, a token drawn; trainer: train, a token trained. Colours: versions of the weights"),
    ("idle", 14, "idle: not billed"),
    ("late", 14, "cancelled, too old to be trained: billed until then"),
)


def drawn() -> str:
    """The picture, as SVG."""
    width, height = LEFT + END * SCALE + 16, TOP + len(SCHEDULES) * PANEL + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Three schedules of a reinforcement learning loop, on one generator and one trainer</title>",
        f"<style>{STYLE}</style>",
        '<defs><pattern id="late" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">',
        '<path class="stripe" d="M0 0V6" stroke-width="4"/></pattern></defs>',
        f'<rect class="back" width="{width}" height="{height}"/>',
        *_legend(),
    ]
    for index, (title, schedule) in enumerate(SCHEDULES):
        parts += _panel(TOP + index * PANEL, title, simulated(schedule))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for index, (name, width, text) in enumerate(LEGEND):
        x, y = 12 + index % 2 * 210, 10 + index // 2 * 20
        yield f'<rect class="{name}" x="{x}" y="{y}" width="{width}" height="12"/>'
        yield f'<text class="small" x="{x + width + 5}" y="{y + 10}">{text}</text>'


def _panel(top: int, title: str, bars: list[Bar]) -> Iterator[str]:
    yield f'<text x="12" y="{top + 12}">{title}</text>'
    first = top + 20
    for row in range(PLACES + 1):
        y = first + row * ROW
        yield f'<rect class="idle" x="{LEFT}" y="{y}" width="{END * SCALE}" height="{ROW - 3}"/>'
    yield f'<text class="small" x="12" y="{first + 2 * ROW}">generator</text>'
    yield f'<text class="small" x="12" y="{first + PLACES * ROW + 10}">trainer</text>'
    for bar in bars:
        y = first + bar.row * ROW
        for (start, version), (end, _) in zip(bar.versions, [*bar.versions[1:], (bar.end, 0)], strict=True):
            yield _rect(f"v{version % 4}", start, end, y)
        if bar.late:
            yield _rect("late", bar.start, bar.end, y)
        if bar.row < PLACES:
            yield f'<rect class="prompt" x="{LEFT + bar.start * SCALE}" y="{y}" width="3" height="{ROW - 3}"/>'
        elif bar.end < END:
            x = LEFT + bar.end * SCALE
            yield f'<path class="step" d="M{x} {first}V{first + (PLACES + 1) * ROW - 3}" stroke-dasharray="2 3"/>'


def _rect(name: str, start: int, end: int, y: int) -> str:
    width = (end - start) * SCALE - 1
    return f'<rect class="{name}" x="{LEFT + start * SCALE}" y="{y}" width="{width}" height="{ROW - 3}"/>'


if __name__ == "__main__":
    PICTURE.write_text(drawn())
