"""Device and dtype of a worker."""

from __future__ import annotations

import pytest
import torch

from workers.model.device import DeviceError, ModelDevice, choose_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu() -> None:
    assert choose_device() == ModelDevice(CPU, torch.float32)
    assert choose_device("cpu", "bfloat16") == ModelDevice(CPU, torch.bfloat16)
    with pytest.raises(DeviceError, match=r"'cuda' was asked for.* finds 0 CUDA devices"):
        choose_device("cuda")


@pytest.mark.usefixtures("one_gpu")
def test_with_a_gpu() -> None:
    assert choose_device() == ModelDevice(GPU, torch.bfloat16)
    assert choose_device("cuda:0", "float32") == ModelDevice(GPU, torch.float32)
    assert choose_device("cpu") == ModelDevice(CPU, torch.float32)
    with pytest.raises(DeviceError, match="finds 1 CUDA devices"):
        choose_device("cuda:1")


def test_other_words_are_refused() -> None:
    with pytest.raises(DeviceError, match="auto, cpu, cuda or cuda:N"):
        choose_device("meta")
    with pytest.raises(DeviceError, match="float32 or bfloat16"):
        choose_device("cpu", "float16")
