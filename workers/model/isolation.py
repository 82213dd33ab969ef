"""The start-up test of what isolation rests on: do rows come out with the same bits whatever else is in the batch?

Products with the base, and the transcendental functions between them, are computed for all tenants at once, and the
rows of a tenant lie wherever they come to lie. Matrix libraries choose kernels by the number of rows, split work over
threads and look at the alignment of memory; vectorised functions round the ends of a tensor differently. None of that
is documented, so it is tried: for every distinct weight shape of the loaded decoder,
in both directions, on the threads in use. Where all agree the trainer packs ("padded": base_mm); where anything
differs, every group is computed alone ("per-segment"), which is exact whatever the library does, and slower.
Runs once per process: `settle` after the threads are set and the weights are loaded; what it has found may be kept for
the next process (`tried`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.base_mm import MIN_ROWS, base_mm
from workers.model.native.gemm import packed
from workers.model.tried import Finding, once

if TYPE_CHECKING:
    from workers.model.decoder import Decoder

#: Batches of so many rows, from the rows in brackets of a large one, must give the bits of the large one.
BATCHES = tuple(
    (rows, start) for rows in (1, 3, 7, 15, 16, 17, 19, 24, 31, 33, 63, 65, 100, 129, 257) for start in (0, 5)
)

#: The large batch, unless the weight is so large that it would take long.
MAX_ROWS = 1024
MAX_MULTIPLICATIONS = 2**33

#: Rows wider than this are whole cache lines in every published model; they are not tried for alignment.
MAX_ALIGNED_WIDTH = 1 << 16


@dataclass(frozen=True)
class Isolation:
    """`mode` is "padded", "per-segment" or, untried, "packed-inexact"; `reason` names the first difference;
    `shapes` were tried."""

    mode: str
    shapes: int
    reason: str = ""

    def __str__(self) -> str:
        if self.mode == "packed-inexact":
            return "packed (on a GPU: equal up to rounding, not to the bit)"
        if self.mode == "padded":
            return f"packed (rows of {self.shapes} weight shapes do not depend on their neighbours)"
        return f"group by group, which is slower ({self.reason})"


def settle(decoder: Decoder, kept: Path | None = None) -> Isolation:
    """Test the decoder's shapes, or find in the folder `kept` what such a test has found on this machine, and set
    `decoder.isolation`."""
    found = choose(decoder) if kept is None or decoder.device.type != "cpu" else _kept(decoder, kept)
    decoder.isolation = found.mode
    return found


def _kept(decoder: Decoder, folder: Path) -> Isolation:
    config = decoder.config
    weights = [(list(w.shape), str(w.dtype), packed(w) is not None) for w in _shapes(decoder)]
    widths = (config.moe_intermediate_size, config.intermediate_size)

    def trial() -> Finding:
        found = choose(decoder)
        return Finding(found.mode, found.shapes, found.reason)

    found = once(folder, f"{weights} {widths}", trial)
    return Isolation(found.mode, found.shapes, found.reason)


def choose(decoder: Decoder) -> Isolation:
    """Test the decoder's shapes. On a GPU every batch size may round in its own way, and group by group would be many
    times slower: there tenants are packed, equal up to rounding but not to the bit."""
    if decoder.device.type != "cpu":
        return Isolation("packed-inexact", 0)
    shapes = _shapes(decoder)
    with torch.no_grad():
        for difference in _differences(decoder, shapes):
            return Isolation("per-segment", len(shapes), difference)
    return Isolation("padded", len(shapes))


def _shapes(decoder: Decoder) -> list[Tensor]:
    """One weight [out, in] of every distinct shape; experts share theirs."""
    found: dict[tuple[int, ...], Tensor] = {}
    for weight in decoder.parameters():
        if weight.ndim >= 2:
            flat = weight[0] if weight.ndim == 3 else weight
            found.setdefault(tuple(flat.shape), flat)
    return list(found.values())


def _differences(decoder: Decoder, shapes: list[Tensor]) -> Iterator[str]:
    for weight in shapes:
        for transposed in (False, True):
            inner = weight.shape[0 if transposed else 1]

            def product(x: Tensor, weight: Tensor = weight, transposed: bool = transposed) -> Tensor:
                return base_mm(x, weight, transposed=transposed)

            rows = max(MIN_ROWS, min(MAX_ROWS, MAX_MULTIPLICATIONS // weight.numel()))
            at = _first_difference(product, inner, rows, weight.device)
            if at is not None:
                name = "x W" if transposed else "x W^T"
                yield f"{name} with {list(weight.shape)} gives {at} rows other bits than {rows}"
    for width in {size for weight in shapes for size in weight.shape}:
        if width <= MAX_ALIGNED_WIDTH and _minds_its_place(width, decoder.device):
            yield f"products of rows of {width} depend on where in memory they lie"
    config = decoder.config
    for width in {config.moe_intermediate_size, config.intermediate_size} - {0}:
        at = _first_difference(_activation, 2 * width, MAX_ROWS, decoder.device)
        if at is not None:
            yield f"silu over rows of {width} gives {at} rows other bits than {MAX_ROWS}"


def _minds_its_place(width: int, device: torch.device) -> bool:
    """Whether the products of an adapter with a group's rows depend on the alignment of those rows."""
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 4, 7, 16):
        x, a = (torch.randn(n, width, generator=generator).to(device) for n in (64, rank))
        for rows, start in ((1, 1), (6, 3), (17, 5), (40, 7)):
            there, here = x[start : start + rows], x[start : start + rows].clone()
            for of in (_shrink, _expand, _gradient):
                if not torch.equal(of(there, a), of(here, a)):
                    return True
    return False


def _shrink(x: Tensor, a: Tensor) -> Tensor:
    return torch.mm(x, a.t())


def _expand(x: Tensor, a: Tensor) -> Tensor:
    u = torch.ones(len(x), len(a), device=x.device).cumsum(1)
    before = x.clone()
    x.addmm_(u, a, alpha=0.5)
    after = x.clone()
    x.copy_(before)
    return after


def _gradient(x: Tensor, a: Tensor) -> Tensor:
    u = torch.ones(len(x), len(a), device=x.device).cumsum(0)
    return torch.zeros_like(a).addmm_(u.t(), x, alpha=0.5)


def _activation(gate_up_PG: Tensor) -> Tensor:
    """What an MLP computes between its products, forward and backward."""
    gate, up = gate_up_PG.chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    hidden = F.silu(gate) * up
    return torch.cat((hidden, up * (sigmoid * (1 + gate * (1 - sigmoid))), (hidden * up).sum(-1, keepdim=True)), dim=1)


def _first_difference(of: Callable[[Tensor], Tensor], width: int, rows: int, device: torch.device) -> int | None:
    """The size of the first batch whose rows are not those of the batch of `rows`; None when all agree."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).to(device)
    whole = of(x)
    for count, start in BATCHES:
        if start + count <= rows and not torch.equal(
            of(x[start : start + count].clone()), whole[start : start + count]
        ):
            return count
    return None
