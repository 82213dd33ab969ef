"""The tensors of safetensors files by name, dequantised one at a time as they are read.

Three quantised forms are known, as published checkpoints have them:

- block FP8 (DeepSeek-V3, Qwen3-FP8): `X.weight` e4m3 (or e5m2) [out, in] beside `X.weight_scale_inv` [out / 128,
  in / 128]; a number is multiplied by the scale of its block.
- MXFP4 (gpt-oss): `X_blocks` [experts, out, in / 32, 16], bytes of two e2m1 numbers, the low half first, beside
  `X_scales` [experts, out, in / 32]; a number is multiplied by two to the power of its block's byte less 127. It comes
  out as [experts, in, out], as the same checkpoints have it unquantised.
- int4 in groups (Kimi-K2-Thinking; compressed-tensors' pack-quantized): `X.weight_packed` int32 [out, in / 8], eight
  numbers of four bits, the first one lowest, eight more than they are, beside `X.weight_scale` [out, in / 32] and
  `X.weight_shape`; a number is multiplied by the scale of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

#: Rows and columns of an FP8 block.
FP8_BLOCK = 128
#: How many neighbours in a row share a scale in int4.
INT4_GROUP = 32
#: Sizes of the numbers of MXFP4 (e2m1) by their lower three bits; the fourth is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INVERSE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_PACKED, _BESIDE_PACKED = "_packed", ("_scale", "_shape")
#: The zero of the exponents of MXFP4's scales.
_BIAS = 127


class Stored:
    """All tensors of these files. Raises ValueError naming a file that is no safetensors file, a tensor that occurs
    twice, or one whose parts do not belong together."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            try:
                self._open[file] = safe_open(str(file), framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
            for name in self._open[file].keys():  # noqa: SIM118  (not a dict)
                if name in self._files:
                    raise ValueError(f"{file}: tensor {name} is in {self._files[name].name} as well")
                self._files[name] = file

    def names(self) -> list[str]:
        """The tensors' names after dequantisation."""
        found = []
        for name in self._files:
            part_of_fp8 = name.endswith(_INVERSE) and name.removesuffix(_INVERSE) in self._files
            part_of_fp4 = name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in self._files
            part_of_int4 = name.endswith(_BESIDE_PACKED) and name[: -len("_scale")] + _PACKED in self._files
            if not part_of_fp8 and not part_of_fp4 and not part_of_int4:
                found.append(self._whole(name))
        return found

    def file(self, name: str) -> Path:
        return next(self._files[name + part] for part in ("", _PACKED, _BLOCKS) if name + part in self._files)

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised. Raises KeyError if the scales of a quantised tensor are missing."""
        with self._named(name):
            return self._read(name)

    def _read(self, name: str) -> Tensor:
        if name + _PACKED in self._files:
            return from_int4(*(self._tensor(name + part) for part in (_PACKED, *_BESIDE_PACKED)))
        if name not in self._files:
            return from_mxfp4(self._tensor(name + _BLOCKS), self._tensor(name + _SCALES))
        tensor = self._tensor(name)
        of_one_byte = tensor.is_floating_point() and tensor.itemsize == 1
        return from_fp8(tensor, self._tensor(name + _INVERSE)) if of_one_byte else tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape after dequantisation."""
        if name in self._files:
            return tuple(self._slice(name).get_shape())
        with self._named(name):
            if name + _PACKED in self._files:
                return tuple(self._tensor(name + "_shape").tolist())
            experts, out, groups, half = self._slice(name + _BLOCKS).get_shape()
            return experts, groups * half * 2, out

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """`read(name)[begin:end]`, reading no more than needed."""
        with self._named(name):
            return self._rows(name, begin, end)

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        if name + _PACKED in self._files:
            packed, scales = (self._slice(name + part)[begin:end] for part in (_PACKED, "_scale"))
            return from_int4(packed, scales, torch.tensor([len(packed), self.shape(name)[1]]))
        if name not in self._files:
            return from_mxfp4(self._slice(name + _BLOCKS)[begin:end], self._slice(name + _SCALES)[begin:end])
        whole = self._slice(name)
        if not whole.get_dtype().startswith("F8_"):
            rows: Tensor = whole[begin:end]
            return rows
        first = begin // FP8_BLOCK * FP8_BLOCK
        scales = self._slice(name + _INVERSE)[first // FP8_BLOCK : -(-end // FP8_BLOCK)]
        return from_fp8(whole[first:end], scales)[begin - first :]

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{self.file(name)}: tensor {name} cannot be read: {error}") from None

    def _slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self._files[name]].get_tensor(name)
        return tensor

    def _whole(self, name: str) -> str:
        if name.endswith(_PACKED):
            return name.removesuffix(_PACKED)
        base = name.removesuffix(_BLOCKS)
        return base if name.endswith(_BLOCKS) and base + _SCALES in self._files else name


def from_fp8(weight_OI: Tensor, scales: Tensor) -> Tensor:
    """A bfloat16 weight, from FP8 blocks with a scale each; blocks at the edges may be smaller."""
    _check(scales, [-(-size // FP8_BLOCK) for size in weight_OI.shape])
    each_OI = scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (weight_OI.float() * each_OI[: weight_OI.shape[0], : weight_OI.shape[1]]).to(torch.bfloat16)


def from_int4(packed_OP: Tensor, scales_OG: Tensor, shape: Tensor) -> Tensor:
    """A bfloat16 weight [O, I] of this shape; the last group of a row may be smaller."""
    rows, columns = shape.tolist()
    _check(packed_OP, [rows, -(-columns // 8)])
    _check(scales_OG, [rows, -(-columns // INT4_GROUP)])
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    numbers_OI = (packed_OP[..., None] >> shifts & 15).flatten(1)[:, :columns] - 8
    each_OI = scales_OG.float().repeat_interleave(INT4_GROUP, 1)[:rows, :columns]
    return (numbers_OI * each_OI).to(torch.bfloat16)


def from_mxfp4(blocks_EOGB: Tensor, scales_EOG: Tensor) -> Tensor:
    """A bfloat16 weight [E, I, O]. Computed expert by expert, because the intermediate values are four times as
    large."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    experts, out, groups, half = blocks_EOGB.shape
    _check(scales_EOG, [experts, out, groups])
    found_EOI = torch.empty(experts, out, groups * half * 2, dtype=torch.bfloat16)
    for expert, (blocks_OGB, scales_OG) in enumerate(zip(blocks_EOGB, scales_EOG, strict=True)):
        halves_OGB2 = torch.stack((blocks_OGB & 15, blocks_OGB >> 4), dim=-1)
        numbers_OGN = values[halves_OGB2.flatten(2).int()]
        found_EOI[expert] = torch.ldexp(numbers_OGN, (scales_OG.int() - _BIAS)[..., None]).flatten(1)
    return found_EOI.transpose(1, 2)


def _check(part: Tensor, wanted: list[int]) -> None:
    if list(part.shape) != wanted:
        raise ValueError(f"a part of it is {list(part.shape)}, and must be {wanted}")
