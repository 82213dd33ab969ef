"""All weights of a decoder in one piece of memory, so that it can be shared as one thing: where each lies, a decoder
over them, and the name of their bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.parts.frozen import weights_from

#: In bytes, as for torch's own tensors. Kernels are chosen by alignment, so it affects bits.
ALIGNMENT = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True)
class Layout:
    """`places`: start, dtype and shape of each weight, in the order in which a decoder asks for them."""

    size_bytes: int
    places: tuple[str, ...]


def layout_of(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Layout:
    places: list[str] = []
    start = 0

    def add(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        nonlocal start
        places.append(f"{start} {dtype} {shape}")
        start += _room(dtype, shape, device)
        return torch.empty((), dtype=dtype).expand(shape)  # takes no memory; meta tensors would import half of torch

    with weights_from(add):
        Decoder(config, dtype, "cpu")
    return Layout(start, tuple(places))


def decoder_over(config: DecoderConfig, dtype: torch.dtype, whole: Tensor) -> Decoder:
    """A decoder whose weights are parts of `whole`, the bytes of its layout."""
    start = 0

    def take(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        nonlocal start
        raw = whole[start : start + math.prod(shape) * dtype.itemsize]
        start += _room(dtype, shape, whole.device)
        return raw.view(dtype).view(shape)

    with weights_from(take):
        return Decoder(config, dtype, whole.device)


def _room(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> int:
    alignment = ALIGNMENT[device.type]
    return -(-math.prod(shape) * dtype.itemsize // alignment) * alignment


def name_of(layout: Layout, files: Sequence[Path], where: str = "") -> str:
    """A name for the bytes, from everything that determines them: the checkpoint (by the file system's facts about its
    files), layout and dtype; the code, since another version may run beside; and the boot, since a file that was being
    written when the machine stopped is worthless. `where` tells copies in different places apart."""
    found = [file.stat() for file in files]
    stored = [(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for at in found]
    code = [source.read_bytes() for source in sorted(Path(__file__).parents[1].rglob("*.py"))]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    digest = hashlib.sha256(repr((boot, stored, layout.places, torch.__version__, where)).encode())
    for source in code:
        digest.update(source)
    return digest.hexdigest()[:32]
