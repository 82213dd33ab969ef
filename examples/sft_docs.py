"""Supervised fine-tuning on conversations, then sampling.

    python examples/sft_docs.py --steps 30                    # Python's own signatures and docstrings
    python examples/sft_docs.py --data my.jsonl --steps 100   # any JSONL of the same form

A line of the JSONL is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}.
Without --data the conversations are made on the spot from the standard library: "What does textwrap.dedent(text) do?"
and the first sentence of its docstring. Only the assistant's words carry weight; the loss is their sum, reported per
token.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import weft
from weft import types

MODULES = """
argparse ast asyncio base64 bisect calendar collections colorsys copy csv datetime decimal difflib dis email
enum filecmp fileinput fnmatch fractions functools gettext glob gzip hashlib heapq hmac html inspect io
ipaddress itertools json keyword linecache locale logging math mimetypes operator os pathlib pickle platform
pprint queue random re sched secrets shelve shlex shutil signal socket sqlite3 statistics string struct
subprocess tarfile tempfile textwrap threading time timeit token tokenize traceback types unicodedata
urllib.parse uuid warnings wave weakref zipfile
"""
BATCH = 32
LEARNING_RATE = 2e-3
RANK = 16
MAX_LENGTH = 160
#: Batches submitted before the first one is waited for, so that the trainer always has the next one at hand.
AHEAD = 2

Conversation = list[dict[str, str]]
Step = dict[str, Any]


def conversations() -> Iterator[Conversation]:
    """Questions and answers about the functions of the standard library, from their own docstrings."""
    for name in MODULES.split():
        module = importlib.import_module(name)
        for attribute, value in sorted(vars(module).items()):
            if attribute.startswith("_") or not callable(value) or not inspect.getdoc(value):
                continue
            try:
                signature = str(inspect.signature(value))
            except (TypeError, ValueError):
                continue
            sentence = re.split(r"(?<=[.!?])\s|\n\n", inspect.getdoc(value) or "", maxsplit=1)[0]
            answer = " ".join(sentence.split())
            if 10 <= len(answer) <= 120 and len(signature) <= 60 and " at 0x" not in signature:
                question = f"What does {name}.{attribute}{signature} do?"
                yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_jsonl(path: Path) -> int:
    """Write the conversations to `path`; returns how many there are."""
    lines = [json.dumps({"messages": c}) for c in conversations()]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def read_jsonl(path: Path) -> list[Conversation]:
    """`ValueError` names the line that is something else."""
    found: list[Conversation] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                found.append(json.loads(line)["messages"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path}, line {number}: not of the form {{"messages": [...]}} ({error!r})') from None
    if not found:
        raise ValueError(f"{path} has no conversation")
    return found


def datum(tokenizer: Any, conversation: Conversation) -> types.Datum | None:
    """A conversation as training data, weight 1 on every token the assistant says; None if it is too long."""
    tokens: list[int] = []
    weights: list[float] = []
    for i, message in enumerate(conversation):
        said = message["role"] == "assistant"
        before = (
            tokenizer.apply_chat_template(conversation[:i], add_generation_prompt=True, return_dict=False)
            if said
            else None
        )
        upto = tokenizer.apply_chat_template(conversation[: i + 1], return_dict=False)
        start = len(before) if before is not None else len(upto)
        weights += [0.0] * (start - len(tokens)) + [1.0] * (len(upto) - start)
        tokens = list(upto)
    if len(tokens) > MAX_LENGTH:
        return None
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def run(
    service: weft.ServiceClient,
    base_model: str,
    data: list[Conversation],
    steps: int,
    seed: int = 0,
    on_step: Callable[[Step], None] = print,
) -> str:
    """Train for `steps` batches, then sample an answer. Returns the id of the run."""
    rng = random.Random(seed)
    training = service.create_lora_training_client(base_model=base_model, rank=RANK, seed=seed).result()
    tokenizer = training.get_tokenizer()
    made = [d for d in (datum(tokenizer, c) for c in data) if d is not None]
    rng.shuffle(made)
    ahead: deque[tuple[int, float, Any, Any]] = deque()
    for step in range(steps + AHEAD):
        if step < steps:
            batch = [made[(step * BATCH + i) % len(made)] for i in range(BATCH)]
            backward = training.forward_backward(batch, "cross_entropy")
            update = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            said = sum(float(d.loss_fn_inputs["weights"].to_numpy().sum()) for d in batch)
            ahead.append((step, said, backward, update))
        if step >= AHEAD:
            done, said, backward, update = ahead.popleft()
            loss = backward.result().metrics["loss:sum"] / said
            update.result()
            weft.log(training, {"loss": loss}, step=done)
            on_step({"step": done, "of": steps, "loss": loss, "data": BATCH})
    sampler = training.save_weights_and_get_sampling_client().result()
    question = [{"role": "user", "content": "What does os.path.join(a, *p) do?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = sampler.sample(
        types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=40, temperature=0.0)
    ).result()
    on_step({"step": steps, "of": steps, "sample": tokenizer.decode(answer.sequences[0].tokens)})
    return training.model_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="weft/tiny-moe")
    parser.add_argument("--data", type=Path, help="a JSONL of conversations; default: made from the standard library")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    try:
        data = read_jsonl(args.data) if args.data else list(conversations())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(data)} conversations")
    with weft.ServiceClient() as service:
        run(service, args.base_model, data, args.steps)


if __name__ == "__main__":
    main()
