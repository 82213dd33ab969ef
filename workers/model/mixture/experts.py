"""A mixture of frozen experts that carries many adapters at once.

The (token, choice) pairs, ordered by group, are sorted by expert once and stably. So the rows of an expert are
contiguous, and inside them the rows of each (expert, group) pair. The base computes all rows, expert by expert;
adapters add their low-rank parts, all groups in one call per factor. Outer factors that experts share are applied once
per token: A of gate and up before the experts, B of down after the choices are summed; so only r-wide rows are permuted
for adapters.

The backward keeps the pre-activations of gate and up but not the experts' outputs: the gradient of a router weight is
<d out / d h, h> (SonicMoE, arXiv 2512.14080).

Invariant (isolation): adapters' products see the rows of one (expert, group) pair only, the base's rely on base_mm.

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, D hidden, F expert width, G = 2F (F if experts have no
gate), r rank, S = 2 or 1 factors on gate and up. u = scale * x A^T [P, >= S r], v = h A^T [P, >= r] float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.config import GateConfig
from workers.model.lora import products as lora_products
from workers.model.lora.base_mm import per_expert
from workers.model.lora.linear import own_rows
from workers.model.lora.products import Added, LoraProducts, products_of
from workers.model.lora.rows import LoraRows
from workers.model.mixture.choices import over_choices, spread, summed, weighted
from workers.model.mixture.gate import activated, again
from workers.model.native import joined
from workers.model.native.gemm import packed
from workers.model.routing import Routing

if TYPE_CHECKING:
    from workers.model.gpu.gate import Inside


class Names(NamedTuple):
    """The names of one MLP's adapter tensors. `each_...` are used by adapters whose experts do not share the outer
    factors. If there is no gate, `gate_up_a` is the A of up alone."""

    gate_up_a: str
    inner_b: tuple[str, ...]
    down_a: str
    down_b: str
    each_gate_up_a: str
    each_down_b: str

    @classmethod
    def at(cls, prefix: str, gate: GateConfig) -> Names:
        """The names that begin with `prefix`, for these parts (gate and up, or up alone)."""
        stacked, inner = "_".join(gate.parts), tuple(f"{prefix}{part}_B" for part in gate.parts)
        of_down = prefix + "down_A", prefix + "down_B"
        return cls(f"{prefix}{stacked}_A", inner, *of_down, f"{prefix}each_{stacked}_A", prefix + "each_down_B")


class Experts(NamedTuple):
    """The frozen experts of a layer; gate_up_EGD stacks gate over up. With `away`, the weights are those of this
    process's own experts, but `down_bias_ED` has the biases of all."""

    gate_up_EGD: Tensor
    down_EDF: Tensor
    gate: GateConfig = GateConfig()
    gate_up_bias_EG: Tensor | None = None
    down_bias_ED: Tensor | None = None
    away: Away | None = None


class Inner(Protocol):
    """The computation between the outer factors: from tokens x_TD in the weights' dtype and u = scale * x A^T per pair,
    to the experts' outputs y_PD in that dtype and v = h A^T of down. Pairs are in the order of the layer's routing."""

    def forward(self, x_TD: Tensor, u_P: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """y_PD, v_P, and the tensors that the backward needs besides its arguments."""

    def backward(
        self, dout_TD: Tensor, dv_P: Tensor | None, weights_P1: Tensor, kept: tuple[Tensor | None, ...], with_x: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """From dout_TD in the weights' dtype and dv, the gradient of weight * v: dx_PD in that dtype (None unless
        `with_x`), du_P, and dweights_P of the router. Adds to the gradients of the inner factors. `kept` are the
        tensors of the forward."""


class Away(Protocol):
    """A layer's experts if they are spread over the processes of a group (owned/)."""

    @property
    def num_experts(self) -> int: ...

    def inner(self, routing: Routing, rows: LoraRows | None) -> Inner: ...


def expert_block(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Experts, names: Names, rows: LoraRows | None
) -> Tensor:
    """sum_k weights[:, k] * down_e(activated(gate_e x, up_e x)) with e = experts[:, k], and all adapters; [T, D]
    float32. `activated` is that of `gate.py`. Differentiable in x and weights; gradients of adapters are added to
    `rows.grads`."""
    if rows is not None and rows.apart:
        own = zip(*(own_rows(t, rows) for t in (x_TD, weights_TK, experts_TK)), rows.singles, strict=True)
        return torch.cat([expert_block(x, w, e, experts, names, single) for x, w, e, single in own])
    if (out_TD := _in_one_call(x_TD, weights_TK, experts_TK, experts, names, rows)) is not None:
        return out_TD
    gate_up_EGD, away = experts.gate_up_EGD, experts.away
    routing = Routing(experts_TK, away.num_experts if away is not None else gate_up_EGD.shape[0])
    adapters = _Adapters.of(rows, routing, names, gate_up_EGD)
    paired = adapters.paired if adapters is not None else None
    inner = Sorted(routing, experts, names, paired) if away is None else away.inner(routing, rows)
    plan = _Plan(routing, experts, names, adapters, inner)
    trigger = rows.trigger(rows.groups(names.down_a)) if rows is not None and adapters is not None else None
    if torch.is_grad_enabled() and (trigger is not None or x_TD.requires_grad or weights_TK.requires_grad):
        return cast(Tensor, _ExpertBlock.apply(x_TD, weights_TK, trigger, plan))  # type: ignore[no-untyped-call]
    return _forward(x_TD.contiguous(), weights_TK, plan)[0]


def _in_one_call(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Experts, names: Names, rows: LoraRows | None
) -> Tensor | None:
    """`expert_block` by the native kernels; None unless this is inference, the weights are packed, and the kernels
    support these experts."""
    gate_up, down = packed(experts.gate_up_EGD), packed(experts.down_EDF)
    biased = experts.gate_up_bias_EG is not None or experts.down_bias_ED is not None
    if not torch.is_inference_mode_enabled() or gate_up is None or down is None or experts.away is not None or biased:
        return None
    if not joined.takes(experts.gate) or (rows is not None and rows.groups(names.each_gate_up_a)):
        return None
    products = products_of(rows, names.down_a, experts.down_EDF)
    if not joined.takes_parts(products, ()):
        return None
    adapted = rows if products is not None else None
    gate_b, up_b = names.inner_b
    of_adapters = (names.gate_up_a, gate_b, up_b, names.down_a, names.down_b)
    return joined.mixture(x_TD, weights_TK, experts_TK, gate_up, down, of_adapters, adapted)


class _Adapters(NamedTuple):
    """The low-rank products of a layer. Per token: `shared`, for adapters whose experts share the outer factors. Per
    (expert, group) segment: `paired`, for all adapters, and `each`, for those whose experts do not share. `scale_T1`:
    the scale of each token's adapter."""

    shared: LoraProducts | None
    paired: LoraProducts
    each: LoraProducts | None
    scale_T1: Tensor

    @classmethod
    def of(cls, rows: LoraRows | None, routing: Routing, names: Names, weight: Tensor) -> _Adapters | None:
        every, shared = products_of(rows, names.down_a, weight), products_of(rows, names.gate_up_a, weight)
        if rows is None or every is None:
            return None
        each = products_of(rows, names.each_gate_up_a, weight)
        scale_T1 = rows.scale_of_row(routing.experts.device)[:, None]
        return cls(shared, every.experts(routing, rows), each.experts(routing, rows) if each else None, scale_T1)


class _Plan(NamedTuple):
    """The constants of one call of `expert_block`, for its forward and its backward."""

    routing: Routing
    experts: Experts
    names: Names
    adapters: _Adapters | None
    inner: Inner


class Sorted(NamedTuple):
    """`Inner` on the process that has the experts: pairs sorted by expert, and `paired`, the products of their
    adapters' inner factors."""

    routing: Routing
    experts: Experts
    names: Names
    paired: LoraProducts | None

    def forward(self, x_TD: Tensor, u_P: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        experts, names = self.experts, self.names
        gate_up_PG = self._base(spread(x_TD, self.routing), experts.gate_up_EGD)
        if (fused := self._fused(gate_up_PG, u_P)) is not None:
            return *self._down(fused.activate()), (gate_up_PG, u_P)
        gate_up_PG = gate_up_PG.to(torch.float32)
        if experts.gate_up_bias_EG is not None:
            gate_up_PG = gate_up_PG + experts.gate_up_bias_EG[self.routing.experts]
        if self.paired is not None and u_P is not None:
            f = experts.down_EDF.shape[2]
            self.paired.add(gate_up_PG, None, u_P, "", [(name, f) for name in names.inner_b], scaled=False)
        return *self._down(activated(experts.gate, gate_up_PG)), (gate_up_PG, u_P)

    def _down(self, h_PF: Tensor) -> tuple[Tensor, Tensor | None]:
        """y_PD and v_P."""
        y_PD, v_P = self._base(h_PF, self.experts.down_EDF), None
        if self.paired is not None:
            v_P = self.paired.room(h_PF)
            self.paired.shrink(h_PF, v_P, self.names.down_a, scaled=False)
        return y_PD, v_P

    def _fused(self, gate_up_PG: Tensor, u_P: Tensor | None) -> Inside | None:
        """The kernels for everything between the experts' two products (gpu/gate.py); None unless on a device with the
        plain gate and no biases."""
        experts, plain = self.experts, self.experts.gate.gated and self.experts.gate.limit is None
        if not lora_products.on_device(gate_up_PG) or not plain or experts.gate_up_bias_EG is not None:
            return None
        from workers.model.gpu.gate import Inside  # Triton: only a GPU needs it

        return Inside.of(gate_up_PG, u_P, self.paired, self.names.inner_b, self.names.down_a)

    def backward(
        self, dout_TD: Tensor, dv_P: Tensor | None, weights_P1: Tensor, kept: tuple[Tensor | None, ...], with_x: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        gate_up_PG, u_P = kept
        assert gate_up_PG is not None
        experts, names, paired = self.experts, self.names, self.paired
        dout_PD = spread(dout_TD, self.routing)
        dh_PF = self._base(dout_PD, experts.down_EDF, transposed=True)  # before the router weight
        if (fused := self._fused(gate_up_PG, u_P)) is not None:
            h_PF, dgate_up_PG, dweights_P = fused.backward(dh_PF, dv_P, weights_P1.squeeze(1))
            if paired is not None and dv_P is not None and h_PF is not None:
                paired.outer(dv_P * weights_P1, h_PF, names.down_a, scaled=False)
            return *self._gate_up_backward(dgate_up_PG, u_P, with_x), dweights_P
        gated, dh_PF = again(experts.gate, gate_up_PG), dh_PF.to(torch.float32)
        if paired is not None and dv_P is not None:
            paired.expand(dh_PF, dv_P, names.down_a, scaled=False)
            paired.outer(dv_P * weights_P1, gated.h, names.down_a, scaled=False)
        dweights_P = (dh_PF * gated.h).sum(-1)
        dh_PF *= weights_P1
        dgate_up_PG = torch.empty_like(gate_up_PG)
        gated.backward(dh_PF, dgate_up_PG)
        return *self._gate_up_backward(dgate_up_PG, u_P, with_x), dweights_P

    def _gate_up_backward(
        self, dgate_up_PG: Tensor, u_P: Tensor | None, with_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx_PD and du_P."""
        names, paired = self.names, self.paired
        dx_PD = self._base(dgate_up_PG, self.experts.gate_up_EGD, transposed=True) if with_x else None
        if paired is None or u_P is None:
            return dx_PD, None
        du_P = torch.zeros_like(u_P)
        for part, (name, dy_PF) in enumerate(
            zip(names.inner_b, dgate_up_PG.chunk(len(names.inner_b), dim=1), strict=True)
        ):
            paired.shrink(dy_PF, du_P, name, part=part, scaled=False)
            paired.outer(u_P, dy_PF, name, part=part, scaled=False)
        return dx_PD, du_P

    def _base(self, x_PI: Tensor, weight_EOI: Tensor, *, transposed: bool = False) -> Tensor:
        """Each pair times the frozen weight of its expert, in the weight's dtype."""
        return per_expert(x_PI, weight_EOI, self.routing.ends_E, transposed=transposed)


def _forward(
    x_TD: Tensor, weights_TK: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """The output, and what the backward needs: v = h A^T per pair [P, r]; scale * (weighted sum of v) per token [T, r];
    and the tensors that `Inner` keeps."""
    routing, adapters, names = plan.routing, plan.adapters, plan.names
    u_P = _gate_up_shrink(x_TD, adapters, plan) if adapters is not None else None
    y_PD, v_P, kept = plan.inner.forward(x_TD.to(plan.experts.gate_up_EGD.dtype), u_P)
    if plan.experts.down_bias_ED is not None:
        y_PD = y_PD.to(torch.float32) + plan.experts.down_bias_ED[routing.experts]
    if adapters is not None and adapters.each is not None and v_P is not None:
        y_PD = y_PD.to(torch.float32)
        adapters.each.expand(y_PD, v_P, names.each_down_b, scaled=True)
    combined_T = added = None
    if adapters is not None and adapters.shared is not None and v_P is not None:
        combined_T = over_choices(v_P, routing, weights_TK) * adapters.scale_T1
        added = Added(adapters.shared, combined_T, names.down_b)
    return weighted(y_PD, weights_TK, routing, added), v_P, combined_T, kept


def _gate_up_shrink(x_TD: Tensor, adapters: _Adapters, plan: _Plan) -> Tensor:
    """scale * x A^T of each pair, [P, Sr]."""
    stack = len(plan.names.inner_b)
    u_T = adapters.paired.room(x_TD, stack)
    if adapters.shared is not None:
        adapters.shared.shrink(x_TD, u_T, plan.names.gate_up_a, stack=stack, scaled=True)
    u_P = spread(u_T, plan.routing)
    if adapters.each is not None:
        adapters.each.shrink(spread(x_TD, plan.routing), u_P, plan.names.each_gate_up_a, stack=stack, scaled=True)
    return u_P


class _ExpertBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, trigger: Tensor | None, plan: _Plan) -> Tensor:
        x_TD = x_TD.contiguous()
        out_TD, v_P, combined_T, kept = _forward(x_TD, weights_TK, plan)
        ctx.save_for_backward(x_TD, weights_TK, v_P, combined_T, *kept)
        ctx.plan = plan
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, v_P, combined_T, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        routing, experts, adapters = plan.routing, plan.experts, plan.adapters
        dout_TD = dout_TD.contiguous()
        if lora_products.on_device(dout_TD):
            dout_TD = dout_TD.to(experts.down_EDF.dtype)  # once, for the products of base and adapters
        weights_P1 = weights_TK.reshape(-1)[routing.order][:, None]
        dv_P = None
        if adapters is not None:
            dv_P = _down_backward(dout_TD, weights_P1, (v_P, combined_T), plan, adapters)
        dx_PD, du_P, dweights_P = plan.inner.backward(
            dout_TD.to(experts.down_EDF.dtype), dv_P, weights_P1, tuple(kept), ctx.needs_input_grad[0]
        )
        if experts.down_bias_ED is not None:
            dweights_P += (spread(dout_TD, routing) * experts.down_bias_ED[routing.experts]).sum(-1)
        dweights_TK = dweights_P[routing.inverse].view_as(weights_TK)
        if adapters is not None and adapters.each is not None and du_P is not None:
            dx_PD = dx_PD.to(torch.float32) if dx_PD is not None else None
            _each_backward(dx_PD, du_P, x_TD, plan, adapters.each)
        added = None
        if adapters is not None and adapters.shared is not None and du_P is not None:
            added = _shared_backward(du_P, x_TD, plan, adapters.shared, adapters.scale_T1)
        dx_TD = summed(dx_PD, routing, added, x_TD.dtype) if dx_PD is not None else None
        return dx_TD, dweights_TK, None, None


def _down_backward(
    dout_TD: Tensor, weights_P1: Tensor, shrunk: tuple[Tensor, Tensor | None], plan: _Plan, adapters: _Adapters
) -> Tensor:
    """The gradient of weight * v, [P, r]. Adds to the gradients of the outer factors of down. `shrunk`: v and the
    combined v of the forward."""
    names, (v_P, combined_T) = plan.names, shrunk
    dv_T = dout_TD.new_zeros(len(dout_TD), v_P.shape[1], dtype=torch.float32)
    if adapters.shared is not None and combined_T is not None:
        adapters.shared.shrink(dout_TD, dv_T, names.down_b, scaled=True)
        adapters.shared.outer(combined_T, dout_TD, names.down_b, scaled=False)
    dv_P = spread(dv_T, plan.routing)
    if adapters.each is not None:
        dout_PD = spread(dout_TD, plan.routing)
        adapters.each.shrink(dout_PD, dv_P, names.each_down_b, scaled=True)
        adapters.each.outer(v_P * weights_P1, dout_PD, names.each_down_b, scaled=True)
    return dv_P


def _each_backward(dx_PD: Tensor | None, du_P: Tensor, x_TD: Tensor, plan: _Plan, each: LoraProducts) -> None:
    """Add to dx in place, and to the gradients of the A of gate and up that each expert has of its own."""
    name, stack = plan.names.each_gate_up_a, len(plan.names.inner_b)
    each.outer(du_P, spread(x_TD, plan.routing), name, stack=stack, scaled=True)
    if dx_PD is not None:
        each.expand(dx_PD, du_P, name, stack=stack, scaled=True)


def _shared_backward(du_P: Tensor, x_TD: Tensor, plan: _Plan, shared: LoraProducts, scale_T1: Tensor) -> Added:
    """Add to the gradients of the A of gate and up that experts share. Returns the rows to be added to dx."""
    du_T, stack = over_choices(du_P, plan.routing) * scale_T1, len(plan.names.inner_b)
    shared.outer(du_T, x_TD, plan.names.gate_up_a, stack=stack, scaled=False)
    return Added(shared, du_T, plan.names.gate_up_a, stack)
