"""The isolation probe, at start-up: does a row come out with the same bits whatever else is in the batch?

Products with the base, and the transcendental functions between them, are computed for all tenants at once, with a
tenant's rows anywhere in the batch. Matrix libraries choose kernels by the number of rows, split work over threads and
look at the alignment of memory; vectorised functions round the ends of a tensor differently. None of that is
documented, so it is tested: for every distinct weight shape of the loaded decoder, in both directions, on the threads
in use. Where all agree the trainer packs ("padded": base_mm); where anything differs, every group is computed alone
("per-segment"), which is exact whatever the library does, and slower.

Call `probe` once per process, after the threads are set and the weights are loaded. The test takes a second, so its
finding is kept on disk for the next start. It holds for the same code, libraries, processor, threads and weight shapes
only; a file that cannot be read counts as none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from workers.model.config import GateConfig
from workers.model.gpu import fla
from workers.model.lora.base_mm import MIN_ROWS, base_mm
from workers.model.mixture.gate import activated, again
from workers.model.native.build import library, processor
from workers.model.native.gemm import packed
from workers.model.parts.gated_delta import GatedDelta
from workers.model.parts.mamba2 import Mamba2
from workers.model.parts.steady import sigmoid_of

if TYPE_CHECKING:
    from workers.model.decoder import Decoder

#: Rows of the large batch; fewer where the product would exceed MAX_MULTIPLICATIONS, to save time. A prime, so that
#: threads part a batch within a row, as they do with batches of any size: 1,024 rows are cut at even places.
MAX_ROWS = 1531
MAX_MULTIPLICATIONS = 2**33

_COUNTS = (1, 3, 7, 15, 16, 17, 19, 24, 31, 33, 63, 65, 100, 129, 257)
#: (rows, start): these rows of a large batch, computed on their own, must give the bits of the large one. The last go
#: over all of it, wherever threads part it.
BATCHES = (
    *((rows, start) for rows in _COUNTS for start in (0, 5)),
    *((253, start) for start in range(262, MAX_ROWS - 252, 253)),
)

#: Rows wider than this are whole cache lines in every published model; they are not tested for alignment.
MAX_ALIGNED_WIDTH = 1 << 16

#: Environment variables that make matrix libraries compute in another way.
_LIBRARIES = ("MKL_", "OMP_", "KMP_", "DNNL_", "ONEDNN_", "ATEN_", "OPENBLAS_", "LD_PRELOAD")
#: Tests of the parts that compute functions of single numbers, and of steps of recurrences.
_PARTS = ("steady", "gated_delta", "mamba2", "one_token", "chunks")
_STEP = "native/recur.c"
_NATIVE = (_STEP, "native/gemm.c", "native/gate.c", "native/products.h", "native/vectors.h")
_CODE = ("isolation.py", "lora/base_mm.py", "mixture/gate.py", *_NATIVE, *(f"parts/{name}.py" for name in _PARTS))

#: How many rows of a recurrence's step are tested; each has a state.
STEP_ROWS = 36


class Isolation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`mode` is "padded", "per-segment" or, on a GPU and untested, "packed-inexact"; `shapes` is the number of weight
    shapes tested, `reason` the first difference found."""

    mode: str
    shapes: int
    reason: str = ""

    def __str__(self) -> str:
        if self.mode == "packed-inexact":
            return "packed (on a GPU: equal up to rounding, not to the bit)"
        if self.mode == "padded":
            return f"packed (rows of {self.shapes} weight shapes do not depend on their neighbours)"
        return f"group by group, which is slower ({self.reason})"


def probe(decoder: Decoder, kept: Path | None = None) -> Isolation:
    """Set `decoder.isolation` by testing the decoder's shapes, or from an earlier finding in the folder `kept`; and
    whether kernels compute its recurrences."""
    _choose_kernels(decoder)
    found = choose(decoder) if kept is None or decoder.device.type != "cpu" else _kept(decoder, kept)
    decoder.isolation = found.mode
    return found


def _choose_kernels(decoder: Decoder) -> None:
    """Choose kernels for recurrences. They are tried with weights of their own, since those of a sharded base are not
    here."""
    layers = [module for module in decoder.modules() if isinstance(module, GatedDelta | Mamba2)]
    if not layers or not fla.serves(decoder.embed, layers[0].config.key_dim):
        return
    with torch.device(decoder.device):
        like = type(layers[0])(decoder.config, layers[0].layer, decoder.dtype)
    for weight in like.parameters():
        weight.data.normal_(std=0.3)
    works = fla.agrees(like, like.config.in_size, decoder.device)
    for layer in layers:
        layer.packs = works


def _kept(decoder: Decoder, folder: Path) -> Isolation:
    config, shapes = decoder.config, _shapes(decoder)
    weights = [(list(w.shape), str(w.dtype), packed(w) is not None) for w in shapes]
    compiled = library(Path(__file__).parent / _STEP) is not None
    return once(
        folder,
        f"{weights} {config.mlp_widths} {config.gate} {config.router} {config.num_experts} {config.output_gate} "
        f"{config.shared_gate} {config.recurrence} {compiled}",
        lambda: choose(decoder, shapes),
    )


def choose(decoder: Decoder, shapes: list[Tensor] | None = None) -> Isolation:
    """Test the decoder's shapes (`_shapes`, where they are not given). On a GPU every batch size may round in its own
    way, and group by group would be many times slower: there tenants are packed, equal up to rounding but not to the
    bit."""
    if decoder.device.type != "cpu":
        return Isolation("packed-inexact", 0)
    shapes = _shapes(decoder) if shapes is None else shapes
    with torch.no_grad():
        for difference in _differences(decoder, shapes):
            return Isolation("per-segment", len(shapes), difference)
    return Isolation("padded", len(shapes))


def _shapes(decoder: Decoder) -> list[Tensor]:
    """One weight [out, in] of every distinct shape; experts share theirs. A sharded one is gathered for it."""
    found: dict[tuple[int, ...], Tensor] = {}
    gathered = hasattr(decoder.embed, "full_tensor")  # a sharded decoder trains, and has no products in parts
    for weight in [decoder.embed, *decoder.products(), *(() if gathered else decoder.parts_of_products())]:
        if tuple(weight.shape[-2:]) not in found:
            whole = weight.full_tensor() if gathered else weight
            found[tuple(weight.shape[-2:])] = whole[0] if whole.ndim == 3 else whole
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
        if width <= MAX_ALIGNED_WIDTH and _depends_on_alignment(width, decoder.device):
            yield f"products of rows of {width} depend on where in memory they lie"
    config = decoder.config
    for width in config.mlp_widths:
        taken = len(config.gate.parts) * width
        at = _first_difference(partial(_activation, config.gate), taken, MAX_ROWS, decoder.device)
        if at is not None:
            yield f"silu over rows of {width} gives {at} rows other bits than {MAX_ROWS}"
    if config.num_experts and config.router.scores == "sigmoid":
        at = _first_difference(partial(sigmoid_of, lora=None), config.num_experts, MAX_ROWS, decoder.device)
        if at is not None:
            yield f"sigmoid over rows of {config.num_experts} gives {at} rows other bits than {MAX_ROWS}"
    for width in config.gate_widths:
        at = _first_difference(partial(sigmoid_of, lora=None), width, MAX_ROWS, decoder.device)
        if at is not None:
            yield f"a gate of {width} gives {at} rows other bits than {MAX_ROWS}"
    for step, width in _steps(decoder):
        at = _first_difference(step, width, STEP_ROWS, decoder.device)
        if at is not None:
            yield f"a step of a recurrence gives {at} rows other bits than {STEP_ROWS}"


def _steps(decoder: Decoder) -> Iterator[tuple[Callable[[Tensor], Tensor], int]]:
    """A step of the model's recurrence, if it has one, from one state for all; and the width of what it takes."""
    layer = next((layer.attn for layer in decoder.layers if isinstance(layer.attn, GatedDelta | Mamba2)), None)
    if layer is not None:
        width = layer.inputs.shape[0]
        x = torch.randn(9, width, generator=torch.Generator().manual_seed(0)).to(decoder.device)
        state = layer.run(x, None)[1]
        yield lambda x_RI: layer.step(x_RI, [state] * len(x_RI))[0], width


def _depends_on_alignment(width: int, device: torch.device) -> bool:
    """True if the products of an adapter with a group's rows depend on the alignment of those rows."""
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


def _activation(config: GateConfig, gate_up_PG: Tensor) -> Tensor:
    """The activation of an MLP, forward and backward."""
    hidden, dgate_up = activated(config, gate_up_PG), torch.empty_like(gate_up_PG)
    again(config, gate_up_PG).backward(torch.ones_like(hidden), dgate_up)
    up = gate_up_PG[:, -hidden.shape[1] :]
    return torch.cat((hidden, dgate_up, (hidden * up).sum(-1, keepdim=True)), dim=1)


def _first_difference(of: Callable[[Tensor], Tensor], width: int, rows: int, device: torch.device) -> int | None:
    """The size of the first batch in BATCHES whose rows differ from those of the large one; None if all agree."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).to(device)
    whole = of(x)
    for count, start in BATCHES:
        if start + count <= rows and not torch.equal(
            of(x[start : start + count].clone()), whole[start : start + count]
        ):
            return count
    return None


def once(folder: Path, weights: str, trial: Callable[[], Isolation]) -> Isolation:
    """The result of an earlier `trial` with the same `weights` on this machine, read from `folder`; if there is none,
    run the trial and keep its result there."""
    file = folder / f"{_circumstances(weights)}.json"
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=Isolation)
    found = trial()
    with suppress(OSError):  # a full disk only costs the next start a second
        folder.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as out:
            out.write(msgspec.json.encode(found))
        os.replace(written, file)  # atomic: another process may write the same file
    return found


def _circumstances(weights: str) -> str:
    code = [(Path(__file__).parent / name).read_text() for name in _CODE]
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_LIBRARIES))
    facts = [torch.__version__, torch.__config__.show(), str(torch.get_num_threads()), processor(), weights]
    return hashlib.sha256("\n".join([*code, *settings, *facts]).encode()).hexdigest()[:32]
