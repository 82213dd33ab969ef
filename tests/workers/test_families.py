"""The contract of every family that is served: it computes what transformers, peft and torch's autograd compute, on a
tiny random model of each. tests/workers/model/test_decoder.py compares logits; lora/test_linear.py tests that no group
can change another's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from tests.workers.model.lora.test_linear import merged
from tests.workers.model.models import FAMILIES, ours, packed, random_adapter, reference
from tests.workers.trainer.kit import Bench, ce_data, output
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, load_adapter, save_adapter
from workers.model.adapters.imported import read_adapter
from workers.model.adapters.peft_format import write_export
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.families.table import FAMILIES as TABLE
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows

#: One model of each family; variants like "qwen3-tied" differ in nothing that is tested here.
EACH = ["qwen2", "qwen2-yarn", "qwen3", "llama", "mistral", "moe", "mixtral", "olmoe", "glm4-moe", "gpt-oss"]
EACH += ["deepseek", "deepseek-plain", "glm4-moe-lite", "bailing", "qwen3-next", "qwen3.5", "qwen3.5-moe"]
EACH += ["nemotron-h", "nemotron-h-latent"]
CONTEXT = 256
STEPS, RATE = 5, 3e-3
#: Gradients below this may be nothing but rounding in sums of numbers near 1.
ROUNDING = 1e-7
#: Alpha of an adapter that is compared with peft's, with a B that is not zero either; 8 for other models. With 8, this
#: one's log-probabilities are 1.2e-4 apart when the adapters' weights are 1e-6 apart.
ALPHA = {"qwen3.5-moe": 1}


@dataclass(frozen=True)
class Tiny:
    name: str
    model: Any
    folder: Path
    decoder: Decoder

    @property
    def vocab(self) -> int:
        return self.decoder.config.vocab_size


@pytest.fixture(scope="module", params=EACH)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp(request.param)
    model = reference(request.param, max_position_embeddings=CONTEXT)
    model.generation_config.eos_token_id = None
    return Tiny(request.param, model, folder, ours(model, folder))


def test_every_family_of_the_table_is_held_here() -> None:
    assert {FAMILIES[name][0].__name__ for name in EACH} == set(TABLE)


def prompt(length: int, vocab: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, vocab, length))


def generate(engine: TorchEngine, *requests: GenerateRequest) -> dict[str, Finished]:
    for request in requests:
        engine.add(request)
    finished: dict[str, Finished] = {}
    while engine.busy:
        finished.update({result.id: result for result in engine.step()})
    return finished


def test_greedy_tokens_are_those_of_transformers_with_and_without_the_prefix_cache(tiny: Tiny) -> None:
    """Also in a crowd: tokens and the bits of their log-probabilities do not depend on other requests."""
    tokens, greedy = prompt(41, tiny.vocab), SamplingParams(temperature=0, max_tokens=100)
    cold = TorchEngine(tiny.decoder, (), slots=4, context=CONTEXT, prefix_bytes=0)
    alone = generate(cold, GenerateRequest("r", tokens, greedy))["r"]
    drawn = alone.sequences[0].tokens.tolist()
    with torch.no_grad():  # each is its likeliest behind those before it: all are what it would generate
        logits = tiny.model(torch.tensor([[*tokens, *drawn]])).logits[0, len(tokens) - 1 : -1]
    assert drawn == logits.argmax(1).tolist()
    assert len(drawn) == 100
    warm = TorchEngine(tiny.decoder, (), slots=4, context=CONTEXT)
    crowd = [GenerateRequest(f"c{n}", prompt(9 + 23 * n, tiny.vocab, n), SamplingParams(max_tokens=60)) for n in (1, 2)]
    generate(warm, GenerateRequest("before", tokens, SamplingParams(max_tokens=1)))
    again = generate(warm, *crowd, GenerateRequest("r", tokens, greedy))["r"]
    assert (alone.facts.cache_hit, again.facts.cache_hit) == (0, 32)
    assert again.sequences[0].tokens.tolist() == drawn
    assert np.array_equal(again.sequences[0].logprobs, alone.sequences[0].logprobs)


def test_prompt_and_sampled_logprobs_are_the_trainers_and_transformers(tiny: Tiny, tmp_path: Path) -> None:
    """With an adapter on every module; the trainer's numbers are those of the merged model."""
    adapter = random_adapter(tiny.decoder, 3, seed=2)
    save_adapter(adapter, tmp_path / "a", base_model="tiny")
    request = GenerateRequest(
        "r", prompt(50, tiny.vocab), SamplingParams(max_tokens=60, seed=1), prompt_logprobs=True,
        adapter="a", adapter_folder=tmp_path / "a",
    )  # fmt: skip
    engine = TorchEngine(tiny.decoder, (), slots=4, context=CONTEXT)
    done = generate(engine, request, GenerateRequest("other", prompt(33, tiny.vocab, 4), SamplingParams(max_tokens=40)))
    (sequence,) = done["r"].sequences
    tokens = torch.tensor([*request.prompt, *sequence.tokens.tolist()])
    found = np.concatenate([np.asarray(done["r"].prompt_logprobs)[1:], sequence.logprobs])
    with torch.no_grad():
        rows, at = LoraRows([0, len(tokens) - 1], [adapter]), torch.arange(len(tokens) - 1)
        hidden = tiny.decoder(tokens[:-1], at, PackedAttend([len(at)]), rows)
        trainers = target_logprobs(tiny.decoder, hidden, at, tokens[1:], rows)
        logits = torch.func.functional_call(
            tiny.model, merged(tiny.model, adapter), (tokens[None, :-1],), tie_weights=False
        )
        theirs = torch.log_softmax(logits.logits[0], -1).gather(1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(found, trainers.numpy(), atol=1e-4)
    np.testing.assert_allclose(trainers.numpy(), theirs.numpy(), atol=1e-4)


def test_five_steps_on_everything_are_those_of_autograd_and_adamw(tiny: Tiny, tmp_path: Path) -> None:
    """The autograd goes through a LoRA written by hand on every module that can be trained."""
    bench = Bench(tiny.decoder, tmp_path / "blobs")
    bench.ok(bench.create("a", rank=3), bench.create("neighbour", rank=5))
    start = bench.run("a").adapter
    sure = torch.ones_like(start.flat, dtype=torch.bool)
    flat = start.flat.clone().requires_grad_()
    optimizer = torch.optim.AdamW([flat], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(STEPS):
        data = ce_data([17, 40], seed=step)
        op, other = bench.fb("a", data), bench.fb("neighbour", ce_data([30], seed=9))
        done = bench.ok(op, other, bench.optim("a", learning_rate=RATE, weight_decay=0.1, eps=1e-8))
        weights = merged(tiny.model, Adapter(start.shape, flat, start.scale))

        def logits(tokens: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
            found: Tensor = torch.func.functional_call(tiny.model, weights, (tokens,), tie_weights=False).logits
            return found

        _step(optimizer, data, output(done[op.op_id])[0], logits)
        assert flat.grad is not None
        # A weight whose gradient is only rounding moves by the whole learning rate, up or down.
        sure &= (flat.grad == 0) | (flat.grad.abs() > ROUNDING)
    assert sure.float().mean() > 0.99
    torch.testing.assert_close(bench.run("a").adapter.flat[sure], flat.detach()[sure], atol=1e-4, rtol=0)


def _step(optimizer: torch.optim.Optimizer, data: list[Any], found: list[Any], logits: Any) -> None:
    """Check the log-probabilities of a batch against those of `logits`, and step on their weighted sum."""
    loss = torch.zeros(())
    for datum, got in zip(data, found, strict=True):
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        lp = torch.log_softmax(logits(torch.from_numpy(datum.tokens).long()[None])[0], -1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(got, lp.detach().numpy(), atol=1e-4)
        loss = loss - (lp * torch.from_numpy(datum.inputs["weights"])).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_an_adapter_of_pefts_is_imported_and_trained_as_peft_trains_it(tiny: Tiny, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = type(tiny.model).from_pretrained(tiny.folder)
    lora = LoraConfig(r=4, lora_alpha=ALPHA.get(tiny.name, 8), target_modules=modules(tiny), init_lora_weights=False)
    theirs = get_peft_model(model, lora)
    theirs.save_pretrained(tmp_path / "peft")
    adapter = _imported(tiny, tmp_path / "peft", tmp_path / "ours")
    tokens, positions = packed([20], tiny.vocab)
    weights = [w for name, w in theirs.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    mine = torch.nn.Parameter(adapter.flat)
    stepping = torch.optim.AdamW([mine], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(STEPS):
        grad = Adapter.zeros(adapter.shape)
        rows = LoraRows([0, 20], [Adapter(adapter.shape, mine.data, adapter.scale)], [grad])
        hidden = tiny.decoder(tokens, positions, PackedAttend([20]), rows)
        lp = target_logprobs(tiny.decoder, hidden, positions, tokens.flip(0), rows)
        (-lp.sum()).backward()
        wanted = torch.log_softmax(theirs(tokens[None]).logits[0], -1).gather(1, tokens.flip(0)[:, None])[:, 0]
        torch.testing.assert_close(lp, wanted, atol=1e-4, rtol=0)
        optimizer.zero_grad()
        (-wanted.sum()).backward()
        optimizer.step()
        mine.grad = grad.flat
        stepping.step()
    theirs.save_pretrained(tmp_path / "after")
    torch.testing.assert_close(_imported(tiny, tmp_path / "after", tmp_path / "b").flat, mine.data, atol=1e-4, rtol=0)


def modules(tiny: Tiny) -> list[str]:
    """The modules that stock peft can wrap: linears, so not the experts that lie in one tensor."""
    latent, mlp = tiny.decoder.config.latent, ["gate_proj", "up_proj", "down_proj"]
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if tiny.decoder.config.delta is not None:
        attention += [*(f"in_proj_{name}" for name in tiny.decoder.config.delta.projections), "out_proj"]
    if tiny.decoder.config.mamba is not None:
        attention += ["in_proj"]  # peft refuses out_proj
    if tiny.decoder.config.fused_qkv:
        attention = ["query_key_value", "dense"]
    if latent:
        attention = ["q_a_proj" if latent.q_rank else "q_proj", "kv_a_proj_with_mqa", "o_proj"]
    return attention + ([] if tiny.decoder.config.num_experts else mlp)


def _imported(tiny: Tiny, peft: Path, folder: Path) -> Adapter:
    folder.mkdir()
    read_adapter(peft, tiny.decoder.config).write(folder, "tiny")
    return load_adapter(folder, tiny.decoder.config).adapter


def test_an_export_loads_in_stock_peft_and_gives_our_logprobs(tiny: Tiny, tmp_path: Path) -> None:
    mlp = not tiny.decoder.config.num_experts
    adapter = random_adapter(tiny.decoder, 4, 1, train_mlp=mlp, train_unembed=False)
    arrays = {name: view.numpy() for name, view in adapter.views.items()}
    write_export(tmp_path, arrays, base_model="tiny", rank=4, alpha=8.0, in_size=adapter.shape.in_size)
    folder = tmp_path / "peft" if (tmp_path / "peft").exists() else tmp_path
    model = type(tiny.model).from_pretrained(tiny.folder)
    if tiny.decoder.config.mamba is not None:
        with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba-based models"):
            PeftModel.from_pretrained(model, folder)
        model = type(tiny.model).from_pretrained(tiny.folder)
        model.config.model_type = "a model whose kernels it does not know"
    theirs = PeftModel.from_pretrained(model, folder).eval()
    tokens, positions = packed([30], tiny.vocab)
    rows = LoraRows([0, 30], [adapter])
    with torch.no_grad():
        mine = tiny.decoder.logits(tiny.decoder(tokens, positions, PackedAttend([30]), rows), rows)
        torch.testing.assert_close(mine, theirs(tokens[None]).logits[0], atol=1e-4, rtol=1e-4)
        assert (mine - tiny.model(tokens[None]).logits[0]).abs().max() > 0.1


@pytest.mark.parametrize("isolation", ["padded", "per-segment"])
def test_a_run_has_the_same_bits_in_any_company(tiny: Tiny, isolation: str) -> None:
    """Log-probabilities and gradients of one group alone are those between groups of other ranks and targets, one of
    which has the pair that stock PEFT trains in a recurrence."""
    adapters = [
        random_adapter(tiny.decoder, 3, 5),
        random_adapter(tiny.decoder, 6, 7, train_attn=False),
        random_adapter(tiny.decoder, 5, 8, train_mlp=False, whole=True),
    ]
    mine, lengths = [19, 40], [33, 19, 40, 7]
    tokens, positions = packed(lengths, tiny.vocab)
    own = slice(33, 33 + sum(mine))
    tiny.decoder.isolation = isolation
    try:
        alone = _computed(tiny, tokens[own], positions[own], mine, [0, sum(mine)], adapters[:1])
        crowd = [adapters[1], adapters[0], adapters[2]]
        together = _computed(tiny, tokens, positions, lengths, [0, 33, 92, 99], crowd)
    finally:
        tiny.decoder.isolation = "padded"
    assert torch.equal(alone[0], together[0][own])
    assert torch.equal(alone[1][0], together[1][1])


def test_recomputed_layers_and_replayed_routes_change_no_bit(tiny: Tiny) -> None:
    lengths, adapters = [33, 19, 40], [random_adapter(tiny.decoder, 3, 5), random_adapter(tiny.decoder, 6, 7)]
    tokens, positions = packed(lengths, tiny.vocab)
    chosen: list[Tensor] = []
    with torch.no_grad():
        rows = LoraRows([0, 33, 92], adapters)
        tiny.decoder(tokens, positions, PackedAttend(lengths), rows, lambda _, experts: chosen.append(experts))
    wanted = _computed(tiny, tokens, positions, lengths, [0, 33, 92], adapters)
    replayed = _computed(tiny, tokens, positions, lengths, [0, 33, 92], adapters, chosen)
    tiny.decoder.activation_budget_bytes = 0
    try:
        recomputed = _computed(tiny, tokens, positions, lengths, [0, 33, 92], adapters)
    finally:
        tiny.decoder.activation_budget_bytes = None
    for found in (replayed, recomputed):
        assert torch.equal(found[0], wanted[0])
        assert all(torch.equal(one, other) for one, other in zip(found[1], wanted[1], strict=True))


def _computed(tiny: Tiny, *given: Any) -> tuple[Tensor, list[Tensor]]:
    return computed(tiny.decoder, *given)


def computed(
    decoder: Decoder,
    tokens: Tensor,
    positions: Tensor,
    lengths: list[int],
    offsets: list[int],
    adapters: list[Adapter],
    routes: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    grads = [Adapter.zeros(adapter.shape) for adapter in adapters]
    rows = LoraRows(offsets, adapters, grads)
    replay = torch.stack(list(routes)) if routes else None
    hidden = decoder(tokens, positions, PackedAttend(lengths), rows, replay_MTK=replay)
    lp = target_logprobs(decoder, hidden, torch.arange(len(tokens)), (tokens * 7 + 3) % decoder.config.vocab_size, rows)
    lp.sum().backward()
    return lp.detach(), [grad.flat for grad in grads]
