"""Which constants bench/gpu_tiles.py tries and keeps; the kernels themselves need a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.workers.model.gpu_kit  # noqa: F401  (before the kernels)
from bench import gpu_tiles


def test_constants_exist_and_their_present_values_are_tried() -> None:
    for choice in (*gpu_tiles.trained(), *gpu_tiles.decoded()):
        assert getattr(choice.module, choice.constant) in choice.values


def test_the_fastest_value_is_kept_while_later_constants_are_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = SimpleNamespace(__name__="module", FIRST=(0,), SECOND=(0,))
    monkeypatch.setattr(gpu_tiles, "kernel_ms", lambda kernel, work: abs(module.FIRST[0] - 2) + module.SECOND[0])
    choices = [gpu_tiles.Choice(module, name, "kernel", [(1,), (2,), (3,)]) for name in ("FIRST", "SECOND")]
    gpu_tiles.compared(choices, lambda: None)
    assert (module.FIRST, module.SECOND) == ((2,), (1,))
    assert "module.SECOND (kernel): 1.000 (1,), 2.000 (2,), 3.000 (3,)" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_tiles.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
