"""On a pretended GPU: a decode step and what is drawn from it lie on the device, and nothing of it waits. See
tests/workers/model."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.workers.model.gpu_kit import CONFIG, DENSE
from tests.workers.model.test_gpu_placement import CUDA, Indexing, Launches, launches  # noqa: F401
from workers.generator.cache.kv_cache import KVCache
from workers.generator.engine import SamplingParams
from workers.generator.gpu import kernels
from workers.generator.gpu.step import Step
from workers.generator.tokens.sampling import SamplingRows, chosen
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.gpu import kernels as adapter_kernels, single_kernels
from workers.model.gpu.segments import forms

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RANKS = (4, 8, 40)


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapted", [True, False], ids=["adapters", "base"])
def test_a_decode_step_stays_on_the_device_and_never_waits(
    config: DecoderConfig,
    dtype: torch.dtype,
    adapted: bool,
    launches: dict[str, Launches],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {name: Launches() for name in ("store", "partial", "combine")}
    for name, kernel in own.items():
        monkeypatch.setattr(kernels, name, kernel)
    experts_launched = Launches()
    monkeypatch.setattr(adapter_kernels, "experts", experts_launched)
    of_rows = {name: Launches() for name in ("shrink_row", "expand_row")}
    for name, kernel in of_rows.items():
        monkeypatch.setattr(single_kernels, name, kernel)
    with FakeTensorMode(), Indexing(), torch.inference_mode():
        decoder = Decoder(config, dtype, CUDA)
        cache = KVCache(
            layers=config.num_layers,
            pages=16,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=CUDA,
        )
        adapters = [Adapter.zeros(AdapterShape(config, rank), device=CUDA) for rank in RANKS if adapted]
        step = Step(decoder, cache, rows=8, width=4, forms=forms(adapters))
        logits, chosen = step.compute()
        assert all(tensor.device == CUDA for tensor in (logits, *chosen))
        assert logits.shape == (8, config.vocab_size)
    assert experts_launched.count == 2 * len(config.mixture_layers)
    assert {kernel.count for kernel in own.values()} == {config.num_layers}
    # For each layer four linears, or two and the experts, and the unembedding, of all ranks at once.
    assert [kernel.count for kernel in of_rows.values()] == ([5, 5] if adapted else [0, 0])
    assert (launches["shrink"].count, launches["expand"].count) == (0, 0)


def test_nothing_is_read_before_all_is_drawn() -> None:
    """Greedy, from all tokens and from the likeliest, with tables of likeliest tokens."""
    kinds = [SamplingParams(temperature=0), SamplingParams(top_k=3, top_p=0.9), SamplingParams(), SamplingParams()]
    with FakeTensorMode(), Indexing():
        rows = SamplingRows.of(kinds, 50, CUDA, [0, 2, 5, 0])
        found = chosen(torch.empty(4, 50, device=CUDA), rows, [0.5] * 4)
        assert (found.device, found.shape) == (CUDA, (2 * 4 + 2 * 2 * 5,))
