"""One base per host: a decoder whose frozen weights lie in one place for trainer and generators.

On a CPU that is a file that all map (`files.py`), for reading only: nobody can change another's weights. On a GPU it
is the memory of a process that does nothing else (`holder.py`). Who comes first has the checkpoint loaded, in the
form that is computed with: dequantised, in its dtype, query beside key beside value; a worker that starts again reads
nothing of it but its headers. The tensors are those that a decoder of its own would have, bit for bit and aligned
alike. The ranks of a trainer on a CPU map the file too (`Mapped`).
"""

from __future__ import annotations

import logging
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.model.base.files import CannotShare, hold, remove_unused
from workers.model.base.flat import decoder_over, layout_of, name_of
from workers.model.base.holder import MEMORY, MEMORY_WITHIN_S, Load, held
from workers.model.base.weights import copy_weights, load_decoder
from workers.model.card import weight_files
from workers.model.decoder import Decoder
from workers.model.device import ModelDevice
from workers.model.families.read import read_config

log = logging.getLogger("base")

#: The advice to an operator whose workers do not share weights.
COPIES = 'the plan of memory has one copy of them: with base_dir = "" it has one for each worker'


@dataclass(frozen=True)
class Mapped:
    """A decoder over the file that all ranks on this host map. Each rank is counted an equal share of its memory, as it
    would have with a sharded base (`sharded.py`), and nothing has to be gathered."""

    decoder: Decoder

    def finish(self, trains: bool) -> None:
        """End a step. No rank needs another for it."""


def base_decoder(path: Path, where: ModelDevice, folder: Path | None) -> tuple[Decoder, str]:
    """The decoder of a model folder, over the weights that are shared by way of `folder` if they can be; and, for the
    log, how it came to them. Raises as `load_decoder` does."""
    if folder is None:
        return load_decoder(path, where.dtype, where.device), "loaded, a copy of its own"
    try:
        return (_held if where.device.type in MEMORY else mapped)(path, where, folder)
    # of a file system without locks; an error of the checkpoint is raised again below
    except (CannotShare, OSError) as error:
        # logged before loading a copy that may not fit
        log.warning("%s: weights are not shared: %s; %s", path.name, error, COPIES)
        remove_unused(folder, within_s=MEMORY_WITHIN_S)  # a holder that nobody else uses: its memory is needed now
        return load_decoder(path, where.dtype, where.device), f"loaded, a copy of its own: {error}"


def mapped(path: Path, where: ModelDevice, folder: Path) -> tuple[Decoder, str]:
    """`base_decoder` on a CPU, where there is no copy of its own. Raises CannotShare and OSError, too."""
    config, files = read_config(path.name, path), weight_files(path.name, path)
    layout = layout_of(config, where.dtype, where.device)

    def fill(descriptor: int) -> None:
        whole = _mapping(descriptor, layout.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        copy_weights(decoder_over(config, where.dtype, whole), files)

    name = name_of(layout, [path / "config.json", *files])
    remove_unused(folder, but=name)
    descriptor, filled = hold(folder, name, layout.size_bytes, fill)
    how = "loaded, for all workers of this host" if filled else "mapped, as another worker has loaded it"
    return decoder_over(config, where.dtype, _mapping(descriptor, layout.size_bytes, mmap.PROT_READ)), how


def _mapping(descriptor: int, size_bytes: int, access: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, access), dtype=torch.uint8)


def _held(path: Path, where: ModelDevice, folder: Path) -> tuple[Decoder, str]:
    load = Load.of(path, where, MEMORY[where.device.type])
    remove_unused(folder, but=load.name)
    whole, how = held(folder, load)
    return decoder_over(read_config(path.name, path), where.dtype, whole), how
