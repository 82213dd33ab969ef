"""What goes into the next pass: the heads of many runs' queues, in fair order, up to a token budget.

Nothing waits for a full batch and nothing idles while something is ready. Work without tokens (optimizer steps, saves,
creates) counts as the tokens it takes the time of (`scheduler.order.light_work`). A step or save rides along with the
batch before it, for which there is a little room beyond the budget; what the next in order leaves of the budget goes to
the light work of anybody. An operation that was running when a trainer was lost travels alone, so that if it is what
kills trainers, it takes nobody with it.

Where there are several trainers, each takes of the runs that live there, out of one queue (`scheduler.order.homes`).

Bound: beyond its first unit, a pass counts no more tokens than the budget and the room beyond it. So who comes while
one organisation floods the trainer, with whatever work, waits for what is left of one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest

from scheduler.links.contract import Path
from scheduler.order.fair import FairTree, Only
from scheduler.order.lanes import Unit

#: The part of its budget by which a pass may exceed it, for light work of runs that are in the pass anyway.
ALONG = 1 / 8

#: How many runs a trainer is told of ahead.
MAX_UPCOMING = 64


def compose(queue: FairTree[Unit], models: list[str], budget_tokens: int, only: Only | None = None) -> list[Unit]:
    """Take the next pass out of `queue` (base model, organisation, priority, run), limited to the runs that `only`
    allows (None: all). Empty when nothing is ready.

    Units of one run keep their order; runs stand in the order of their tokens, the smallest first, so that a small
    request is answered before the large ones that share its pass. The first unit is taken whatever its size, so a datum
    longer than the budget still runs.
    """
    path = next((at for m in queue.children() if m in models and (at := queue.next((m,), only)) is not None), None)
    if path is None:
        return []
    model, units, room = path[0], list[Unit](), budget_tokens
    while path is not None and (head := queue.peek(path)) is not None:
        unit, cost = head
        if units and (unit.suspect or cost > room):
            break
        units.append(queue.take(path, 1))
        room -= cost
        if unit.suspect:
            return units
        path = queue.next((model,), only)
    paths = lanes(queue, model, only)
    inside = {unit.send.run_id for unit in units}
    along = int(budget_tokens * ALONG)
    riders = list(_riders(queue, [path for path in paths if path[-1] in inside], room + along))
    room -= sum(cost for _, cost in riders)
    riders += _riders(queue, paths, room)
    return _smallest_run_first(units) + [unit for unit, _ in riders]


def _smallest_run_first(units: list[Unit]) -> list[Unit]:
    tokens = Counter[str]()
    for unit in units:
        tokens[unit.send.run_id] += unit.tokens
    first_of = {unit.send.run_id: place for place, unit in reversed(list(enumerate(units)))}
    return sorted(units, key=lambda unit: (tokens[unit.send.run_id], first_of[unit.send.run_id]))


def upcoming(queue: FairTree[Unit], model: str, only: Only | None = None) -> list[str]:
    """The runs with work for this model that `only` allows, about in the order of their turns: first the next run of
    each organisation, then the second of each, and so on."""
    by_organisation = [[path[-1] for path in _lanes(queue, model, org, only)] for org in queue.children((model,))]
    turns = (run for turn in zip_longest(*by_organisation) for run in turn if run is not None)
    return list(islice(turns, MAX_UPCOMING))


def _riders(queue: FairTree[Unit], paths: Iterable[Path], room: int) -> Iterator[tuple[Unit, int]]:
    """The light units at the heads of these runs, as many as fit into `room`; each with its cost."""
    for path in paths:
        while room > 0 and (head := queue.peek(path)) is not None:
            unit, cost = head
            if not unit.light or unit.suspect or cost > room:
                break
            queue.pop(path)
            room -= cost
            yield unit, cost


def lanes(queue: FairTree[Unit], model: str, only: Only | None = None) -> list[Path]:
    """The paths of all runs that have work for this model."""
    return [path for org in queue.children((model,)) for path in _lanes(queue, model, org, only)]


def _lanes(queue: FairTree[Unit], model: str, org: str, only: Only | None) -> list[Path]:
    """The paths of an organisation's runs that have work; those of the priority that is next come first."""
    priorities = queue.children((model, org))
    found: list[Path] = [(model, org, name, run) for name in priorities for run in queue.children((model, org, name))]
    return found if only is None else [path for path in found if only(path[-1])]
