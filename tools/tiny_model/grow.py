"""Gives the committed model the tokens that `make_tokenizer` has and it has not: `python -m tools.tiny_model.grow`.

Each new token begins as `<think>`, which the corpus never has either: its rows in the embedding and in the head are
copies. So the model all but never draws it, and all other probabilities stay what they were, to 1e-4.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.tiny_model.make_tokenizer import VOCAB_SIZE, add_tokens, write_tokenizer
from workers.model.tiny import TINY_PATH


def grow(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    like = tokenizer.token_to_id("<think>")
    add_tokens(tokenizer)
    write_tokenizer(tokenizer, folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows_VD = weights[name]
        copies = rows_VD[like].expand(VOCAB_SIZE - rows_VD.shape[0], -1)
        weights[name] = torch.cat([rows_VD, copies]).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE}, indent=2) + "\n")


if __name__ == "__main__":
    grow(TINY_PATH)
