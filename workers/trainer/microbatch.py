"""One forward, the losses, and one backward over parts of many operations.

A loss sees only detached log-probabilities of its own part; the gradients of all losses are concatenated and run
through the decoder once. So an error or a NaN in one operation's loss stays there: its gradient is replaced by zero.

Shapes: T packed tokens, P target positions (of all parts, in order; K per token with K targets).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from weft.wire.binary.train_codec import ArrayDatum
from weft.wire.checks.custom_shapes import CustomLossError
from weft.wire.checks.losses import LOSSES, ROUTES, TEMPERATURE, THRESHOLDS, clip_of

from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.device import sent
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows
from workers.model.memory import is_out_of_memory
from workers.model.mixture.router import FREE
from workers.trainer.losses.custom import custom_loss
from workers.trainer.losses.named import LOSS_FUNCTIONS
from workers.trainer.metrics import Measure, RouteCounter
from workers.trainer.progress import Part

Array = np.ndarray[Any, np.dtype[Any]]


def run_microbatch(decoder: Decoder, parts: Sequence[Part], *, trains: bool) -> None:
    """Compute `parts` together, add their results to their operations' Progress, and, with `trains`, their gradients
    to the operations' arenas. An operation with a result that is not finite is marked as failed.

    If this raises, no result was added, but arenas may hold a part of a gradient: restart those operations."""
    packed = _pack(parts, decoder.device)
    counter = RouteCounter(decoder.config.num_experts)
    with nullcontext() if trains else torch.no_grad():
        hidden_TD = decoder(
            packed.tokens_T,
            packed.positions_T,
            PackedAttend(packed.lengths),
            packed.lora,
            counter.on_route,
            packed.replay_MTK,
        )
        lp_P = target_logprobs(
            decoder, hidden_TD, packed.rows_P, packed.targets_P, packed.lora, temperature_T=packed.temperature_T
        )
    results = []
    for part, lp_p in zip(parts, torch.split(lp_P, packed.positions), strict=True):
        with part.progress.in_loss(part):
            results.append(_loss(part, lp_p.detach(), trains))
    if trains:
        lp_P.backward(torch.cat([result.dlp_P for result in results]))  # type: ignore[no-untyped-call]
    counts = counter.counts(packed.lora.offsets)
    for part, result, counts_LE in zip(parts, results, counts, strict=True):
        if result.problem:
            part.progress.fail(result.problem, "user", ran=True)
        part.progress.add(part, result.outputs, result.measures, counts_LE)


@dataclass(frozen=True)
class _Packed:
    tokens_T: Tensor
    positions_T: Tensor
    lengths: list[int]  # of each datum
    lora: LoraRows
    rows_P: Tensor  # on the host, which cuts them
    targets_P: Tensor
    positions: list[int]  # target positions of each part
    replay_MTK: Tensor | None  # the experts to choose; None if no datum names any
    temperature_T: Tensor | None  # the sampling temperatures; None if no datum names any


def _pack(parts: Sequence[Part], device: torch.device) -> _Packed:
    data = [datum for part in parts for datum in part.data]
    lengths = [len(datum.tokens) for datum in data]
    targets = [datum.inputs["target_tokens"] for datum in data]
    per_token = [array.shape[1] if array.ndim == 2 else 1 for array in targets]
    repeats = np.repeat(per_token, lengths)

    def tensor(arrays: list[Array]) -> Tensor:
        return sent(torch.from_numpy(np.concatenate(arrays).astype(np.int64)), device)

    return _Packed(
        tokens_T=tensor([datum.tokens for datum in data]),
        positions_T=tensor([np.arange(length) for length in lengths]),
        lengths=lengths,
        lora=LoraRows(
            [0, *accumulate(part.tokens for part in parts)],
            [part.progress.run.adapter for part in parts],
            [part.progress.grad for part in parts],
        ),
        rows_P=torch.from_numpy(np.repeat(np.arange(len(repeats)), repeats)),
        targets_P=tensor([array.reshape(-1) for array in targets]),
        positions=[sum(datum.inputs["target_tokens"].size for datum in part.data) for part in parts],
        replay_MTK=_replay(data, device),
        temperature_T=_temperature(data, device),
    )


def _replay(data: Sequence[ArrayDatum], device: torch.device) -> Tensor | None:
    routes = [datum.inputs.get(ROUTES) for datum in data]
    example = next((array for array in routes if array is not None), None)
    if example is None:
        return None
    free = (np.full((len(datum.tokens), *example.shape[1:]), FREE) for datum in data)
    rows = [given if array is None else array for array, given in zip(routes, free, strict=True)]
    return torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(device).transpose(0, 1).contiguous()


def _temperature(data: Sequence[ArrayDatum], device: torch.device) -> Tensor | None:
    """float32, 1 for data that do not say; a datum of one value was sampled at it everywhere."""
    if all(TEMPERATURE not in datum.inputs for datum in data):
        return None
    one = np.ones(1, np.float32)
    given = [(datum.inputs.get(TEMPERATURE, one), len(datum.tokens)) for datum in data]
    rows = [np.broadcast_to(values.reshape(-1).astype(np.float32), length) for values, length in given]
    return torch.from_numpy(np.concatenate(rows)).to(device)


@dataclass(frozen=True)
class _Result:
    outputs: list[dict[str, Array]]
    measures: dict[str, Measure]
    dlp_P: Tensor
    problem: str = ""


def _loss(part: Part, lp_P: Tensor, trains: bool) -> _Result:
    """The loss of one part and its gradient with respect to the log-probabilities."""
    leaf_P = lp_P.requires_grad_(trains)
    try:
        with torch.enable_grad() if trains else torch.no_grad():
            loss, measures = _evaluate(part, leaf_P)
            if trains:
                loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        if part.progress.custom is None or is_out_of_memory(error):
            raise
        # Never torch's own message: it may contain a number that the loss has computed.
        known = isinstance(error, CustomLossError)
        problem = (
            str(error) if known else f"custom loss {part.progress.custom.loss.name!r}: torch has no gradient of it"
        )
        return _Result(_outputs(part, lp_P.detach()), {}, torch.zeros_like(lp_P), problem[:1000])
    dlp_P = leaf_P.grad if leaf_P.grad is not None else torch.zeros_like(lp_P)
    problem = _not_finite(part, lp_P.detach(), loss.detach(), dlp_P)
    if problem:
        dlp_P = torch.zeros_like(dlp_P)
    return _Result(_outputs(part, lp_P.detach()), measures, dlp_P, problem)


def _evaluate(part: Part, leaf_P: Tensor) -> tuple[Tensor, dict[str, Measure]]:
    batch, custom = part.progress.batch, part.progress.custom
    if custom is not None:
        return custom_loss(custom, leaf_P, part.data, part.start)
    inputs = {name: torch.from_numpy(array).to(leaf_P.device) for name, array in _loss_inputs(part).items()}
    return LOSS_FUNCTIONS[batch.loss_fn](leaf_P, inputs, batch.loss_fn_config)


def _loss_inputs(part: Part) -> dict[str, Array]:
    """The inputs that the loss reads, float32 over the part's positions. If some data carry per-token thresholds, the
    other data get the config's thresholds or the loss's defaults."""
    batch, spec = part.progress.batch, LOSSES[part.progress.batch.loss_fn]
    names = list(spec.required[1:])
    fill: dict[str, float] = {}
    for name, default in zip(THRESHOLDS, clip_of(spec) or (), strict=False):
        if any(name in datum.inputs for datum in part.data):
            names.append(name)
            fill[name] = float(batch.loss_fn_config.get(name, default))
    inputs = {name: np.concatenate([_flat(datum, name, fill.get(name, 0.0)) for datum in part.data]) for name in names}
    if batch.loss_fn == "gspo":
        inputs["lengths"] = np.array([len(datum.tokens) for datum in part.data])
    return inputs


def _flat(datum: ArrayDatum, name: str, missing: float) -> Array:
    found = datum.inputs.get(name)
    if found is None:
        return np.full(datum.inputs["target_tokens"].size, missing, np.float32)
    return found.reshape(-1).astype(np.float32)


def _outputs(part: Part, lp_P: Tensor) -> list[dict[str, Array]]:
    shapes = [datum.inputs["target_tokens"].shape for datum in part.data]
    ends = list(accumulate(int(np.prod(shape)) for shape in shapes))
    pieces = np.split(lp_P.cpu().numpy(), ends[:-1])
    return [{"logprobs": piece.reshape(shape)} for piece, shape in zip(pieces, shapes, strict=True)]


def _not_finite(part: Part, lp_P: Tensor, loss: Tensor, dlp_P: Tensor) -> str:
    """Which datum made a result that is not finite; "" if all is well."""
    if bool(torch.isfinite(loss)) and bool((torch.isfinite(lp_P) & torch.isfinite(dlp_P)).all()):
        return ""
    sizes = [datum.inputs["target_tokens"].size for datum in part.data]
    for what, values_P in (("log-probabilities are", lp_P), ("gradient of the loss is", dlp_P)):
        for offset, values in enumerate(torch.split(values_P, sizes)):
            if not bool(torch.isfinite(values).all()):
                said = f"datum {part.start + offset}: its {what} not finite"
                if values_P is lp_P:
                    return f"{said}; {part.progress.about_weights()}"
                if part.progress.custom is not None:  # the loss may have chosen the position to leak a value
                    return said
                at = int((~torch.isfinite(values)).nonzero()[0, 0])
                return f"{said} ({float(values[at])} at position {at})"
    return f"data {part.start} to {part.stop - 1}: the loss is {float(loss)}"
