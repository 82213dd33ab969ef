"""How a mixture chooses the experts of each token, and their weights.

Shapes: T tokens, E experts, K choices, G groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.config import DecoderConfig, RouterConfig
from workers.model.lora.linear import Site, lora_linear
from workers.model.lora.rows import LoraRows
from workers.model.native import joined
from workers.model.native.gemm import packed
from workers.model.parts.frozen import frozen
from workers.model.parts.steady import sigmoid_of

#: Marks in a replayed routing that the router is to choose this expert.
FREE = -1

#: Added to the sum of sigmoid scores, against division by zero, as in the published code.
_TINY = 1e-20

_NO_SITE = Site("", (), ())


class Router(nn.Module):
    """Frozen and without an adapter; its gradient still flows to x. Sigmoid scores are computed in float32 whatever the
    weights' dtype, as in the published code, because the correction may decide between close scores."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.how, self.choices, self.norm_topk = config.router, config.experts_per_token, config.norm_topk
        precise = torch.float32 if self.how.scores == "sigmoid" else dtype
        self.weight = frozen(precise, config.num_experts, config.hidden_size)
        self.bias = frozen(torch.float32, config.num_experts) if self.how.bias else None
        self.correction = frozen(torch.float32, config.num_experts) if self.how.correction else None

    def forward(self, x_TD: Tensor, lora: LoraRows | None, forced_TK: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weights (float32) and the experts of each token, [T, K]. `forced_TK`: experts that must be chosen, or
        FREE; their weights are still the router's."""
        logits_TE = lora_linear(x_TD, self.weight, _NO_SITE, lora)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias
        if self.how.scores == "chosen":
            return self._softmax_of_chosen(logits_TE, forced_TK)
        plain = self.how.scores == "softmax" and self.correction is None and self.how.groups == 1
        if plain and forced_TK is None and packed(self.weight) is not None and joined.serves(logits_TE):
            return joined.choose(logits_TE, self.choices, normed=self.norm_topk, scaling=self.how.scaling)
        scores_TE = self._scores(logits_TE, lora)
        if self.correction is None and self.how.groups == 1:
            weights_TK, experts_TK = torch.topk(scores_TE, self.choices, dim=-1)
        else:
            experts_TK = torch.topk(eligible(scores_TE, self.correction, self.how), self.choices, dim=-1).indices
            weights_TK = scores_TE.gather(1, experts_TK)
        if forced_TK is not None:
            experts_TK = torch.where(forced_TK == FREE, experts_TK, forced_TK)
            weights_TK = scores_TE.gather(1, experts_TK)
        if self.norm_topk:
            total_T1 = weights_TK.sum(dim=-1, keepdim=True)
            weights_TK = weights_TK / (total_T1 + _TINY if self.how.scores == "sigmoid" else total_T1)
        if self.how.scaling != 1.0:
            weights_TK = weights_TK * self.how.scaling
        return weights_TK, experts_TK

    def _scores(self, logits_TE: Tensor, lora: LoraRows | None) -> Tensor:
        return torch.softmax(logits_TE, dim=-1) if self.how.scores == "softmax" else sigmoid_of(logits_TE, lora)

    def _softmax_of_chosen(self, logits_TE: Tensor, forced_TK: Tensor | None) -> tuple[Tensor, Tensor]:
        experts_TK = torch.topk(logits_TE, self.choices, dim=-1).indices
        if forced_TK is not None:
            experts_TK = torch.where(forced_TK == FREE, experts_TK, forced_TK)
        return torch.softmax(logits_TE.gather(1, experts_TK), dim=-1), experts_TK


def eligible(scores_TE: Tensor, correction_E: Tensor | None, how: RouterConfig) -> Tensor:
    """The scores by which experts are chosen: with the correction, and -inf for experts outside of the best
    `groups_per_token` groups. A group's score is the sum of its two best experts' (DeepSeek-V3, arXiv 2412.19437)."""
    corrected_TE = scores_TE.detach() if correction_E is None else scores_TE.detach() + correction_E
    if how.groups == 1:
        return corrected_TE
    by_group_TGE = corrected_TE.view(len(corrected_TE), how.groups, -1)
    best_TG = by_group_TGE.topk(2, dim=-1).values.sum(dim=-1)
    out_TG = torch.ones_like(best_TG, dtype=torch.bool)
    out_TG.scatter_(1, best_TG.topk(how.groups_per_token, dim=-1).indices, False)
    return by_group_TGE.masked_fill(out_TG[:, :, None], -torch.inf).flatten(1)
