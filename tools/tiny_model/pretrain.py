"""Makes the tiny base model from nothing: corpus, tokenizer, training, and the model folder.

    OMP_NUM_THREADS=1 python -m tools.tiny_model.pretrain --out DIR

One core, six minutes when it is free and twelve when it is shared; no network. Everything is seeded and runs on one
thread, so the same machine with the same torch gives the same weights bit for bit (a test repeats three steps). Another
processor or torch rounds sums in another order, training carries that on, and the outcome is another model: the
tokenizer is the same, the rest only alike. The committed weights ended at a loss of about 0.88 (means of 50 steps
vary by 0.03); they answer one-digit sums rightly 17 % of the time sampled, 58 % greedily; the rows of the
tokens of tools, files and media, which the corpus never has, are copies of `<think>`'s, because they came later. What a
replacement has to meet are the bounds in the tests.

Training is transformers' own class in float32 and plain AdamW; the load-balancing loss keeps every expert in use. The
weights are stored in bfloat16, and the accuracy printed last is that of the stored weights. See `corpus.py` on why the
model is meant to get most sums wrong when sampled.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tools.tiny_model.corpus import END_OF_TEXT, chat, documents
from tools.tiny_model.make_tokenizer import CONTEXT_LENGTH, train_tokenizer, write_tokenizer

IGNORED = -100
DIGIT_PAIRS = [(a, b) for a in range(10) for b in range(10)]
SAMPLE_PROMPTS = (
    "<|im_start|>user\nWhat is 3 + 5?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat day comes after Monday?<|im_end|>\n<|im_start|>assistant\n",
    "3 + 5 =",
    "def read_lines(path):\n",
)


@dataclass(frozen=True)
class Recipe:
    """How to train: sizes in tokens, learning rate over steps (warm-up, then down linearly to a twentieth).

    `schooled` is the share of the steps whose chats answer sums rightly, before those that answer them carelessly.
    """

    steps: int = 1000
    schooled: float = 0.6
    batch_rows: int = 12
    row_tokens: int = 192
    learning_rate: float = 3e-3
    warmup_steps: int = 40
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    seed: int = 7

    def rate(self, step: int) -> float:
        """Learning rate of `step`, counted from 0."""
        left = 1.0 - step / self.steps
        return self.learning_rate * min((step + 1) / self.warmup_steps, 0.05 + 0.95 * left)


@dataclass(frozen=True)
class Batch:
    """Rows of whole documents; `positions_BT` start again with each document, which also keeps attention within it."""

    tokens_BT: torch.Tensor
    positions_BT: torch.Tensor
    labels_BT: torch.Tensor


def tiny_config(tokenizer: Tokenizer) -> Qwen3MoeConfig:
    """The architecture: 4 layers of 8 experts, 2 of them per token."""
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id(END_OF_TEXT)
    return Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
    )


def batches(tokenizer: Tokenizer, recipe: Recipe) -> Iterator[Batch]:
    """Endless batches; a row is filled with whole documents, and the last one is cut at the row's end.

    Two kinds of token are never labels: the first of a document, which nothing precedes, and `<think>`, which belongs
    to prompts that switch thinking off: the model must not open it itself.
    """
    schooling, exercises = documents(recipe.seed, right=1.0), documents(recipe.seed + 1)
    end: int = tokenizer.encode(END_OF_TEXT).ids[0]
    think: int = tokenizer.encode("<think>").ids[0]
    for step in itertools.count():
        source = schooling if step < recipe.schooled * recipe.steps else exercises
        rows = [_row(tokenizer, source, end, recipe.row_tokens) for _ in range(recipe.batch_rows)]
        tokens_BT = torch.tensor([tokens for tokens, _ in rows])
        positions_BT = torch.tensor([positions for _, positions in rows])
        labels_BT = tokens_BT.masked_fill(tokens_BT.eq(think) | positions_BT.eq(0), IGNORED)
        yield Batch(tokens_BT, positions_BT, labels_BT)


def _row(tokenizer: Tokenizer, source: Iterator[str], end: int, length: int) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    positions: list[int] = []
    while len(tokens) < length:
        document = [*tokenizer.encode(next(source)).ids, end]
        tokens += document
        positions += range(len(document))
    return tokens[:length], positions[:length]


def train(tokenizer: Tokenizer, recipe: Recipe, *, report_every: int = 50) -> tuple[Any, list[float]]:
    """A trained model in float32 and the language-model loss of every step."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    model: Any = Qwen3MoeForCausalLM._from_config(
        tiny_config(tokenizer), attn_implementation="sdpa", experts_implementation="eager"
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), foreach=True)
    source, losses, started_s = batches(tokenizer, recipe), list[float](), time.monotonic()
    model.train()
    for step in range(recipe.steps):
        losses.append(_train_step(model, optimizer, next(source), recipe, step))
        if (step + 1) % report_every == 0:
            _report(model, tokenizer, losses[-report_every:], step + 1, recipe.steps, started_s)
    return model.eval(), losses


def _train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, recipe: Recipe, step: int) -> float:
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    out = model(
        input_ids=batch.tokens_BT,
        position_ids=batch.positions_BT,
        output_router_logits=True,
        use_cache=False,
    )
    loss = cross_entropy(out.logits[:, :-1].flatten(0, 1), batch.labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
    (loss + model.router_aux_loss_coef * _imbalance(model, out.router_logits)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _imbalance(model: Any, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The load-balancing loss (Switch Transformer, eq. 4) as the mean over layers.

    transformers' own sums the layers' loads first, which lets an expert idle in one layer if it is busy in another.
    """
    config = model.config
    losses = [
        load_balancing_loss_func((logits_NE,), config.num_experts, config.num_experts_per_tok)
        for logits_NE in router_logits
    ]
    return torch.stack(losses).mean()


def _report(model: Any, tokenizer: Tokenizer, losses: list[float], step: int, steps: int, started_s: float) -> None:
    spent_s = time.monotonic() - started_s
    accuracy = sum_accuracy(model, tokenizer, [(a, (3 * a + 1) % 10) for a in range(10)])
    print(
        f"step {step}/{steps}  loss {sum(losses) / len(losses):.3f}  sums sampled {accuracy.sampled:.2f} "
        f"greedy {accuracy.greedy:.2f}  {spent_s:.0f} s, {spent_s / step * (steps - step):.0f} s to go",
        flush=True,
    )


def write_model(model: Any, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors, in bfloat16.

    The count of experts goes by `num_experts`, as in every published Qwen3-MoE.
    """
    config = model.config
    model.to(torch.bfloat16).save_pretrained(folder)
    architecture = json.loads((folder / "config.json").read_text())
    architecture["num_experts"] = architecture.pop("num_local_experts", config.num_experts)
    (folder / "config.json").write_text(json.dumps(architecture, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").chmod(0o644)
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": [config.eos_token_id, config.pad_token_id],
        "pad_token_id": config.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


@dataclass(frozen=True)
class SumAccuracy:
    """How well a model does small sums, worked out exactly instead of sampled: its chance at temperature 1 of saying
    exactly the right number and stopping is the product of the probabilities of the answer's tokens and `<|im_end|>`.
    Shares of right answers: `sampled` at temperature 1, `greedy` at temperature 0."""

    sampled: float
    greedy: float


def sum_prompt(a: int, b: int) -> str:
    """The question for a sum, up to where the answer starts."""
    return chat([("user", f"What is {a} + {b}?")]) + "<|im_start|>assistant\n"


@torch.no_grad()
def sum_accuracy(model: Any, tokenizer: Tokenizer, pairs: list[tuple[int, int]] = DIGIT_PAIRS) -> SumAccuracy:
    """Accuracy of `model` (a transformers causal LM) over the sums `pairs`, no randomness involved."""
    was_training = model.training
    model.eval()
    rows = [_score(model, tokenizer, a, b) for a, b in pairs]
    model.train(was_training)
    return SumAccuracy(sum(p for p, _ in rows) / len(rows), sum(hit for _, hit in rows) / len(rows))


def _score(model: Any, tokenizer: Tokenizer, a: int, b: int) -> tuple[float, bool]:
    """The probability of the right answer, and whether greedy decoding produces it."""
    prompt = tokenizer.encode(sum_prompt(a, b)).ids
    answer = tokenizer.encode(f"{a + b}<|im_end|>").ids
    logits_TV = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    target_T = torch.tensor(answer)
    logprob_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])
    return float(logprob_T.sum().exp()), bool((logits_TV.argmax(-1) == target_T).all())


def main() -> None:
    """Command line: train and write the model folder."""
    parser = argparse.ArgumentParser(description="Make the built-in tiny base model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    options = parser.parse_args()
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(options.seed)
    write_tokenizer(tokenizer, folder)
    model, _ = train(tokenizer, Recipe(steps=options.steps, seed=options.seed))
    write_model(model, folder)
    stored: Any = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accuracy = sum_accuracy(stored, tokenizer)
    for prompt in SAMPLE_PROMPTS:
        tokens = torch.tensor([tokenizer.encode(prompt).ids])
        said = stored.generate(tokens, max_new_tokens=24, do_sample=False)[0].tolist()
        print(repr(tokenizer.decode(said, skip_special_tokens=False)))
    print(f"{stored.num_parameters()} parameters; sums sampled {accuracy.sampled:.3f} greedy {accuracy.greedy:.3f}")


if __name__ == "__main__":
    main()
