"""The estimated cost of a loop, and a purse that limits what it spends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.errors import WeftError
from weft.money import amount_nusd
from weft.plan.estimate import CostEstimate, EstimatedRow
from weft.rl import checks
from weft.rl.chat.purse import Purse
from weft.rl.envs.environment import Environment
from weft.rl.loops.mixture import mixture, ratios_of
from weft.rl.loops.rollouts import Groups
from weft.run_weights import base_model_of
from weft.sampling_client import SamplingClient
from weft.training_client import TrainingClient
from weft.wire.account.usage import UsageKind

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


def estimate(
    run: TrainingClient,
    env: Environment | Mapping[str, Environment],
    *,
    groups: Groups | None = None,
    steps: int = 100,
    ratios: Mapping[str, float] | None = None,
) -> CostEstimate:
    """What `train` would cost if each rollout takes what its environment expects (`expected=rl.Size(...)`).

    Prompts are counted in full for each turn, as if nothing of them were cached; all data are trained.
    """
    checks.count("steps", steps, least=0)
    groups = groups or Groups()
    mixed = mixture(env, None, 0)
    shares = ratios_of(mixed, ratios).shares
    priced = run.create_rest_client().get_prices(base_model_of(run.get_info())).result()
    rollouts = steps * groups.batch * groups.size
    tokens: dict[UsageKind, float] = dict.fromkeys(("prefill", "cached_prefill", "sample", "train"), 0.0)
    for name, each in mixed.items():
        size = each.env.expected
        if size is None:
            raise WeftError(
                "the environment does not say what a rollout takes: expected=rl.Size(drawn=200, read=100, turns=1)"
            )
        share = rollouts * shares[name]
        whole = size.drawn + size.read
        # Each turn reads all turns before it, and the conversation grows evenly: on average a turn reads half of the
        # whole.
        prompts = size.read if size.turns == 1 else size.turns * whole / 2
        tokens["prefill"] += share * prompts
        tokens["sample"] += share * size.drawn
        tokens["train"] += share * whole
    rows = [
        EstimatedRow(kind, round(count), rate, amount_nusd(round(count), rate))
        for kind, count in tokens.items()
        if count
        for rate in [priced.rates_uusd_per_mtok[kind]]
    ]
    return CostEstimate(priced.base_model, priced.price_version, rows, exact=False)
