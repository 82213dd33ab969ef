"""Mixture-of-experts models with LoRA on the CPU, where stock vLLM picks Triton's experts and dies.

A batch without adapters takes vLLM's own fused kernel. One with adapters is computed expert by expert, and in each
expert adapter by adapter. SiLU, no bias, one process: the models that Weft serves on a CPU.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    import torch
    import torch.nn.functional as F
    import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

    class Experts(LoRAExpertsMixin, CPUUnquantizedExperts):
        def process_weights_after_loading(self, layer: Any) -> None:
            packed = (cpu_prepack_moe_weight(weight, self.isa) for weight in (layer.w13_weight, layer.w2_weight))
            self._packed = tuple(packed)

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
            global_num_experts: int, expert_map: Any, a1q_scale: Any, a2_scale: Any, workspace13: Any, workspace2: Any,
            expert_tokens_meta: Any, apply_router_weight_on_input: bool,
        ) -> None:  # fmt: skip
            slots = self._slots(hidden_states.shape[0])
            if slots is None:
                cpu_fused_moe(
                    output, hidden_states, *self._packed, self.w1_bias, self.w2_bias, topk_weights, topk_ids,
                    activation.value, self.isa, apply_router_weight_on_input,
                )  # fmt: skip
                return
            assert activation.value == "silu"
            assert self.w1_bias is None
            per_token = topk_ids.shape[1]
            total = torch.zeros(len(hidden_states), output.shape[-1], dtype=torch.float32)
            order = torch.argsort(topk_ids.reshape(-1), stable=True)
            counts = torch.bincount(topk_ids.reshape(-1), minlength=w1.shape[0]).tolist()
            weights = topk_weights.reshape(-1)
            for expert, chosen in enumerate(torch.split(order, counts)):
                if len(chosen):
                    tokens = chosen // per_token
                    y = self._expert(expert, hidden_states[tokens], slots[tokens], w1[expert], w2[expert]).float()
                    total.index_add_(0, tokens, y if apply_router_weight_on_input else y * weights[chosen, None])
            output.copy_(total)

        def _slots(self, tokens: int) -> Any:
            """The adapter slot of each token, -1 for none; None if no token has one."""
            context = self._lora_context
            if context is None or context.punica_wrapper.no_lora:
                return None
            slots = context.punica_wrapper._token_lora_indices[:tokens]
            enabled = context.adapter_enabled.bool()
            slots = torch.where((slots >= 0) & enabled[slots.clamp(min=0)], slots, -1)
            return None if bool((slots < 0).all()) else slots

        def _expert(self, expert: int, x: Any, slots: Any, w1: Any, w2: Any) -> Any:
            context, width = self._lora_context, w2.shape[-1]
            a13, b13 = context.w13_lora_a_stacked, context.w13_lora_b_stacked
            a2, b2 = context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0]
            groups = [(s, (slots == s).nonzero(as_tuple=True)[0]) for s in torch.unique(slots).tolist() if s >= 0]
            hidden = F.linear(x, w1)
            for slot, rows in groups:
                if len(a13) == 2:  # gate and up apart
                    for at, a, b in zip((slice(0, width), slice(width, None)), a13, b13, strict=True):
                        hidden[rows, at] += F.linear(F.linear(x[rows], a[slot, expert]), b[slot, expert])
                else:
                    hidden[rows] += F.linear(F.linear(x[rows], a13[0][slot, expert]), b13[0][slot, expert])
            gated = F.silu(hidden[:, :width]) * hidden[:, width:]
            y = F.linear(gated, w2)
            for slot, rows in groups:
                y[rows] += F.linear(F.linear(gated[rows], a2[slot, expert]), b2[slot, expert])
            return y

    stock = oracle.select_unquantized_moe_backend

    def select(moe_config: Any, *args: Any, **options: Any) -> Any:
        if moe_config.is_lora_enabled:
            return oracle.UnquantizedMoeBackend.CPU, Experts
        return stock(moe_config, *args, **options)

    oracle.select_unquantized_moe_backend = select
    method.select_unquantized_moe_backend = select
