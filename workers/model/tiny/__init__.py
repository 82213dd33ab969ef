"""The built-in base model: a real Qwen3-MoE of about three million parameters, committed with the code.

`weftd serve` without `--model` serves it, and tests and demos train on it, so a checkout works with no download.
`weights/` is an ordinary Hugging Face model folder. `python -m tools.tiny_model.pretrain` makes all of it; nobody
else's text is in it.
"""

from pathlib import Path

TINY_NAME = "weft/tiny-moe"
TINY_PATH: Path = Path(__file__).resolve().parent / "weights"

__all__ = ["TINY_NAME", "TINY_PATH"]
