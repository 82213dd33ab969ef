"""A downloaded adapter as a folder that explains and checks itself: its files in one layout, README.md, verify.py."""

from __future__ import annotations

import json
from pathlib import Path

from weft.exports.layout import CONFIG_FILE, Layout, fit_for_vllm
from weft.version import __version__

_HEADING = "# An adapter from Weft"

_FOR_PEFT = """\
In PEFT's layout, for

    from peft import PeftModel
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), "{folder}")

Versions. An adapter of a dense model loads everywhere. One with experts (mixture of experts) loads rightly with

| transformers | peft |
|---|---|
| 4.57 | 0.17 to 0.21 |
| 5.5 | 0.19 to 0.21 |
| 5.10 to 5.23 | 0.20 to 0.21 |

and **wrongly, without a word**, with transformers 5 and peft 0.18, which drops the experts. Other pairs that were tried
refuse it with an error. So check once:

    python verify.py --base BASE

compares log-probabilities with the server's (reference.json). BASE is the base model, by its folder or its name on the
hub.
"""

_FOR_VLLM = """\
In PEFT's layout, as vLLM reads it:

    vllm serve BASE --enable-lora --max-lora-rank {rank} --lora-modules mine={folder}
"""

#: The values of --max-lora-rank, of vLLM 0.32.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_LEFT_OUT = """\

**Left out: {modules}.** This is not the whole adapter, and its log-probabilities are not those of the server: vLLM
takes an adapter's unembedding without a word and then gives wrong prompt log-probabilities. To sample from all that was
trained, sample from Weft's own engine, or train with `train_unembed=False`.
"""


def finish(folder: Path, path: str, layout: Layout, leave_out_unembedding: bool) -> list[Path]:
    """Fit the files of the checkpoint `path` in `folder` to their reader, and explain them there; the new files."""
    if layout == "tinker":
        return []
    left_out = fit_for_vllm(folder, leave_out_unembedding) if layout == "vllm" else []
    written = [_readme(folder, path, layout, left_out)]
    if not left_out:
        script = folder / "verify.py"
        script.write_text(Path(__file__).with_name("verify.py").read_text())
        written.append(script)
    return [file for file in written if file is not None]


def _readme(folder: Path, path: str, layout: Layout, left_out: list[str]) -> Path | None:
    """README.md, unless somebody else's is there."""
    file = folder / "README.md"
    if file.exists() and not file.read_text(errors="replace").startswith(_HEADING):
        return None
    text = f"{_HEADING}\n\n{path}, fetched with weft {__version__}.\n\n"
    text += (_FOR_PEFT if layout == "peft" else _FOR_VLLM).format(folder=folder.resolve().name, rank=_rank(folder))
    if left_out:
        text += _LEFT_OUT.format(modules=", ".join(left_out))
    file.write_text(text)
    return file


def _rank(folder: Path) -> int | str:
    """What vLLM has to make room for: the largest rank of a module, up to the next that it knows."""
    if not (folder / CONFIG_FILE).is_file():
        return "RANK"
    config = json.loads((folder / CONFIG_FILE).read_text())
    largest = max(config.get("r", 0), *config.get("rank_pattern", {}).values(), 0)
    return next((rank for rank in _VLLM_RANKS if largest <= rank), "RANK")
