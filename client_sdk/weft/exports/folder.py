"""A downloaded adapter as a folder that explains and checks itself: its files in one layout, README.md, verify.py."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.exports.layout import CONFIG_FILE, REFERENCE, Layout, fit_for_vllm
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
refuse it with an error.

That holds where the base has nothing but experts in its MLPs: Qwen3 MoE, Mixtral, OLMoE. With transformers 5 peft 0.21
drops, **without a word**, dense layers and shared experts that are beside experts (GLM-4.5, GLM-4.7-Flash, DeepSeek-V3,
Qwen3-Next), and the experts of Qwen3.5 MoE, gpt-oss and Nemotron. Such adapters are sampled rightly by Weft. So check
once:

    python verify.py --base BASE

compares log-probabilities with the server's (reference.json). BASE is the base model, by its folder or its name on the
hub.

Nemotron. PEFT refuses an adapter that trains attention, since kernels of mamba-ssm read `out_proj` past it; the code of
transformers does not. Before PeftModel.from_pretrained (and "nemotron_h" again after it):

    base.config.model_type = ""

Merging. Where the adapter trains the unembedding and the base has it tied to its embedding (as small models have),
merge_and_unload changes the embedding, too, and gives another model. Part them before PeftModel.from_pretrained:

    base.config.tie_word_embeddings = False
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
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


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Create `folder` for the block. After an error, or if the program ends meanwhile, it is removed again if it is new
    and empty. An OSError without a name, as of a full disk, gets the folder's."""
    was = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # Called at the end of a program, too, whose threads see no error then: the latest first, so after what lies in it.
    undo = weakref.finalize(made, _remove_empty, folder)
    if was:
        undo.detach()
    try:
        yield
    except BaseException as error:
        undo()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder)
        raise
    undo.detach()


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def finish(part: Path, folder: Path, path: str, layout: Layout, leave_out_unembedding: bool) -> list[Path]:
    """Convert the files of checkpoint `path`, which lie in `part` (a folder inside of `folder`), for their reader, add
    README.md and verify.py, and move all of them into `folder`. Returns their paths. An error before the move leaves
    `folder` as it was."""
    if layout != "tinker":
        left_out = fit_for_vllm(part, leave_out_unembedding) if layout == "vllm" else []
        _readme(part, folder, path, layout, left_out)
        if not left_out:
            (part / "verify.py").write_text(Path(__file__).with_name("verify.py").read_text())
    return _moved(part, folder)


def _moved(part: Path, folder: Path) -> list[Path]:
    """Move the files of `part` into the folder. The old configuration is deleted first and the new one written last:
    without a configuration no reader loads a folder that is half of this adapter and half of another. The old reference
    log-probabilities are deleted, too."""
    names = [file.relative_to(part) for file in part.rglob("*") if file.is_file()]
    names.sort(key=lambda name: (name.name == CONFIG_FILE, name))
    for name in [Path(REFERENCE), *(each for each in names if each.name == CONFIG_FILE)]:
        (folder / name).unlink(missing_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part / name, folder / name)
    return [folder / name for name in sorted(names)]


def _readme(part: Path, folder: Path, path: str, layout: Layout, left_out: list[str]) -> None:
    """Write README.md, unless the folder has one that Weft did not write."""
    theirs = folder / "README.md"
    if theirs.exists() and not theirs.read_text(errors="replace").startswith(_HEADING):
        return
    text = f"{_HEADING}\n\n{path}, fetched with weft {__version__}.\n\n"
    text += (_FOR_PEFT if layout == "peft" else _FOR_VLLM).format(folder=folder.resolve().name, rank=_rank(part))
    if left_out:
        text += _LEFT_OUT.format(modules=", ".join(left_out))
    (part / theirs.name).write_text(text)


def _rank(folder: Path) -> int | str:
    """The value of vLLM's --max-lora-rank: the largest rank of a module, rounded up to one that vLLM accepts."""
    if not (folder / CONFIG_FILE).is_file():
        return "RANK"
    config = json.loads((folder / CONFIG_FILE).read_text())
    largest = max(config.get("r", 0), *config.get("rank_pattern", {}).values(), 0)
    return next((rank for rank in _VLLM_RANKS if largest <= rank), "RANK")
