"""What goes into the next pass: the heads of many runs' queues, in fair order, up to a token budget.

Nothing waits for a full batch and nothing idles while something is ready. Operations whose cost does not grow with data
(optimizer steps, saves, creates) ride along with whatever pass is about to leave. An operation that was running when a
trainer was lost travels alone, so that if it is what kills trainers, it takes nobody with it.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice, zip_longest

from scheduler.links.contract import Path
from scheduler.order.fair import FairTree
from scheduler.order.lanes import Unit

#: Light operations that may join one pass beyond its token budget; bounds how long a pass of saves can take.
MAX_RIDERS = 64

#: Runs that a trainer is told of ahead.
MAX_UPCOMING = 64


def compose(queue: FairTree[Unit], models: list[str], budget_tokens: int) -> list[Unit]:
    """Take the next pass out of `queue` (base model, organisation, priority, run). Empty when nothing is ready.

    Units of one run keep their order; runs stand in the order of their tokens, the smallest first, so that a small
    request is answered before the large ones that share its pass. The first unit is taken whatever its size, so a datum
    longer than the budget still runs."""
    model = next((m for m in queue.children() if m in models), None)
    if model is None:
        return []
    first = queue.pop((model,))
    assert first is not None
    if first.suspect:
        return [first]
    units, tokens = [first], first.tokens
    while (head := queue.peek((model,))) is not None:
        unit, _ = head
        if unit.suspect or tokens + unit.tokens > budget_tokens:
            break
        queue.pop((model,))
        units.append(unit)
        tokens += unit.tokens
    return _smallest_run_first(units) + _riders(queue, model)


def _smallest_run_first(units: list[Unit]) -> list[Unit]:
    tokens = Counter[str]()
    for unit in units:
        tokens[unit.send.run_id] += unit.tokens
    first_of = {unit.send.run_id: place for place, unit in reversed(list(enumerate(units)))}
    return sorted(units, key=lambda unit: (tokens[unit.send.run_id], first_of[unit.send.run_id]))


def upcoming(queue: FairTree[Unit], model: str) -> list[str]:
    """The runs with work for this model, about in the order in which they will have their turn: that of each
    organisation that is next, then the next of each."""
    by_organisation = [[path[-1] for path in _lanes(queue, model, org)] for org in queue.children((model,))]
    turns = (run for turn in zip_longest(*by_organisation) for run in turn if run is not None)
    return list(islice(turns, MAX_UPCOMING))


def _riders(queue: FairTree[Unit], model: str) -> list[Unit]:
    """The light heads of every run, and the light units right behind them."""
    riders: list[Unit] = []
    for org in queue.children((model,)):
        for path in _lanes(queue, model, org):
            while len(riders) < MAX_RIDERS and (unit := queue.head(path)) and unit.light and not unit.suspect:
                queue.pop(path)
                riders.append(unit)
    return riders


def _lanes(queue: FairTree[Unit], model: str, org: str) -> list[Path]:
    """The runs of an organisation that have work, those of the priority that is next first."""
    priorities = queue.children((model, org))
    return [(model, org, name, run) for name in priorities for run in queue.children((model, org, name))]
