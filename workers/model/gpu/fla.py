"""The recurrences of all packed sequences at once, by the kernels of flash-linear-attention (fla-core).

Optional (the extra `gpu`): torch computes sequence by sequence if fla-core is not installed, if `agrees` finds that its
kernels fail on this device or differ from torch, or if it has no gradients here (`refusal`; then samplers' recurrences
are torch's, too). `isolation.probe` decides, once per process. The kernels multiply float32 with 10 bits of mantissa,
as the adapters' kernels do beside a base of 16 bits, so they serve only such bases.

Invariant (isolation): a sequence's sums do not depend on its neighbours. A chunk belongs to one sequence and lies at a
multiple of its length from the sequence's start; the tuner chooses kernels by heads and widths, never by the number of
sequences; and the library's other backends, which cut long sequences by how many there are, are turned off.

Shapes: T packed tokens, R sequences, M channels of the convolution, J its taps, K key heads, H value heads, G groups of
heads, D key dim, V value dim.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.recur import Packed, Recurrence, run_each

log = logging.getLogger(__name__)

#: The widest keys that the kernels hold.
MAX_KEY_DIM = 256
#: Lengths of the sequences that `agrees` computes: shorter than the convolution, shorter than a chunk, several chunks.
TRIED = (2, 70, 33, 1)
#: The largest difference from torch, as a fraction of the largest entry: 10 bits of mantissa over a few hundred sums.
TOLERANCE = 0.02
#: Versions of Triton, from the first to before the second, that compile gradients of gated recurrences to wrong numbers
#: on Hopper, for which fla-core raises an error (its issue 640).
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))


class Kernels(NamedTuple):
    convolution: Callable[..., Any]
    delta_rule: Callable[..., Any]
    delta_step: Callable[..., Any]
    scan: Callable[..., Any]
    scan_step: Callable[..., Any]
    #: Why there are no gradients; empty if there are.
    refusal: str = ""


@cache
def kernels() -> Kernels | None:
    """The kernels of fla-core; None if fla-core is not installed."""
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError:
        return None
    return Kernels(
        causal_conv1d, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, chunk_simple_gla,
        fused_recurrent_simple_gla, _refusal_here(),
    )  # fmt: skip


def refusal(capability: tuple[int, int], triton: str) -> str:
    """Why fla-core has no gradients on a device of this compute capability with this version of Triton; empty if it
    has."""
    version = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if capability[0] == 9 and WRONG_ON_HOPPER[0] <= version < WRONG_ON_HOPPER[1]:
        return f"with Triton {triton} their gradients are wrong on this GPU; with 3.7.1 they are right"
    return ""


def _refusal_here() -> str:
    import triton

    return refusal(torch.cuda.get_device_capability(), triton.__version__) if torch.cuda.is_available() else ""


def serves(weight: Tensor, key_dim: int) -> bool:
    """True if fla-core may compute a recurrence with keys of this width in a layer with this frozen weight."""
    fits = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and key_dim <= MAX_KEY_DIM
    return fits and kernels() is not None


def convolved(
    x_TM: Tensor, weight_MJ: Tensor, bias_M: Tensor | None, packed: Packed, before_JM: Sequence[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """silu of the causal convolution [T, M], and the last J - 1 rows of each sequence, if `packed` asks for ends.
    `before_JM`: the rows before each sequence; None for zeros."""
    start_RMJ = None if before_JM is None else F.pad(torch.stack(list(before_JM)).mT, (1, 0))
    y_1TM, end_RMJ = _kernels().convolution(
        x_TM[None], weight_MJ, bias_M, initial_state=start_RMJ, output_final_state=packed.ends, activation="silu",
        **packed.bounds(x_TM.device),
    )  # fmt: skip
    return y_1TM[0], [] if end_RMJ is None else list(end_RMJ[..., 1:].mT.unbind())


def delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_THV: Tensor, decay_TH: Tensor, rate_TH: Tensor, packed: Packed,
    start_HDV: Sequence[Tensor] | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The gated delta rule (parts/gated_delta.py): out [T, H, V], and the state [H, D, V] after each sequence, if
    `packed` asks for ends. `decay_TH` are logarithms; `start_HDV`: the state before each sequence, None for zeros."""
    out_1THV, end_RHDV = _kernels().delta_rule(
        q_TKD[None], k_TKD[None], v_THV[None], g=decay_TH[None], beta=rate_TH[None], scale=1.0,
        initial_state=None if start_HDV is None else torch.stack(list(start_HDV)), output_final_state=packed.ends,
        chunk_size=packed.chunk, **packed.bounds(v_THV.device),
    )  # fmt: skip
    return out_1THV[0], [] if end_RHDV is None else list(end_RHDV.unbind())


def scan(
    x_THV: Tensor, b_TGD: Tensor, c_TGD: Tensor, decay_TH: Tensor, packed: Packed, start_HDV: Sequence[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """Mamba-2's recurrence (parts/mamba2.py) as linear attention with a decay: keys b, queries c, values x. Arguments
    and results as in `delta_rule`."""
    b_THD, c_THD = (_each_head(t, x_THV.shape[1]) for t in (b_TGD, c_TGD))
    out_1THV, end_RHDV = _kernels().scan(
        c_THD[None], b_THD[None], x_THV[None], g=decay_TH[None], scale=1.0,
        initial_state=None if start_HDV is None else torch.stack(list(start_HDV)), output_final_state=packed.ends,
        chunk_size=packed.chunk, **packed.bounds(x_THV.device),
    )  # fmt: skip
    return out_1THV[0], [] if end_RHDV is None else list(end_RHDV.unbind())


def one_token(
    q_RGD: Tensor, k_RGD: Tensor, v_RHV: Tensor, decay_RH: Tensor, rate_RH: Tensor | None, states_HDV: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """out [R, H, V] and the states after one token of each row (`parts.one_token`). `decay_RH` are factors, not
    logarithms; `rate_RH` None: Mamba-2's recurrence, not the delta rule."""
    states: dict[str, Any] = {"initial_state": torch.stack(list(states_HDV)), "output_final_state": True}
    if rate_RH is None:
        q_RGD, k_RGD = (_each_head(t, v_RHV.shape[1]) for t in (q_RGD, k_RGD))
        step = _kernels().scan_step
    else:
        step, states["beta"] = _kernels().delta_step, rate_RH[:, None]
    q, k, v, log_decay = (t[:, None] for t in (q_RGD, k_RGD, v_RHV, decay_RH.log()))
    out_R1HV, end_RHDV = step(q, k, v, g=log_decay, scale=1.0, **states)
    return out_R1HV[:, 0], list(end_RHDV.unbind())


def agrees(recurrence: Recurrence, width: int, device: torch.device) -> bool:
    """Whether the kernels run on this device and give what torch gives, to TOLERANCE: outputs, gradients, states and a
    single token. If not, logs a warning; the caller then leaves them out. `width` is that of the recurrence's input."""
    if why := _kernels().refusal:
        log.warning("kernels of fla-core are left out; torch computes recurrences (%s)", why)
        return False
    generator = torch.Generator().manual_seed(0)
    x_TI, more_RI = (torch.randn(n, width, generator=generator).to(device) for n in (sum(TRIED), len(TRIED)))
    try:
        found = _tried(recurrence, x_TI, more_RI, packs=True)
        wanted = _tried(recurrence, x_TI, more_RI, packs=False)
        each = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True)]
        off = float(torch.stack(each).max())  # nan if any is nan
    except Exception as error:  # whatever a compiler may raise
        log.warning("kernels of fla-core do not run here; torch computes recurrences (%s)", error)
        return False
    if not off <= TOLERANCE:
        log.warning("kernels of fla-core are off by %.1e here; torch computes recurrences", off)
    return off <= TOLERANCE


@torch.enable_grad()
def _tried(recurrence: Recurrence, x_TI: Tensor, more_RI: Tensor, *, packs: bool) -> list[Tensor]:
    recurrence.packs, x_TI = packs, x_TI.clone().requires_grad_()
    y_TO = run_each(recurrence, x_TI, TRIED)
    (gradient,) = torch.autograd.grad(y_TO.square().sum(), x_TI)
    with torch.no_grad():
        if packs:
            _, states = recurrence.run_packed(x_TI, Packed(TRIED, chunk=32, ends=True), None)
        else:
            states = [recurrence.run(x_NI, None)[1] for x_NI in x_TI.split_with_sizes(list(TRIED))]
        z_RO, after = recurrence.step(more_RI, states)
    return [y_TO.detach(), gradient, z_RO, *(part for state in (*states, *after) for part in state)]


def _kernels() -> Kernels:
    found = kernels()
    assert found is not None, "asked for only where `serves`"
    return found


def _each_head(x_TGD: Tensor, heads: int) -> Tensor:
    return x_TGD.repeat_interleave(heads // x_TGD.shape[1], 1)
