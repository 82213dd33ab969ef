"""Text of generated tokens, which only stop strings need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from workers.generator.stop import DecodeText


def text_decoder(model_folder: Path) -> DecodeText | None:
    """Decodes with the model's tokenizer.json, read on first use; None when the model has none. Special tokens are
    spelled out, so that a stop string may be one."""
    file = model_folder / "tokenizer.json"
    if not file.is_file():
        return None
    loaded: list[Tokenizer] = []

    def decode(tokens: Sequence[int]) -> str:
        if not loaded:
            loaded.append(Tokenizer.from_file(str(file)))
        text: str = loaded[0].decode(list(tokens), skip_special_tokens=False)
        return text

    return decode
