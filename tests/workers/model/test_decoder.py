"""Our decoder against transformers' own classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.workers.model.models import FAMILIES, HYBRID, SIZES, ours, packed, random_adapter, reference
from workers.model.adapters.adapter import Adapter
from workers.model.attend import PackedAttend
from workers.model.base.weights import ModelWeightsError, copy_weights, load_decoder
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows

LENGTHS = [5, 17, 5, 1, 40]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model = reference(family)
    decoder = ours(model, tmp_path)
    tokens, positions = packed(LENGTHS, decoder.config.vocab_size)
    with torch.no_grad():
        logits = decoder.logits(decoder(tokens, positions, PackedAttend(LENGTHS)))
        for got, sequence in zip(logits.split(LENGTHS), tokens.split(LENGTHS), strict=True):
            torch.testing.assert_close(got, model(sequence[None]).logits[0], atol=2e-5, rtol=1e-5)


def test_the_text_model_of_a_checkpoint_with_vision_is_served(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    text = {
        **SIZES,
        **HYBRID,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    for weight in model.parameters():
        weight.requires_grad_(False).normal_(std=0.1)
    decoder = ours(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[1] for name in names if name.startswith("model.")} == {"language_model", "visual"}
    assert decoder.config.architecture == "Qwen3_5ForCausalLM"
    tokens, positions = packed([40], decoder.config.vocab_size)
    with torch.no_grad():
        got = decoder.logits(decoder(tokens, positions, PackedAttend([40])))
        torch.testing.assert_close(got, model(tokens[None]).logits[0], atol=2e-5, rtol=1e-5)


def test_the_text_model_of_kimis_checkpoint_with_vision_is_served(tmp_path: Path) -> None:
    """With the names of the published Kimi-K2.5. transformers reads them too, but not what it writes itself."""
    plain = reference("deepseek")
    ours(plain, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    config = Kimi_K25Config(
        text_config=plain.config.to_dict(), vision_config=vision, tie_word_embeddings=False, image_token_id=90,
        projection_hidden_size=32, architectures=["KimiK25ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    save_file({f"language_model.{name}": x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    decoder = load_decoder(tmp_path)
    model = Kimi_K25ForConditionalGeneration.from_pretrained(tmp_path).eval()
    tokens, positions = packed([40], 90)  # no token of an image
    with torch.no_grad():
        got = decoder.logits(decoder(tokens, positions, PackedAttend([40])))
        torch.testing.assert_close(got, model(tokens[None]).logits[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(got, plain(tokens[None]).logits[0], atol=2e-5, rtol=1e-5)


def test_decoder_sparse_step_leaves_the_other_layers_dense(tmp_path: Path) -> None:
    model = reference("moe", decoder_sparse_step=2)
    decoder = ours(model, tmp_path)
    assert decoder.config.dense_layers == (0,)
    tokens, positions = packed([9], decoder.config.vocab_size)
    with torch.no_grad():
        got = decoder.logits(decoder(tokens, positions, PackedAttend([9])))
        torch.testing.assert_close(got, model(tokens[None]).logits[0], atol=2e-5, rtol=1e-5)


def test_sharded_and_fused_checkpoints_load_the_same(tmp_path: Path) -> None:
    model = reference("moe")
    whole = ours(model, tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    fused_folder = tmp_path / "fused"
    fused_folder.mkdir()
    (fused_folder / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    save_file({k: v.clone() for k, v in model.state_dict().items()}, fused_folder / "model.safetensors")
    for folder in (tmp_path / "sharded", fused_folder):
        other = load_decoder(folder)
        for (name, a), b in zip(whole.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b), name


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    ours(reference("qwen3"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    with pytest.raises(ModelWeightsError, match=r"missing.*model\.norm\.weight"):
        load_decoder(tmp_path)
    save_file({**tensors, "model.norm.weight": norm, "model.layers.0.self_attn.q_proj.bias": norm.clone()}, file)
    with pytest.raises(ModelWeightsError, match=r"q_proj\.bias has no place"):
        load_decoder(tmp_path)
    save_file({**tensors, "model.norm.weight": norm[:3].clone()}, file)
    with pytest.raises(ModelWeightsError, match=r"model\.norm\.weight is .*\[3\], .* \[64\]"):
        load_decoder(tmp_path)


def test_what_is_missing_is_found_before_anything_is_read(tmp_path: Path) -> None:
    decoder = ours(reference("qwen3"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]  # the last of all
    save_file(tensors, file)
    decoder.embed.fill_(7.0)
    with pytest.raises(ModelWeightsError, match="missing"):
        copy_weights(decoder, [file])
    assert bool((decoder.embed == 7.0).all())


def test_frozen_weights_want_no_gradient_and_a_hook_sees_every_layer_with_experts(tmp_path: Path) -> None:
    decoder = ours(reference("moe-mixed"), tmp_path)
    assert not any(p.requires_grad for p in decoder.parameters())
    tokens, positions = packed([4, 6], decoder.config.vocab_size)
    routed: list[tuple[int, tuple[int, ...]]] = []
    decoder(tokens, positions, PackedAttend([4, 6]), on_route=lambda i, e: routed.append((i, tuple(e.shape))))
    assert routed == [(1, (10, 2)), (2, (10, 2))]


def test_bfloat16_weights_keep_float32_activations_and_adapters(tmp_path: Path) -> None:
    model = reference("moe")
    decoder = ours(model, tmp_path)
    half = load_decoder(tmp_path, dtype=torch.bfloat16)
    adapter = random_adapter(decoder, 4, seed=1, scale=0.5)
    tokens, positions = packed(LENGTHS, 96)
    found = []
    for each in (decoder, half):
        grad = Adapter.zeros(adapter.shape)
        rows = LoraRows([0, len(tokens)], [adapter], [grad])
        hidden = each(tokens, positions, PackedAttend(LENGTHS), rows)
        assert hidden.dtype == torch.float32
        logprobs = target_logprobs(each, hidden, torch.arange(len(tokens)), tokens, rows)
        logprobs.mean().backward()
        found.append((logprobs.mean(), grad.flat))
    (full, full_grad), (low, low_grad) = found
    torch.testing.assert_close(low, full, atol=0.05, rtol=0.05)
    assert torch.cosine_similarity(full_grad, low_grad, dim=0) > 0.95


def test_a_head_beside_the_embedding_that_it_is_tied_to_must_be_that(tmp_path: Path) -> None:
    decoder = ours(reference("qwen3-tied"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, file)
    assert torch.equal(load_decoder(tmp_path).head, decoder.head)
    head[-1, -1] += 1.0
    save_file(tensors | {"lm_head.weight": head}, file)
    with pytest.raises(ModelWeightsError, match=r"lm_head\.weight is not .* tie_word_embeddings=true: set it to false"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_target_logprobs_value_and_gradient_equal_log_softmax(chunk: int, tmp_path: Path) -> None:
    decoder = ours(reference("qwen3-tied"), tmp_path)
    torch.manual_seed(1)
    hidden = torch.randn(20, decoder.config.hidden_size, requires_grad=True)
    rows, targets = torch.tensor([0, 1, 1, 5, 6, 7, 8, 19]), torch.randint(0, decoder.config.vocab_size, (8,))
    weights = torch.randn(8)
    expected = torch.log_softmax(hidden[rows] @ decoder.head.T, -1).gather(1, targets[:, None]).squeeze(1)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), hidden)
    got = target_logprobs(decoder, hidden, rows, targets, chunk=chunk)
    (gradient,) = torch.autograd.grad((got * weights).sum(), hidden)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, wanted, atol=2e-6, rtol=1e-5)
