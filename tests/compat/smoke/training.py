"""Training: every loss, optimizer steps, custom losses."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import tinker
from smoke.data import ADAM, datum, rewarded, supervised, tokens
from smoke.record import Tour, done, refusal


def train(tour: Tour, service: tinker.ServiceClient, model: str) -> tinker.TrainingClient:
    """Train a run for some steps, and return it."""
    run = tour.call(
        "ServiceClient.create_lora_training_client",
        lambda: done(service.create_lora_training_client(model, rank=8, seed=3, user_metadata={"who": "smoke"})),
    )
    tour.call("TrainingClient.get_info", lambda: _check_info(run, model))
    tour.call("TrainingClient.get_tokenizer", lambda: _round_trip(run.get_tokenizer()))
    logprobs = tour.call("TrainingClient.forward", lambda: forward(run))
    tour.call("TrainingClient.forward_backward: cross_entropy", lambda: _backward(run, supervised(), "cross_entropy"))
    tour.call("TrainingClient.optim_step", lambda: done(run.optim_step(ADAM)))
    tour.call("TrainingClient.forward_backward: cross_entropy, the loss falls over steps", lambda: _loop(run))
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        tour.call(
            f"TrainingClient.forward_backward: {loss}", lambda loss=loss: _backward(run, rewarded(logprobs), loss)
        )
    gspo = "TrainingClient.forward_backward: gspo"
    if "gspo" in get_args(
        tinker.types.LossFnType
    ):  # older clients refuse the name, and then wait for themselves for ever
        tour.call(gspo, lambda: _backward(run, _masked(logprobs), "gspo"))
    else:
        tour.record(gspo, "absent")
    tour.call(
        "TrainingClient.forward_backward: loss_fn_config",
        lambda: _backward(run, rewarded(logprobs), "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    )
    tour.call("TrainingClient.forward_backward: several targets, sparse", lambda: _several_targets(run))
    tour.call("TrainingClient.forward_backward: chunks", lambda: _chunks(run))
    tour.call("TrainingClient.forward_backward: pipelined, several steps ahead", lambda: _pipelined(run))
    tour.call("TrainingClient.forward_backward_custom", lambda: _custom(run))
    tour.call("TrainingClient.optim_step: clipping and decay", lambda: _clipped(run))
    tour.call("TrainingClient.forward_backward: a bad datum is an error, and the run goes on", lambda: _bad(run))
    fields = getattr(getattr(tinker.types, "DimuonParams", None), "model_fields", {})
    dimuon = "ServiceClient.create_lora_training_client: dimuon"
    earlier = "ServiceClient.create_lora_training_client: the earlier dimuon is refused, not taken for today's"
    tour.record(dimuon, "absent")
    tour.record(earlier, "absent")
    if "damping" in fields:
        tour.call(earlier, lambda: _check_refused(refusal(lambda: _dimuon(service, model))))
    elif fields:
        tour.call(dimuon, lambda: _dimuon(service, model))
    return run


def _check_refused(reason: str) -> None:
    assert "damping" in reason, reason


def _dimuon(service: Any, model: str) -> None:
    kind = tinker.types.DimuonOptimizerConfig()
    run = done(service.create_lora_training_client(model, rank=4, optimizer=kind))
    losses = []
    for _ in range(4):
        losses.append(done(run.forward_backward(supervised(), "cross_entropy")).metrics["loss:sum"])
        done(run.optim_step(tinker.types.DimuonParams(learning_rate=2e-3)))
    assert losses[-1] < losses[0], losses


def forward(run: Any) -> list[np.ndarray]:
    """Logprobs of a fixed batch, as the fingerprint of a run's weights."""
    outputs = done(run.forward(supervised(), "cross_entropy")).loss_fn_outputs
    found = [np.asarray(o["logprobs"].to_numpy()) for o in outputs]
    assert [x.shape for x in found] == [(11,)] * 3, [x.shape for x in found]
    assert all(np.isfinite(x).all() and (x < 0).all() for x in found)
    return found


def _check_info(run: Any, model: str) -> None:
    info = run.get_info()
    assert info.model_data.model_name == model
    assert info.lora_rank == 8


def _round_trip(tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode("3 + 5 = 8")).strip() == "3 + 5 = 8"


def _backward(run: Any, data: list[Any], loss: str, config: dict[str, Any] | None = None) -> float:
    result = done(run.forward_backward(data, loss, config))
    assert len(result.loss_fn_outputs) == len(data)
    assert np.isfinite(result.metrics["loss:sum"])
    done(run.optim_step(ADAM))
    return float(result.metrics["loss:sum"])


def _loop(run: Any) -> None:
    losses = [_backward(run, supervised(), "cross_entropy") for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0], losses


def _masked(logprobs: list[Any]) -> list[Any]:
    return [
        datum(tokens(i), {"logprobs": [float(x) for x in lp], "advantages": [1.0] * 11, "sequence_ratio_mask": MASK})
        for i, lp in enumerate(logprobs)
    ]


MASK = np.ones(11, dtype=np.float32)


def _several_targets(run: Any) -> None:
    torch = __import__("torch")
    ids = tokens()
    targets = torch.zeros(11, 16, dtype=torch.int64)
    weights = torch.zeros(11, 16)
    targets[:, 0], weights[:, 0] = torch.tensor(ids[1:]), 1.0
    plain = done(run.forward([datum(ids, {"weights": [1.0] * 11})], "cross_entropy")).metrics["loss:sum"]
    given = datum(ids, {"target_tokens": targets, "weights": weights})
    several = done(run.forward([given], "cross_entropy"))
    assert abs(several.metrics["loss:sum"] - plain) < 1e-3 * abs(plain)
    assert several.loss_fn_outputs[0]["logprobs"].to_numpy().shape == (11, 16)


def _chunks(run: Any) -> None:
    """More data than fit one request: several are sent, the first one last."""
    data = [datum([40, 50 + i % 100, 60], {"weights": [1.0, 1.0]}) for i in range(1100)]
    result = done(run.forward_backward(data, "cross_entropy"), 120)
    assert len(result.loss_fn_outputs) == 1100
    total = sum(float(o["logprobs"].to_numpy().sum()) for o in result.loss_fn_outputs)
    assert abs(result.metrics["loss:sum"] + total) < 1e-3 * abs(total)
    done(run.optim_step(ADAM))


def _pipelined(run: Any) -> None:
    futures = [f for _ in range(3) for f in (run.forward_backward(supervised(), "cross_entropy"), run.optim_step(ADAM))]
    for future in futures:
        done(future)


def _custom(run: Any) -> None:
    torch = __import__("torch")

    def loss(_data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = torch.stack([(lp.float() ** 2).sum() for lp in logprobs]).sum()
        return total, {"square:sum": float(total)}

    found = []
    for _ in range(2):
        found.append(done(run.forward_backward_custom(supervised(), loss)).metrics["square:sum"])
        done(run.optim_step(ADAM))
    assert found[1] < found[0], found


def _clipped(run: Any) -> None:
    done(run.forward_backward(supervised(), "cross_entropy"))
    params = tinker.AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=0.5, beta1=0.8, eps=1e-8)
    done(run.optim_step(params))


def _bad(run: Any) -> None:
    bad = [datum([40, 10**6, 50], {"weights": [1.0, 1.0]})]
    assert "1000000" in refusal(lambda: done(run.forward_backward(bad, "cross_entropy")))
    forward(run)
