"""The measure of load balance over experts, in closed form."""

from __future__ import annotations

import pytest
import torch

from workers.trainer.metrics import RouteCounter, balance_metrics


def test_balance_of_one_layer() -> None:
    """The MaxVio example of shared/reference/rl-loss-golden.json: mean 16, most 40."""
    metrics = balance_metrics(torch.tensor([[30, 10, 20, 0, 40, 10, 5, 13]]))
    assert metrics == pytest.approx(
        {
            "e_frac_with_tokens:mean": 7 / 8,
            "e_frac_oversubscribed:mean": 3 / 8,
            "e_max_violation:mean": 1.5,
            "e_max_violation:max": 1.5,
            "e_min_violation:mean": -1.0,
        }
    )


def test_layers_are_averaged_and_groups_kept_apart() -> None:
    counter = RouteCounter(2)
    counter.on_route(0, torch.tensor([[0], [0], [1]]))
    counter.on_route(1, torch.tensor([[1], [0], [1]]))
    first, second = counter.counts([0, 2, 3])
    assert first.tolist() == [[2, 0], [1, 1]]
    assert second.tolist() == [[0, 1], [0, 1]]
    metrics = balance_metrics(first)
    assert metrics["e_max_violation:mean"] == 0.5
    assert metrics["e_max_violation:max"] == 1.0


def test_a_dense_model_has_none() -> None:
    assert balance_metrics(RouteCounter(0).counts([0, 5])[0]) == {}
