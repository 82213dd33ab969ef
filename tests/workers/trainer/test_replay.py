"""Rollout routing replay: data that prescribe the experts of their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from weft.wire.binary.train_codec import ArrayDatum
from weft.wire.checks.losses import ROUTES

from tests.workers.trainer.kit import Bench, ce_data, output
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder

LENGTHS = [9, 4]


def with_routes(data: list[ArrayDatum], routes: list[np.ndarray[Any, Any]]) -> list[ArrayDatum]:
    return [replace(datum, inputs={**datum.inputs, ROUTES: array}) for datum, array in zip(data, routes, strict=True)]


def routes_of(decoder: Decoder, data: list[ArrayDatum]) -> list[np.ndarray[Any, Any]]:
    """The experts that the base model's routers choose: [tokens, layers, choices] of each datum."""
    chosen: list[Tensor] = []
    lengths = [len(datum.tokens) for datum in data]
    tokens = torch.from_numpy(np.concatenate([datum.tokens for datum in data]).astype(np.int64))
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        decoder(tokens, positions, PackedAttend(lengths), None, lambda _, experts: chosen.append(experts))
    return np.split(torch.stack(chosen, dim=1).numpy(), np.cumsum(lengths)[:-1])


@contextmanager
def other_routers(seed: int) -> Iterator[None]:
    """Make the routers choose other experts, as another engine's rounding might; their weights stay."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.topk

    def topk(scores: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
        noise = 0.3 * torch.rand(scores.shape, generator=generator)
        chosen = real(scores + noise, k, dim=dim).indices
        return scores.gather(dim, chosen), chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        yield


def train(bench: Bench, run: str, data: list[ArrayDatum]) -> tuple[list[np.ndarray[Any, Any]], Tensor]:
    op = bench.fb(run, data)
    done = bench.ok(op)
    grad = bench.run(run).grad
    assert grad is not None
    return output(done[op.op_id])[0], grad.flat.clone()


def test_its_own_routing_replayed_changes_no_bit(bench: Bench, decoder: Decoder) -> None:
    data = ce_data(LENGTHS, seed=1)
    bench.ok(bench.create("plain", seed=7), bench.create("replayed", seed=7))
    plain, replayed = train(bench, "plain", data), train(bench, "replayed", with_routes(data, routes_of(decoder, data)))
    assert all(np.array_equal(a, b) for a, b in zip(plain[0], replayed[0], strict=True))
    assert torch.equal(plain[1], replayed[1])


def test_replay_gives_what_the_other_router_gave(bench: Bench, decoder: Decoder) -> None:
    data = ce_data(LENGTHS, seed=1)
    bench.ok(bench.create("other", seed=7), bench.create("free", seed=7), bench.create("replayed", seed=7))
    chosen: list[np.ndarray[Any, Any]] = []
    with other_routers(5):
        chosen = routes_of(decoder, data)
    with other_routers(5):  # the same draws again
        other = train(bench, "other", data)
    free, replayed = train(bench, "free", data), train(bench, "replayed", with_routes(data, chosen))
    for wanted, without, found in zip(other[0], free[0], replayed[0], strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        assert np.abs(without - wanted).max() > 1e-3
    torch.testing.assert_close(replayed[1], other[1], atol=1e-6, rtol=1e-5)


def test_tokens_without_a_route_and_neighbours_are_free(bench: Bench, decoder: Decoder) -> None:
    data = ce_data(LENGTHS, seed=1)
    with other_routers(5):
        chosen = routes_of(decoder, data)
    half = [array.copy() for array in chosen]
    half[0][4:] = -1
    bench.ok(*(bench.create(run, seed=7) for run in ("a", "b", "c", "alone")))
    ops = [
        bench.fb("a", with_routes(data, half)),
        bench.fb("b", data),
        bench.fb("c", [with_routes(data, chosen)[0], data[1]]),
    ]
    done = bench.ok(*ops)
    found = {op.run_id: output(done[op.op_id])[0] for op in ops}
    alone, gradient = train(bench, "alone", data)
    assert all(np.array_equal(x, y) for x, y in zip(found["b"], alone, strict=True))
    theirs = bench.run("b").grad
    assert theirs is not None
    assert torch.equal(theirs.flat, gradient)
    assert np.array_equal(found["c"][1], alone[1])
    np.testing.assert_allclose(found["a"][0][:4], found["c"][0][:4], atol=1e-6)
    assert not np.allclose(found["a"][0][4:], found["c"][0][4:], atol=1e-6)


def test_replay_with_recomputed_activations(bench: Bench, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ce_data(LENGTHS, seed=1)
    with other_routers(5):
        data = with_routes(data, routes_of(decoder, data))
    bench.ok(bench.create("kept", seed=7), bench.create("recomputed", seed=7))
    kept = train(bench, "kept", data)
    monkeypatch.setattr(decoder, "activation_budget_bytes", 0)
    recomputed = train(bench, "recomputed", data)
    assert torch.equal(kept[1], recomputed[1])


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (np.zeros((9, 1, 2), np.int64), r"has shape \(9, 1, 2\); it needs .*\(9, 2, 2\)"),
        (np.zeros((9, 2, 2), np.float32), "must be integers"),
        (np.full((9, 2, 2), 4), "at token 0: every choice is an expert 0 to 3"),
        (np.stack([np.zeros((9, 2), np.int64), np.full((9, 2), -1)], axis=2), "all of a layer are -1"),
    ],
)
def test_a_bad_route_fails_its_operation(bench: Bench, routes: np.ndarray[Any, Any], says: str) -> None:
    bench.ok(bench.create("a", seed=7))
    op = bench.fb("a", with_routes(ce_data([9], seed=1), [routes]))
    failure = bench.go(op)[op.op_id].failure
    assert failure is not None
    assert failure.category == "user"
    assert re.search(says, failure.message), failure.message
