"""The LoRA products of vLLM's torch back end, one product per adapter in the batch.

The stock ones take adapter index -1 ("none") for Python's last element, so that with all slots full requests without an
adapter get that of another; and they copy a matrix per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def install() -> None:
    import torch
    import torch.nn.functional as F
    import vllm.lora.ops.torch_ops.lora_ops as lora_ops
    import vllm.lora.punica_wrapper.punica_cpu as punica_cpu

    def groups(slots: Any, count: int) -> Iterator[tuple[int, Any]]:
        """The (adapter slot, its rows) pairs of a batch of `count` rows."""
        slots = slots[:count]
        for slot in torch.unique(slots).tolist():
            if slot >= 0:
                yield slot, (slots == slot).nonzero(as_tuple=True)[0]

    def weight(stacked: Any, slot: int) -> Any:
        one = stacked[slot]
        return one.squeeze(0) if one.dim() == 3 else one

    def bgmv_shrink(x: Any, stacked: Any, out: Any, slots: Any, scaling: float = 1.0) -> None:
        rank = stacked.shape[-2]
        out[:, :rank] = 0
        for slot, rows in groups(slots, x.shape[0]):
            out[rows, :rank] = scaling * F.linear(x[rows].to(out.dtype), weight(stacked, slot).to(out.dtype))

    def bgmv_expand(x: Any, stacked: Any, out: Any, slots: Any, add_inputs: bool = True) -> None:
        columns = min(stacked.shape[-2], out.shape[1])
        if not add_inputs:
            out[:, :columns] = 0
        for slot, rows in groups(slots, x.shape[0]):
            product = F.linear(x[rows].to(out.dtype), weight(stacked, slot).to(out.dtype))
            out[rows, :columns] += product[:, :columns]

    def bgmv_expand_slice(
        x: Any, stacked: Any, out: Any, slots: Any, offset: int, size: int, add_inputs: bool = True
    ) -> None:
        if not add_inputs:
            out[:, offset : offset + size].zero_()
        for slot, rows in groups(slots, x.shape[0]):
            product = F.linear(x[rows].to(out.dtype), weight(stacked, slot).to(out.dtype))
            out[rows, offset : offset + size] += product

    def of_tokens(slots: Any, lengths: Any) -> Any:
        return torch.repeat_interleave(slots, lengths)

    def sgmv_shrink(
        x: Any, stacked: Any, out: Any, starts: Any, lengths: Any, slots: Any, batches: int, longest: int, tokens: int,
        scaling: float,
    ) -> None:  # fmt: skip
        bgmv_shrink(x, stacked, out, of_tokens(slots, lengths), scaling)

    def sgmv_expand(
        x: Any, stacked: Any, out: Any, starts: Any, lengths: Any, slots: Any, batches: int, longest: int, tokens: int,
        add_inputs: bool = False,
    ) -> None:  # fmt: skip
        bgmv_expand(x, stacked, out, of_tokens(slots, lengths), add_inputs)

    def sgmv_expand_slice(
        x: Any, stacked: Any, out: Any, starts: Any, lengths: Any, slots: Any, batches: int, longest: int, tokens: int,
        offset: int, size: int, add_inputs: bool = False,
    ) -> None:  # fmt: skip
        bgmv_expand_slice(x, stacked, out, of_tokens(slots, lengths), offset, size, add_inputs)

    for op in (bgmv_shrink, bgmv_expand, bgmv_expand_slice, sgmv_shrink, sgmv_expand, sgmv_expand_slice):
        for module in (lora_ops, punica_cpu):
            setattr(module, op.__name__, op)
