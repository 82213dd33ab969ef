"""Finding the run or sampler of an operation. Its row is remembered for a few seconds, because every operation needs
it; who may use it is checked each time."""

from __future__ import annotations

from api.state.remembered import Remembered
from api.state.service import Service
from api.who.lanes import Lane, R, lane_by_id
from api.who.lookup import no_run, no_sampler
from api.who.may_change import check_own
from api.who.principal import Principal
from store import tables


async def own_run(service: Service, who: Principal, run_id: str) -> Lane[tables.Run]:
    """The run, for an operation of it by `who`. Raises NotFound, and Forbidden for a colleague's."""
    lane = await _lane(service, tables.Run, service.runs, run_id)
    if lane is None or not lane.seen_by(who):
        raise no_run(run_id)
    check_own(who, lane.owner)
    return lane


async def sampler_of(service: Service, who: Principal, sampler_id: str) -> Lane[tables.Sampler]:
    """The sampler, for a request of it by `who`. Raises NotFound."""
    lane = await _lane(service, tables.Sampler, service.samplers, sampler_id)
    if lane is None or not lane.seen_by(who):
        raise no_sampler(sampler_id)
    return lane


async def _lane(service: Service, table: type[R], remembered: Remembered[Lane[R]], id: str) -> Lane[R] | None:
    lane = remembered.get(id)
    if lane is None:
        lane = await service.read(lambda session: lane_by_id(session, table, id))
        if lane is not None:
            remembered.put(id, lane)
    return lane
