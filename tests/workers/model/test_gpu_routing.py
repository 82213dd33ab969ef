"""A small number of pairs is sorted by a kernel that counts, exactly as by torch's stable sort."""

from __future__ import annotations

import pytest
import torch

from tests.workers.model.gpu_kit import DEVICE
from workers.model import routing
from workers.model.routing import Routing


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(64, 8, 128), (1, 2, 5), (7, 3, 40), (9, 1, 1)])
def test_pairs_are_sorted_as_by_torch(tokens: int, choices: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(tokens)
    chosen_TK = torch.randint(0, experts, (tokens, choices), generator=generator).to(DEVICE)
    found = {}
    for counted in (True, False):
        monkeypatch.setattr(routing, "counts", lambda experts_TK, counted=counted: counted)
        found[counted] = vars(Routing(chosen_TK, experts))
    assert found[True].keys() == found[False].keys()
    for name, wanted in found[False].items():
        if isinstance(wanted, torch.Tensor):
            assert found[True][name].dtype == wanted.dtype
            assert torch.equal(found[True][name], wanted), name
