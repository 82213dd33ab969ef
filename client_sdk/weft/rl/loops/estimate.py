"""The estimated cost of an RL loop."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import WeftError
from weft.money import amount_nusd
from weft.plan.estimate import CostEstimate, EstimatedRow
from weft.rl import checks
from weft.rl.envs.environment import Environment
from weft.rl.loops.mixture import mixture, ratios_of
from weft.rl.loops.rollouts import Groups
from weft.run_weights import base_model_of
from weft.training_client import TrainingClient
from weft.wire.account.usage import UsageKind


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
