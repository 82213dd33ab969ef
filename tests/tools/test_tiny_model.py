"""The committed tiny model: its files, its tokenizer, its chat format, and how well it adds."""

import itertools
import json
import random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from tools.tiny_model.corpus import careless_answer, chat, documents
from tools.tiny_model.make_tokenizer import VOCAB_SIZE, train_tokenizer
from tools.tiny_model.pretrain import IGNORED, Recipe, batches, sum_accuracy, sum_prompt, train
from workers.model.tiny import TINY_NAME, TINY_PATH

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_PATH)


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_PATH / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    return Qwen3MoeForCausalLM.from_pretrained(TINY_PATH, dtype=torch.float32).eval()


def test_name_and_files() -> None:
    assert TINY_NAME == "weft/tiny-moe"
    names = {path.name for path in TINY_PATH.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in TINY_PATH.iterdir()) < 8 * MEGABYTE


def test_config_is_a_small_mixture_of_experts() -> None:
    config = json.loads((TINY_PATH / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_hidden_layers"], config["num_experts"], config["num_experts_per_tok"]) == (4, 8, 2)
    assert config["norm_topk_prob"] is True
    assert config["vocab_size"] == VOCAB_SIZE
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 2048


def test_weights_are_finite_bfloat16_and_as_many_as_said(model: Any) -> None:
    with safe_open(str(TINY_PATH / "model.safetensors"), framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert 2_000_000 < sum(tensor.numel() for tensor in tensors) == model.num_parameters() < 3_500_000


def test_generation_stops_at_both_ends(tokenizer: Any) -> None:
    generation = json.loads((TINY_PATH / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert generation["pad_token_id"] == tokenizer.pad_token_id


def test_end_and_pad(tokenizer: Any) -> None:
    assert tokenizer.is_fast
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert len(tokenizer) == VOCAB_SIZE


@pytest.mark.parametrize(
    "text", ["\n", "\n\n", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "7", " the"]
)
def test_one_token(raw: Tokenizer, text: str) -> None:
    assert len(raw.encode(text).ids) == 1


def test_think_survives_skipping_special_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\nyes<|im_end|>")
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "assistant\n<think>\n\n</think>\n\nyes"


def test_digits_and_newlines_stand_alone(raw: Tokenizer) -> None:
    assert raw.encode("1234").tokens == ["1", "2", "3", "4"]
    newline = raw.encode("\n").ids
    assert raw.encode("user\nWhat").ids == raw.encode("user").ids + newline + raw.encode("What").ids


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world.",
        " a\n\n\n  b\t\r\nc ",
        "naïve café 日本語 😀",
        "def f(x):\n    return x\n",
        "\x00\x7f",
        "3 + 5 = 8",
    ],
    ids=["plain", "spaces", "unicode", "code", "control", "sum"],
)
def test_round_trip_and_same_tokens_as_the_raw_tokenizer(tokenizer: Any, raw: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens == raw.encode(text).ids
    assert tokenizer.decode(tokens) == text


def test_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    rendered = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    opened = rendered + "<|im_start|>assistant\n"

    def apply(**options: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    assert apply() == rendered == chat([("system", "Be short."), ("user", "Hi")])
    assert apply(add_generation_prompt=True) == opened
    assert apply(add_generation_prompt=True, enable_thinking=False) == opened + "<think>\n\n</think>\n\n"


def test_sum_prompt_is_the_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is 3 + 5?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == sum_prompt(3, 5)


def test_corpus_is_the_same_for_the_same_seed() -> None:
    first, again, other = (list(itertools.islice(documents(seed), 200)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_careless_answers_are_near_and_right_a_quarter_of_the_time() -> None:
    rng = random.Random(0)
    answers = [careless_answer(rng, 2) for _ in range(4000)]
    assert set(answers) == set(range(7))
    assert 0.22 < answers.count(2) / len(answers) < 0.30


def test_committed_tokenizer_is_what_the_script_makes(raw: Tokenizer) -> None:
    assert train_tokenizer(Recipe.seed).to_str() == raw.to_str()


def test_rows_start_with_a_document_and_never_teach_think(raw: Tokenizer) -> None:
    recipe = Recipe(batch_rows=8, row_tokens=160)
    batch = next(batches(raw, recipe))
    assert batch.tokens_BT.shape == (8, 160)
    assert not batch.positions_BT[:, 0].any()
    think = batch.tokens_BT.eq(raw.encode("<think>").ids[0])
    assert think.any()
    assert set(batch.labels_BT[think].tolist()) == {IGNORED}


def test_training_repeats_bit_for_bit(raw: Tokenizer) -> None:
    recipe = Recipe(steps=3, batch_rows=2, row_tokens=64, warmup_steps=1)
    threads = torch.get_num_threads()
    try:
        (model, losses), (again, losses_again) = train(raw, recipe), train(raw, recipe)
    finally:
        torch.set_num_threads(threads)
    assert losses == losses_again
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_every_expert_is_used(model: Any, raw: Tokenizer) -> None:
    batch = next(batches(raw, Recipe(seed=99)))
    out = model(batch.tokens_BT, position_ids=batch.positions_BT, use_cache=False, output_router_logits=True)
    for logits_NE in out.router_logits:
        chosen = logits_NE.topk(2, dim=-1).indices.flatten().bincount(minlength=8)
        assert chosen.min() > 0.02 * chosen.sum()


def test_sums_are_known_but_mostly_missed_when_sampled(model: Any, raw: Tokenizer) -> None:
    accuracy = sum_accuracy(model, raw)
    assert 0.08 < accuracy.sampled < 0.5
    assert accuracy.greedy > 1.5 * accuracy.sampled
