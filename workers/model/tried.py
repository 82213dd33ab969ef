"""What `isolation` has found, kept: the trial takes a second, and a worker that is restarted has none to lose.

A finding holds for the same code, libraries, processor, threads and weight shapes, and for nothing else; a file that
does not read as one is as good as none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from workers.model.native.build import processor

#: Variables that make matrix libraries compute in another way.
_LIBRARIES = ("MKL_", "OMP_", "KMP_", "DNNL_", "ONEDNN_", "ATEN_", "OPENBLAS_", "LD_PRELOAD")
_CODE = ("isolation.py", "base_mm.py")


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: str
    shapes: int
    reason: str


def once(folder: Path, weights: str, trial: Callable[[], Finding]) -> Finding:
    """The finding of an earlier `trial` of such `weights` on this machine; else that of `trial`, which is kept in
    `folder`."""
    file = folder / f"{_circumstances(weights)}.json"
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=Finding)
    found = trial()
    with suppress(OSError):  # a disk that is full costs the next start a second
        folder.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as out:
            out.write(msgspec.json.encode(found))
        os.replace(written, file)  # whole or not there, whoever else tries at the same time
    return found


def _circumstances(weights: str) -> str:
    code = [Path(__file__).with_name(name).read_text() for name in _CODE]
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_LIBRARIES))
    facts = [torch.__version__, torch.__config__.show(), str(torch.get_num_threads()), processor(), weights]
    return hashlib.sha256("\n".join([*code, *settings, *facts]).encode()).hexdigest()[:32]
