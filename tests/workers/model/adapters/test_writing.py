"""A full disk, for real: a limit of the process ends how far files may grow."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyrage
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from workers.model.adapters.encryption import encrypt_folder
from workers.model.adapters.writing import writing


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def torch_file(folder: Path) -> None:
    with writing():
        safetensors.torch.save_file({"a": torch.zeros(10_000)}, folder / "a")


def numpy_file(folder: Path) -> None:
    with writing():
        safetensors.numpy.save_file({"a": np.zeros(10_000)}, folder / "a")


def encrypted(folder: Path) -> None:
    encrypt_folder(folder, [pyrage.x25519.Identity.generate().to_public()])


@pytest.mark.parametrize("size_bytes", [1000, 10_000, 1_000_000])
@pytest.mark.parametrize("write", [torch_file, numpy_file, encrypted])
def test_a_full_disk_is_an_error_of_the_disk_not_of_the_library(
    write: Callable[[Path], None], tmp_path: Path, size_bytes: int
) -> None:
    """Also if only the end of a file does not fit."""
    (tmp_path / "plain").write_bytes(bytes(size_bytes))
    with files_of_at_most(min(size_bytes, 5000)), pytest.raises(OSError, match="File too large") as caught:
        write(tmp_path)
    assert caught.value.errno == errno.EFBIG
    write(tmp_path)


def test_another_error_of_a_library_stays_what_it_is() -> None:
    with pytest.raises(SafetensorError, match="no such dtype"), writing():
        raise SafetensorError("no such dtype")
