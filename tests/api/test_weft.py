"""Weft's own questions: what may be asked for, what it costs, what was spent."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from weft.wire.checks.losses import WITH_CUSTOM

from api.checks.runs import MAX_TTL_S, MIN_TTL_S
from tests.api.conftest import CONTEXT, MODEL, VOCAB, World
from tests.api.data import batch


def test_limits_are_those_that_requests_are_refused_by(world: World) -> None:
    limits = world.get("weft/limits")
    known = {
        "eos_token_ids": list(world.service.cards[MODEL].eos_token_ids),
        "num_experts": 8,
        "mixture_layers": 4,
        "experts_per_token": 2,
    }
    assert limits["models"] == {MODEL: {"vocab_size": VOCAB, "context_length": CONTEXT} | known}
    assert (limits["max_body_bytes"], limits["max_data"], limits["max_rank"]) == (20_000, 8, 16)
    assert (limits["max_num_samples"], limits["chunk_data"], limits["chunk_bytes"]) == (4, 8, 10_000)
    assert (limits["min_ttl_seconds"], limits["max_ttl_seconds"]) == (MIN_TTL_S, MAX_TTL_S)
    config = world.post("client/config", {"sdk_version": "0.38.0"})
    assert limits["chunk_data"] == config["fwdbwd_max_chunk_len"]
    assert limits["chunk_bytes"] == config["fwdbwd_max_chunk_bytes_count"]


@pytest.mark.parametrize("name", sorted(WITH_CUSTOM))
def test_losses_are_described(world: World, name: str) -> None:
    """Clients get the same table by which their data are checked."""
    assert world.get("weft/limits")["losses"][name] == WITH_CUSTOM[name].model_dump()


def test_prices_of_a_model(world: World) -> None:
    prices = world.get(f"weft/prices?model={MODEL}")
    assert prices["base_model"] == MODEL
    assert prices["rates_uusd_per_mtok"] == {
        kind: world.service.prices.rate(MODEL, kind, _now()).uusd
        for kind in ("train", "prefill", "cached_prefill", "sample")
    }
    assert "no model 'nobody/nothing'" in world.get("weft/prices?model=nobody/nothing", status=404)["detail"]
    world.get("weft/prices", status=422)


def test_spending_without_a_balance(world: World) -> None:
    assert world.get("weft/balance")["spent_nusd"] == 0
    run = world.run()
    request_id = world.train(batch(run, 1))["request_id"]
    world.finish(request_id, b"", tokens=1_000_000)
    balance = world.get("weft/balance")
    usage = world.get("weft/usage")
    assert balance["balance_nusd"] is None
    assert balance["spent_nusd"] == balance["spent_this_month_nusd"] == usage["total_nusd"] > 0
    assert balance["month"] == f"{_now():%Y-%m}"
    assert world.get("weft/balance", key=world.other_key)["spent_nusd"] == 0


def _now() -> datetime:
    return datetime.now(UTC)
