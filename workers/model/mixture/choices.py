"""Tokens spread to the experts that they chose, and the experts' outputs summed per token together with what adapters
add. On a device these are kernels (gpu/combine.py). experts.py calls them.

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, I columns, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.lora import products as lora_products
from workers.model.lora.products import Added
from workers.model.routing import Routing


def spread(x_TI: Tensor, routing: Routing) -> Tensor:
    """x of each pair's token: [T, I] to [P, I], sorted by expert."""
    if lora_products.on_device(x_TI):
        from workers.model.gpu import combine  # Triton: only a GPU needs it

        return combine.spread(x_TI, routing.token)
    return x_TI.index_select(0, routing.token)


def _per_token(x_PI: Tensor, routing: Routing) -> Tensor:
    """[P, I], sorted by expert, to [T, K, I]."""
    return x_PI.index_select(0, routing.inverse).view(-1, routing.choices, x_PI.shape[1])


def weighted(y_PD: Tensor, weights_TK: Tensor, routing: Routing, added: Added | None) -> Tensor:
    """The output of the mixture: sum_k weights[:, k] * y[:, k] + `added`, [T, D] float32."""
    if lora_products.on_device(y_PD):
        return over_choices(y_PD, routing, weights_TK, added)
    return _with(torch.bmm(weights_TK[:, None, :], _per_token(y_PD.to(torch.float32), routing)).squeeze(1), added)


def summed(dx_PD: Tensor, routing: Routing, added: Added | None, dtype: torch.dtype) -> Tensor:
    """The gradient of each token: the sum over its pairs, plus `added`, [T, D]; on a device in `dtype`, the tokens',
    else in float32."""
    if lora_products.on_device(dx_PD):
        return over_choices(dx_PD, routing, None, added, dtype)
    return _with(_per_token(dx_PD.to(torch.float32), routing).sum(1), added)


def _with(x_TD: Tensor, added: Added | None) -> Tensor:
    """x plus `added`, in place."""
    if added is not None:
        added.products.expand(x_TD, added.u_T, added.name, stack=added.stack, scaled=False)
    return x_TD


def over_choices(
    x_PI: Tensor,
    routing: Routing,
    weights_TK: Tensor | None = None,
    added: Added | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The (weighted) sum over K of x, [T, I], always in the order of choices; on a device in `dtype` and with `added`.
    torch's own sum on a CPU takes an order that depends on I, which follows from the largest rank in the batch if x are
    low-rank rows: a group's bits would depend on its neighbours."""
    if lora_products.on_device(x_PI):
        from workers.model.gpu import combine  # Triton: only a GPU needs it

        return combine.combined(x_PI, routing.inverse, routing.choices, weights_TK, added, dtype)
    x_TKI = _per_token(x_PI, routing)
    if weights_TK is not None:
        x_TKI = x_TKI * weights_TK[:, :, None]
    total_TI = x_TKI[:, 0]
    for choice in range(1, x_TKI.shape[1]):
        total_TI = total_TI + x_TKI[:, choice]
    return total_TI
