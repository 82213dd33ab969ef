"""The device and dtype of a worker's model, from the operator's arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DeviceError(ValueError):
    """The machine does not have what was asked for; the message says what it has."""


class ModelDevice(NamedTuple):
    """`dtype` is that of the frozen weights; adapters, gradients and optimizer state are always float32."""

    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.device}, weights in {str(self.dtype).removeprefix('torch.')}"


def choose_device(device: str = "auto", dtype: str = "auto") -> ModelDevice:
    """`device` is "auto" (a GPU when there is one), "cpu", "cuda" or "cuda:N"; `dtype` is "auto" (bfloat16 on a GPU,
    float32 on a CPU), "float32" or "bfloat16"."""
    cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if cuda else 0
        if (chosen.index or 0) >= count:
            raise DeviceError(f"device {device!r} was asked for; torch {torch.__version__} finds {count} CUDA devices")
        chosen = torch.device("cuda", chosen.index or 0)
    elif chosen.type != "cpu":
        raise DeviceError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if dtype == "auto":
        dtype = "float32" if chosen.type == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise DeviceError(f"dtype must be auto, {' or '.join(DTYPES)}, got {dtype!r}")
    return ModelDevice(chosen, DTYPES[dtype])


def device_of(device: str, dtype: str) -> ModelDevice:
    """`choose_device`, made the current device, which is where Triton launches. Exits with one line when the machine
    does not have it."""
    try:
        where = choose_device(device, dtype)
        if where.device.type == "cuda":
            torch.cuda.set_device(where.device)
    except (DeviceError, RuntimeError) as error:
        raise SystemExit(str(error)) from error
    return where


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor, copied to the device. Nobody waits for the copy: it is made from pinned memory that is not reused
    before."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
