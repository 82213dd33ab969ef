"""One base per host: a decoder whose frozen weights lie in one mapping for trainer and generators.

Who comes first loads the checkpoint into the file (`base_files.py`), in the form that is computed with: dequantised, in
its dtype, query beside key beside value. Everybody, the loader too, then maps it for reading only: nobody can change
another's weights, and a worker that starts again reads nothing of the checkpoint but its headers. The tensors are those
that a decoder of its own would have, bit for bit and aligned alike.

On a CUDA device each worker holds a copy of its own.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.model.base.files import CannotShare, hold, remove_unused
from workers.model.base.weights import copy_weights, load_decoder
from workers.model.card import weight_files
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.device import ModelDevice
from workers.model.families.read import read_config
from workers.model.parts.frozen import weights_from

#: In bytes: where torch's own tensors start.
ALIGNMENT = 64


def base_decoder(path: Path, where: ModelDevice, folder: Path | None) -> tuple[Decoder, str]:
    """The decoder of a model folder, over the weights in `folder` if there is one that can hold them; and, for the log,
    how it came to them. Raises as `load_decoder` does."""
    if folder is None or where.device.type != "cpu":
        return load_decoder(path, where.dtype, where.device), "loaded, a copy of its own"
    config, files = read_config(path.name, path), weight_files(path.name, path)
    layout = _Layout()
    with weights_from(layout.add):
        Decoder(config, where.dtype, "cpu")

    def fill(descriptor: int) -> None:
        copy_weights(
            _mapped(config, where.dtype, descriptor, layout.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE), files
        )

    name = _name(layout, [path / "config.json", *files])
    remove_unused(folder, but=name)
    try:
        descriptor, filled = hold(folder, name, layout.size_bytes, fill)
    except (CannotShare, OSError) as error:  # of a file system without locks; of the checkpoint, then raised again
        return load_decoder(path, where.dtype, where.device), f"loaded, a copy of its own: {error}"
    how = "loaded, for all workers of this host" if filled else "mapped, as another worker has loaded it"
    return _mapped(config, where.dtype, descriptor, layout.size_bytes, mmap.PROT_READ), how


class _Layout:
    """Where each weight lies, in the order in which a decoder asks for them."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.places: list[str] = []

    def add(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        self.places.append(f"{self.size_bytes} {dtype} {shape}")
        self.size_bytes += _room(dtype, shape)
        return torch.empty((), dtype=dtype).expand(shape)  # no memory; meta tensors would import half of torch


def _room(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _mapped(config: DecoderConfig, dtype: torch.dtype, descriptor: int, size_bytes: int, access: int) -> Decoder:
    """A decoder over the file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        whole = torch.frombuffer(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, access), dtype=torch.uint8)
    start = 0

    def take(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        nonlocal start
        raw = whole[start : start + math.prod(shape) * dtype.itemsize]
        start += _room(dtype, shape)
        return raw.view(dtype).view(shape)

    with weights_from(take):
        return Decoder(config, dtype, "cpu")


def _name(layout: _Layout, files: Sequence[Path]) -> str:
    """Of all that decides the bytes: the checkpoint, by what the file system says of its files; layout and dtype; and
    the code, for a server of another version may run beside. The boot, because a file on a disk that was being written
    when the machine stopped is worth nothing."""
    found = [file.stat() for file in files]
    stored = [(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for at in found]
    code = [source.read_bytes() for source in sorted(Path(__file__).parents[1].rglob("*.py"))]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    digest = hashlib.sha256(repr((boot, stored, layout.places, torch.__version__)).encode())
    for source in code:
        digest.update(source)
    return digest.hexdigest()[:32]
