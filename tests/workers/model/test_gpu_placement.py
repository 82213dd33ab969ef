"""On a pretended GPU (fake tensors have a device and no data): everything lies where it should and nothing waits.

A fake tensor refuses operations across devices, and whatever needs its values on the host: .item(), .tolist(), nonzero.
The kernels are replaced by stand-ins that look at their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.workers.model.gpu_kit import CONFIG, DENSE
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.attend import PackedAttend
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.gpu import fused_kernels, kernels, segments
from workers.model.isolation import probe
from workers.model.lora import linear as lora
from workers.model.lora.rows import LoraRows
from workers.model.mixture import experts as moe

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CUDA = torch.device("cuda", 0)
KERNELS = {
    kernels: ("shrink", "expand", "outer", "experts", "expert_blocks", "sort_pairs"),
    fused_kernels: (
        "swiglu",
        "swiglu_backward",
        "gather",
        "gather_sum",
        "gather_sum_expand",
        "turn",
        "turn_backward",
        "add_norm",
    ),
}


class Indexing(TorchFunctionMode):
    """Does in Python what Tensor's indexing, `copy_`, `to` and `pin_memory` can do only in a torch built for CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return take(*args)
        if func is Tensor.__setitem__:
            place, index, value = args
            if isinstance(index, Tensor):
                return torch.ops.aten.index_put_(place, [index], value)
            return copy(take(place, index), value)
        if func is Tensor.copy_:
            return copy(*args)
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.to and isinstance(args[1], torch.device):
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[1])
        return func(*args, **(kwargs or {}))


def take(x: Tensor, index: Any) -> Tensor:
    at = 0
    for each in index if isinstance(index, tuple) else (index,):
        if each is None:
            x, at = x.unsqueeze(at), at + 1
        elif isinstance(each, int):
            x = x.select(at, each)
        elif isinstance(each, slice):
            x, at = torch.ops.aten.slice.Tensor(x, at, each.start, each.stop, each.step or 1), at + 1
        else:
            x, at = x.index_select(at, each), at + 1
    return x


def copy(place: Tensor, value: Tensor) -> Tensor:
    assert value.expand_as(place).device == place.device, "a copy to the device is to be one of its own"
    return place


class Launches:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            assert all(size > 0 for size in grid)
            assert all(arg.device == CUDA for arg in args if isinstance(arg, Tensor))
            self.count += 1

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    found = {name: Launches() for module, names in KERNELS.items() for name in names}
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, found[name])

    def addresses(adapters: Sequence[Adapter | None]) -> tuple[dict[str, int], Any, Any]:
        """A fake tensor lies nowhere."""
        names = dict.fromkeys(name for adapter in adapters if adapter for name in adapter.views)
        has = [[int(adapter is not None and name in adapter.views) for adapter in adapters] for name in names]
        return {name: n for n, name in enumerate(names)}, np.array(has, dtype=np.int64), np.array(has, dtype=np.bool_)

    monkeypatch.setattr(segments, "_addresses", addresses)
    monkeypatch.setattr(torch, "from_numpy", lambda array: torch.tensor(array.tolist()))
    return found


class Context:
    """Replaces autograd's context between forward and backward: autograd cannot run without CUDA."""

    needs_input_grad = (True, True)
    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """The backwards of the products, for the test to call."""
    found: list[Callable[[], Any]] = []
    for function in (lora._LoraLinear, moe._ExpertBlock):

        def apply(*args: Any, function: Any = function) -> Any:
            context = Context()
            with torch.no_grad():
                out = function.forward(context, *args)
            outs = out if isinstance(out, tuple) else (out,)
            found.append(lambda: function.backward(context, *map(torch.empty_like, outs)))
            return out

        monkeypatch.setattr(function, "apply", apply)
    return found


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
def test_a_pass_stays_on_the_device_and_never_waits(
    config: DecoderConfig,
    launches: dict[str, Launches],
    recorded: list[Callable[[], Any]],
) -> None:
    with FakeTensorMode(), Indexing():
        decoder = Decoder(config, torch.bfloat16, CUDA)
        decoder.activation_budget_bytes = 1 << 40
        adapters = [Adapter.zeros(AdapterShape(config, rank), device=CUDA) for rank in (4, 8, 40)]
        grads = [Adapter.zeros(of.shape, device=CUDA) for of in adapters]
        rows = LoraRows([0, 5, 5, 14, 16], [*adapters, None], [*grads, None])
        tokens = torch.empty(len(rows), dtype=torch.int64, device=CUDA)
        hidden = decoder(tokens, tokens, PackedAttend([5, 9, 2]), rows)
        logits = decoder.logits(hidden, rows)
        gradients = [gradient for backward in reversed(recorded) for gradient in backward() if gradient is not None]
        assert all(tensor.device == CUDA for tensor in (hidden, logits, *gradients))
    # Two rank classes (4 and 8, 40); four linears with six outputs in a layer, and the unembedding. Between the
    # experts' products there is one kernel, and one more for the group without an adapter.
    moe = bool(config.num_experts)
    counts = {"shrink": 2 * (5 + 8), "expand": 2 * ((5 + 3) if moe else (8 + 5)), "outer": 2 * (5 + 8)}
    counts |= {"swiglu": 3 * moe, "swiglu_backward": 3 * moe, "gather": 4 * moe, "gather_sum": 4 * moe}
    counts |= {"gather_sum_expand": 4 * moe}
    counts |= {"turn": 2, "turn_backward": 2, "add_norm": 2}
    assert {name: kernel.count for name, kernel in launches.items() if name in counts} == counts


def test_a_gpu_is_not_tried_for_isolation() -> None:
    """A GPU would fail the trial, and computing group by group would leave it idle."""
    with FakeTensorMode():
        decoder = Decoder(CONFIG, torch.bfloat16, CUDA)
        found = probe(decoder)
    assert decoder.isolation == "packed-inexact"
    assert "equal up to rounding" in str(found)
    rows = LoraRows([0, 2], [None])
    assert decoder.arranged(rows) is rows
