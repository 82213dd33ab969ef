"""Adapters against autograd through merged weights and against peft; and no group can change another's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.workers.model.models import ours, packed, random_adapter, reference
from workers.model.adapters.adapter import Adapter
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows

FAMILIES = ["moe", "moe-mixed", "qwen3", "llama-tied", "nemotron-h", "nemotron-h-latent"]


def run(
    decoder: Decoder,
    lengths: list[int],
    tokens: Tensor,
    rows: LoraRows,
    weights_T: Tensor | None = None,
) -> Tensor:
    """Next-token logprobs of every packed sequence, [tokens]; with weights, their weighted sum is differentiated."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = decoder(tokens, positions, PackedAttend(lengths), rows)
    logprobs = target_logprobs(decoder, hidden, torch.arange(len(tokens)), (tokens * 7 + 3) % 96, rows, chunk=32)
    if weights_T is not None:
        (logprobs * weights_T).sum().backward()
    return logprobs.detach()


def merged(model: Any, adapter: Adapter) -> dict[str, Tensor]:
    """The transformers weights with the adapter folded in, W + scale * B A, as functions of the adapter's tensors."""
    shape, r, s = adapter.shape, adapter.rank, adapter.scale
    weights = dict(model.named_parameters())

    def add(name: str, b: Tensor, a: Tensor) -> None:
        weights[name] = weights[name] + s * (b @ a)

    for i in range(shape.config.num_layers):
        at, v = (
            f"model.layers.{i}.",
            {k.rpartition(".")[2]: t for k, t in adapter.views.items() if f"layers.{i}." in k and "shared" not in k},
        )
        if shape.config.mlp_layers:
            _merge_mixer(weights, adapter, i)
            continue
        if shape.train_attn and i in shape.config.recurrent_layers:
            _merge_delta(weights, v, f"{at}linear_attn.", r, s)
        elif shape.train_attn and shape.config.latent:
            queries = "q_a" if shape.config.latent.q_rank else "q"
            modules = f"{queries}_proj", "kv_a_proj_with_mqa"
            for module, b, a in zip(modules, (f"{queries}_B", "kv_a_B"), v["latent_A"].split(r), strict=True):
                add(f"{at}self_attn.{module}.weight", v[b], a)
            add(at + "self_attn.o_proj.weight", v["o_B"], v["o_A"])
        elif shape.train_attn and shape.config.fused_qkv:
            add(at + "attention.query_key_value.weight", v["qkv_B"], v["qkv_A"])
            add(at + "attention.dense.weight", v["o_B"], v["o_A"])
        elif shape.train_attn:
            for part, a in zip("qkv", v["qkv_A"].split(r), strict=True):
                add(f"{at}self_attn.{part}_proj.weight", v[f"{part}_B"], a)
            add(at + "self_attn.o_proj.weight", v["o_B"], v["o_A"])
        if not shape.train_mlp:
            continue
        if shape.config.is_moe(i) and shape.config.shared_intermediate_size:
            w = {k.rpartition(".")[2]: t for k, t in adapter.views.items() if f"layers.{i}.mlp.shared" in k}
            own = f"{at}mlp.shared_expert{'' if shape.config.shared_gate else 's'}."
            for part, a in zip(("gate", "up"), w["gate_up_A"].split(r), strict=True):
                add(f"{own}{part}_proj.weight", w[f"{part}_B"], a)
            add(f"{own}down_proj.weight", w["down_B"], w["down_A"])
        if shape.config.is_moe(i) and not shape.shared:
            gate_a, up_a = v["each_gate_up_A"].split(r, dim=1)
            gate_up = torch.cat([v["gate_B"] @ gate_a, v["up_B"] @ up_a], dim=1)
            weights[at + "mlp.experts.gate_up_proj"] = weights[at + "mlp.experts.gate_up_proj"] + s * gate_up
            add(at + "mlp.experts.down_proj", v["each_down_B"], v["down_A"])
            continue
        gate_a, up_a = v["gate_up_A"].split(r)
        if f"{at}mlp.experts.0.gate_proj.weight" in weights:
            for e in range(shape.config.num_experts):
                add(f"{at}mlp.experts.{e}.gate_proj.weight", v["gate_B"][e], gate_a)
                add(f"{at}mlp.experts.{e}.up_proj.weight", v["up_B"][e], up_a)
                add(f"{at}mlp.experts.{e}.down_proj.weight", v["down_B"], v["down_A"][e])
        elif shape.config.expert_bias:  # gate and up alternate, and experts are [in, out]
            both = torch.stack((v["gate_B"] @ gate_a, v["up_B"] @ up_a), dim=2).flatten(1, 2)
            for name, delta in (("gate_up_proj", both), ("down_proj", v["down_B"] @ v["down_A"])):
                name = f"{at}mlp.experts.{name}"
                weights[name] = weights[name] + s * delta.transpose(1, 2)
        elif shape.config.is_moe(i):
            gate_up = torch.cat([v["gate_B"] @ gate_a, v["up_B"] @ up_a], dim=1)
            weights[at + "mlp.experts.gate_up_proj"] = weights[at + "mlp.experts.gate_up_proj"] + s * gate_up
            add(at + "mlp.experts.down_proj", v["down_B"], v["down_A"])
        else:
            add(at + "mlp.gate_proj.weight", v["gate_B"], gate_a)
            add(at + "mlp.up_proj.weight", v["up_B"], up_a)
            add(at + "mlp.down_proj.weight", v["down_B"], v["down_A"])
    if shape.train_unembed:
        weights["lm_head.weight"] = model.lm_head.weight + s * (adapter.view("unembed_B") @ adapter.view("unembed_A"))
    return weights


def _merge_delta(weights: dict[str, Tensor], v: dict[str, Tensor], at: str, r: int, s: float) -> None:
    """Merge the factors `v` into a layer with a gated delta rule."""
    before = "whole_" if "whole_in_A" in v else ""
    kinds = (("qkvz", "ba"), ("q", "k", "v", "z"), ("qkv", "z", "b", "a"))
    names = next(names for names in kinds if f"{before}{names[0]}_B" in v)
    parts = zip(names, v[f"{before}in_A"].split(r), strict=True)
    products = {name: v[f"{before}{name}_B"] @ a for name, a in parts}
    if "q" in products:
        products["qkv"] = torch.cat([products.pop(name) for name in "qkv"])
    for name, product in products.items():
        weights[f"{at}in_proj_{name}.weight"] = weights[f"{at}in_proj_{name}.weight"] + s * product
    weights[f"{at}out_proj.weight"] = weights[f"{at}out_proj.weight"] + s * (v["out_B"] @ v["out_A"])


def _merge_mixer(weights: dict[str, Tensor], adapter: Adapter, layer: int) -> None:
    """Merge the factors into a layer of Nemotron."""
    shape, r, s, config = adapter.shape, adapter.rank, adapter.scale, adapter.shape.config
    at, own = f"model.layers.{layer}.mixer.", f"layers.{layer}.mixer."
    v = {name.removeprefix(own): view for name, view in adapter.views.items() if name.startswith(own)}

    def add(module: str, b: Tensor, a: Tensor, suffix: str = ".weight") -> None:
        weights[at + module + suffix] = weights[at + module + suffix] + s * (b @ a)

    if "attn.qkv_A" in v:
        for part, a in zip("qkv", v["attn.qkv_A"].split(r), strict=True):
            add(f"{part}_proj", v[f"attn.{part}_B"], a)
        add("o_proj", v["attn.o_B"], v["attn.o_A"])
    if "attn.out_A" in v:
        assert config.mamba is not None
        if not shape.whole:
            gate, x = (v[f"attn.{part}_B"] @ a for part, a in zip(("gate", "x"), v["attn.in_A"].split(r), strict=True))
            rest = config.mamba.in_size - 2 * config.mamba.value_size
            weights[at + "in_proj.weight"] = weights[at + "in_proj.weight"] + s * torch.cat(
                (gate, x, torch.zeros(rest, config.hidden_size))
            )
        else:
            add("in_proj", v["attn.whole_in_B"], v["attn.whole_in_A"])
        add("out_proj", v["attn.out_B"], v["attn.out_A"])
    if "mlp.latent_in_A" in v:
        add("fc1_latent_proj", v["mlp.latent_in_B"], v["mlp.latent_in_A"])
        add("fc2_latent_proj", v["mlp.latent_out_B"], v["mlp.latent_out_A"])
    if "mlp.shared.up_A" in v:
        add("shared_experts.up_proj", v["mlp.shared.up_B"], v["mlp.shared.up_A"])
        add("shared_experts.down_proj", v["mlp.shared.down_B"], v["mlp.shared.down_A"])
    if "mlp.down_A" in v:
        experts, each = config.is_moe(layer), "each_" if config.is_moe(layer) and not shape.shared else ""
        suffix, where = ("", "experts.") if experts else (".weight", "")
        add(f"{where}up_proj", v["mlp.up_B"], v[f"mlp.{each}up_A"], suffix)
        add(f"{where}down_proj", v[f"mlp.{each}down_B"], v["mlp.down_A"], suffix)


def through_merged(
    model: Any, adapter: Adapter, sequences: list[Tensor], weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logprobs and the flat gradient by autograd alone."""
    flat = adapter.flat.clone().requires_grad_()
    folded = merged(model, Adapter(adapter.shape, flat, adapter.scale))
    parts = []
    for sequence in sequences:
        logits = torch.func.functional_call(model, folded, (sequence[None],), tie_weights=False).logits[0]
        parts.append(torch.log_softmax(logits, -1).gather(1, ((sequence * 7 + 3) % 96)[:, None]).squeeze(1))
    logprobs = torch.cat(parts)
    (logprobs * torch.cat(weights)).sum().backward()
    assert flat.grad is not None
    return logprobs.detach(), flat.grad


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_equal_merged_weights(family: str, tmp_path: Path) -> None:
    model = reference(family)
    decoder = ours(model, tmp_path)
    adapters = [
        random_adapter(decoder, 4, seed=1),
        random_adapter(decoder, 3, seed=2, scale=0.5, train_attn=False, train_unembed=False),
        random_adapter(decoder, 8, seed=3, train_mlp=False),
        random_adapter(decoder, 2, seed=4, train_attn=False, train_mlp=False),
        random_adapter(decoder, 3, seed=6, scale=0.7, shared=False),
    ]
    grads = [Adapter.zeros(a.shape) for a in adapters]
    lengths = [[7, 20], [12], [3, 3], [9], [5, 6]]
    flat_lengths = [n for group in lengths for n in group]
    tokens, _ = packed(flat_lengths, decoder.config.vocab_size)
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(5))
    offsets = [0, 27, 39, 45, 54, 65]
    got = run(decoder, flat_lengths, tokens, LoraRows(offsets, adapters, grads), weights)
    for g, adapter in enumerate(adapters):
        mine = slice(offsets[g], offsets[g + 1])
        sequences, parts = tokens[mine].split(lengths[g]), weights[mine].split(lengths[g])
        expected, gradient = through_merged(model, adapter, list(sequences), list(parts))
        torch.testing.assert_close(got[mine], expected, atol=3e-5, rtol=1e-5)
        for name, view in grads[g].views.items():
            wanted = Adapter(adapter.shape, gradient, 1.0).view(name)
            size = max(wanted.abs().max().item(), 1e-3)
            torch.testing.assert_close(view / size, wanted / size, atol=3e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_attention_adapter_equals_peft(tmp_path: Path) -> None:
    model = reference("llama")
    decoder = ours(model, tmp_path)
    adapter = random_adapter(decoder, 4, seed=1, scale=8 / 4, train_mlp=False, train_unembed=False)
    grad = Adapter.zeros(adapter.shape)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names))
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for i in range(decoder.config.num_layers):
        at = f"layers.{i}.attn."
        rows = {"q": slice(0, 4), "k": slice(4, 8), "v": slice(8, 12)}
        for part in "qkvo":
            a = adapter.view(at + "o_A") if part == "o" else adapter.view(at + "qkv_A")[rows[part]]
            ga = grad.view(at + "o_A") if part == "o" else grad.view(at + "qkv_A")[rows[part]]
            module = peft_model.get_submodule(f"base_model.model.model.layers.{i}.self_attn.{part}_proj")
            module.lora_A["default"].weight.data.copy_(a)
            module.lora_B["default"].weight.data.copy_(adapter.view(f"{at}{part}_B"))
            pairs[f"{i}.{part}.A"] = (module.lora_A["default"].weight, ga)
            pairs[f"{i}.{part}.B"] = (module.lora_B["default"].weight, grad.view(f"{at}{part}_B"))
    tokens, _ = packed([23], decoder.config.vocab_size)
    weights = torch.randn(23, generator=torch.Generator().manual_seed(5))
    got = run(decoder, [23], tokens, LoraRows([0, 23], [adapter], [grad]), weights)
    logits = peft_model(tokens[None]).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, ((tokens * 7 + 3) % 96)[:, None]).squeeze(1)
    (expected * weights).sum().backward()
    torch.testing.assert_close(got, expected.detach(), atol=3e-5, rtol=1e-5)
    for name, (parameter, view) in pairs.items():
        torch.testing.assert_close(view, parameter.grad, atol=3e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", [*FAMILIES, "moe-wide"])
@pytest.mark.parametrize("mine", [[5], [1, 1], [33, 2, 9]], ids=["short", "single tokens", "long"])
def test_co_tenants_do_not_change_a_bit(family: str, mine: list[int], tmp_path: Path) -> None:
    """Whether they lie behind it, before it, or on both sides."""
    decoder = ours(reference(family), tmp_path)
    adapter = random_adapter(decoder, 4, seed=1)
    tokens, _ = packed(mine, decoder.config.vocab_size, seed=9)
    weights = torch.linspace(-1, 1, len(tokens))
    alone_grad = Adapter.zeros(adapter.shape)
    alone = run(decoder, mine, tokens, LoraRows([0, len(tokens)], [adapter], [alone_grad]), weights)

    others: list[tuple[list[int], Adapter | None]] = [
        ([5, 30], random_adapter(decoder, 7, seed=2, train_attn=False)),
        ([2, 4], random_adapter(decoder, 1, seed=3, shared=False)),
        ([33, 8], None),
    ]
    for at in (0, 1, 3):
        tenants = [*others[:at], (mine, adapter), *others[at:]]
        lengths = [n for group, _ in tenants for n in group]
        offsets = [0]
        for group, _ in tenants:
            offsets.append(offsets[-1] + sum(group))
        crowd, _ = packed(lengths, decoder.config.vocab_size, seed=10)
        crowd_weights = torch.linspace(2, 3, len(crowd))
        own = slice(offsets[at], offsets[at + 1])
        crowd[own], crowd_weights[own] = tokens, weights
        grads = [None if a is None else Adapter.zeros(a.shape) for _, a in tenants]
        together = run(decoder, lengths, crowd, LoraRows(offsets, [a for _, a in tenants], grads), crowd_weights)

        crowded_grad = grads[at]
        assert crowded_grad is not None
        assert torch.equal(together[own], alone), at
        for name, view in alone_grad.views.items():
            assert torch.equal(crowded_grad.view(name), view), (at, name)
    assert all(g is None or bool(g.flat.any()) for g in grads)


def test_a_nan_stays_with_its_tenant(tmp_path: Path) -> None:
    decoder = ours(reference("moe"), tmp_path)
    good, bad = random_adapter(decoder, 4, seed=1), random_adapter(decoder, 4, seed=2)
    bad.flat.fill_(float("nan"))
    grads = [Adapter.zeros(good.shape), Adapter.zeros(bad.shape)]
    tokens, _ = packed([6, 6], decoder.config.vocab_size)
    logprobs = run(decoder, [6, 6], tokens, LoraRows([0, 6, 12], [good, bad], grads), torch.ones(12))
    assert logprobs[:6].isfinite().all()
    assert logprobs[6:].isnan().all()
    assert grads[0].flat.isfinite().all()


def test_slices_of_one_operation_add_up(tmp_path: Path) -> None:
    decoder = ours(reference("moe"), tmp_path)
    adapter = random_adapter(decoder, 4, seed=1)
    tokens, _ = packed([6, 11], decoder.config.vocab_size)
    whole, halves, shared = (Adapter.zeros(adapter.shape) for _ in range(3))
    weights = torch.ones(17)
    run(decoder, [6, 11], tokens, LoraRows([0, 17], [adapter], [whole]), weights)
    run(decoder, [6], tokens[:6], LoraRows([0, 6], [adapter], [halves]), weights[:6])
    run(decoder, [11], tokens[6:], LoraRows([0, 11], [adapter], [halves]), weights[6:])
    run(decoder, [6, 11], tokens, LoraRows([0, 6, 17], [adapter] * 2, [shared] * 2), weights)
    assert torch.equal(halves.flat, shared.flat)
    torch.testing.assert_close(whole.flat, halves.flat, atol=1e-4, rtol=1e-4)


def test_without_gradients_nothing_is_recorded_and_results_agree(tmp_path: Path) -> None:
    decoder = ours(reference("moe"), tmp_path)
    adapter = random_adapter(decoder, 4, seed=1)
    tokens, positions = packed([6, 11], decoder.config.vocab_size)
    trained = LoraRows([0, 6, 17], [adapter, None], [Adapter.zeros(adapter.shape), None])
    plain = LoraRows([0, 6, 17], [adapter, None])
    with_grad = decoder(tokens, positions, PackedAttend([6, 11]), trained)
    assert with_grad.requires_grad
    without = decoder(tokens, positions, PackedAttend([6, 11]), plain)
    assert not without.requires_grad
    with torch.inference_mode():
        inferred = decoder(tokens, positions, PackedAttend([6, 11]), trained)
        assert not inferred.requires_grad
    torch.testing.assert_close(with_grad.detach(), without, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inferred, without, atol=1e-5, rtol=1e-5)


def test_rows_are_validated(tmp_path: Path) -> None:
    decoder = ours(reference("qwen3"), tmp_path)
    adapter, other = random_adapter(decoder, 4, seed=1), random_adapter(decoder, 2, seed=1)
    with pytest.raises(ValueError, match="do not agree"):
        LoraRows([0, 4], [adapter, adapter])
    with pytest.raises(ValueError, match="not decrease"):
        LoraRows([0, 4, 2], [adapter, adapter])
    with pytest.raises(ValueError, match="group 0: the gradient arena"):
        LoraRows([0, 4], [adapter], [other])
    with pytest.raises(ValueError, match="cover 4 rows, the batch has 5"):
        decoder(torch.arange(5), torch.arange(5), PackedAttend([5]), LoraRows([0, 4], [adapter]))
    with pytest.raises(ValueError, match="ascend"):
        LoraRows([0, 4], [adapter]).select(torch.tensor([2, 1]))


def test_selected_rows_keep_their_groups(tmp_path: Path) -> None:
    decoder = ours(reference("qwen3"), tmp_path)
    adapter = random_adapter(decoder, 4, seed=1)
    rows = LoraRows([0, 4, 4, 9], [adapter, None, adapter])
    assert rows.select(torch.tensor([0, 3, 3, 8])).offsets == [0, 3, 3, 4]
    cuts = [(a, b, r.offsets, r.adapters) for a, b, r in LoraRows([0, 7, 9, 10], [adapter, None, adapter]).slices(4)]
    assert [(a, b, o) for a, b, o, _ in cuts] == [(0, 4, [0, 4]), (4, 7, [0, 3]), (7, 10, [0, 2, 3])]
