"""Which files of a stored adapter a folder gets, and under which names: one layout for each kind of reader.

A server keeps two layouts where they differ (experts, a trained unembedding): Tinker's at the root, PEFT's in `peft/`.
Stock PEFT reads Tinker's as attention alone, and does not say so; so a download has one layout, at its root.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

#: "peft" is for PEFT and transformers, "vllm" for vLLM, "tinker" for Tinker's cookbook: as the server keeps it.
Layout = Literal["peft", "vllm", "tinker"]

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
#: The server's log-probabilities with an adapter, for `weft verify`.
REFERENCE = "reference.json"
UNEMBEDDING = "lm_head"
_PEFT = "peft/"
_COMPLETE = "checkpoint_complete"


class ExportError(ValueError):
    """The adapter cannot be written for this reader; the message says why and what can be done."""


def selected(names: Iterable[str], layout: Layout) -> dict[str, str]:
    """The files to keep, by name, each with the name that it gets."""
    given = list(names)
    if layout == "tinker":
        return {name: name for name in given}
    if any(name.startswith(_PEFT) for name in given):
        return {name: name.removeprefix(_PEFT) for name in given if name.startswith(_PEFT)}
    return {name: name for name in given if name != _COMPLETE}


def fit_for_vllm(folder: Path, leave_out_unembedding: bool) -> list[str]:
    """Change the PEFT files in `folder` so that vLLM reads them correctly. Returns the names of the modules that were
    left out.

    vLLM takes the unembedding's factors without a word and then gives other prompt log-probabilities, and it reads
    alpha as a whole number: any other goes into the weights.
    """
    from safetensors.numpy import load_file, save

    if not (folder / CONFIG_FILE).is_file():
        raise ExportError(f"{folder} has no {CONFIG_FILE}; an encrypted export has to be decrypted first")
    config = json.loads((folder / CONFIG_FILE).read_text())
    tensors = load_file(folder / WEIGHTS_FILE)
    modules = [name for name in config["target_modules"] if name == UNEMBEDDING]
    if modules and not leave_out_unembedding:
        raise ExportError(
            f"this adapter trains the unembedding ({UNEMBEDDING}), with which vLLM's prompt log-probabilities are "
            "silently wrong: leave it out by name (--leave-out-unembedding, leave_out_unembedding=True; it is then "
            "another model), or train with train_unembed=False"
        )
    kept = {name: tensor for name, tensor in tensors.items() if f".{UNEMBEDDING}." not in name}
    rank, alpha = config["r"], config["lora_alpha"]
    if alpha != int(alpha):
        kept = {name: x * (alpha / rank) if ".lora_B." in name else x for name, x in kept.items()}
        config["lora_alpha"] = rank
        if ranks := config.get("rank_pattern"):
            config["alpha_pattern"] = ranks
    config["target_modules"] = [name for name in config["target_modules"] if name != UNEMBEDDING]
    # safetensors' save_file has errors of its own for those of the disk
    (folder / WEIGHTS_FILE).write_bytes(save(kept, {"format": "pt"}))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return modules
