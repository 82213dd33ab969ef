"""A purse that limits what a loop spends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.rl.chat.purse import Purse
from weft.run_weights import base_model_of
from weft.sampling_client import SamplingClient
from weft.training_client import TrainingClient

NUSD = 10**9


async def purse(
    run: TrainingClient, budget_usd: float | None, earlier: Sequence[str], elsewhere: Mapping[str, int]
) -> Purse:
    """A purse at today's prices. Already spent are the bills of the loop's earlier runs, the holds of operations that a
    killed life left under way, and `elsewhere`: spending of earlier lives that is billed to none of their runs."""
    limit = None if budget_usd is None else round(budget_usd * NUSD)
    rest, spent = run.create_rest_client(), sum(elsewhere.values())
    priced = await rest.get_prices(base_model_of(await run.get_info_async()))
    for run_id in earlier:
        usage = await rest.get_usage(run_id)
        spent += usage.total_nusd + usage.held_nusd
    return Purse(dict[str, int](**priced.rates_uusd_per_mtok), limit, spent)


def paid_elsewhere(purse: Purse, earlier: Mapping[str, int], run_id: str) -> dict[str, int]:
    """Spending that is billed to no run, by the run of the life that paid; this life's is added."""
    return {**earlier, run_id: earlier.get(run_id, 0) + purse.elsewhere_nusd}


async def prices_of(sampler: SamplingClient) -> Purse:
    """A purse with the prices of the sampler's base model, which may differ from the run's."""
    priced = await sampler.create_rest_client().get_prices(await sampler.get_base_model_async())
    return Purse(dict[str, int](**priced.rates_uusd_per_mtok))
