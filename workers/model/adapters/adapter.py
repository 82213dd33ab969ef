"""A run's LoRA weights: named views of one flat float32 arena, fresh, in memory or on disk.

The same class holds a run's gradients and optimizer moments (another arena of the same shape). On disk an adapter is a
folder: adapter.safetensors (one tensor per name), optional extra.safetensors (the trainer's optimizer state), and
adapter_config.json. An export in PEFT's or Tinker's layout (peft_format.py) is read too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from workers.model.adapters.encryption import SUFFIX as ENCRYPTED
from workers.model.adapters.peft_format import WEIGHTS_FILE, Array, PeftFormatError
from workers.model.adapters.peft_reading import read_layout, with_zeros
from workers.model.adapters.shape import FORMAT, AdapterShape, adapter_config
from workers.model.adapters.writing import writing
from workers.model.config import DecoderConfig, read_json


class AdapterFileError(ValueError):
    """An adapter folder that does not hold what the model needs; the message names the tensor or the field."""


class Adapter:
    """`flat` [shape.numel] float32 and its named views; `scale` = alpha / rank multiplies the adapter's output."""

    def __init__(self, shape: AdapterShape, flat: Tensor, scale: float) -> None:
        if flat.shape != (shape.numel,) or flat.dtype != torch.float32:
            raise ValueError(f"an arena of float32 [{shape.numel}] is needed, got {flat.dtype} {list(flat.shape)}")
        self.shape, self.flat, self.scale = shape, flat, scale
        #: Views as stored: contiguous, B factors [.., r, out].
        self.stored: dict[str, Tensor] = {
            slot.name: flat[slot.offset : slot.offset + slot.numel].view(slot.stored_shape)
            for slot in shape.slots.values()
        }
        #: Views in the usual orientation: B factors [.., out, r].
        self.views: dict[str, Tensor] = {
            slot.name: self.stored[slot.name].transpose(-1, -2) if slot.turned else self.stored[slot.name]
            for slot in shape.slots.values()
        }

    @classmethod
    def init(cls, shape: AdapterShape, seed: int, *, scale: float = 1.0, device: str | torch.device = "cpu") -> Adapter:
        """A fresh adapter: A ~ U(-1/sqrt(in), 1/sqrt(in)) (peft's kaiming_uniform with a = sqrt(5)), B = 0. Drawn on
        the CPU from `seed` alone, in the order of the slots, so every device starts from the same bits."""
        made = cls(shape, torch.zeros(shape.numel), scale)
        generator = torch.Generator().manual_seed(seed)
        for slot in shape.slots.values():
            if slot.fan_in:
                bound = 1 / math.sqrt(slot.fan_in)
                made.view(slot.name).uniform_(-bound, bound, generator=generator)
        return cls(shape, made.flat.to(device), scale)

    @classmethod
    def zeros(cls, shape: AdapterShape, scale: float = 1.0, device: str | torch.device = "cpu") -> Adapter:
        """An arena of zeros: for gradients and optimizer moments."""
        return cls(shape, torch.zeros(shape.numel, device=device), scale)

    def view(self, name: str) -> Tensor:
        """The tensor called `name`, sharing memory with `flat`. KeyError when this adapter does not train it."""
        return self.views[name]

    @property
    def rank(self) -> int:
        return self.shape.rank


@dataclass(frozen=True)
class LoadedAdapter:
    """`extra` are the tensors that the trainer saved beside the adapter, `details` its own JSON fields."""

    adapter: Adapter
    base_model: str
    extra: dict[str, Tensor] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def save_adapter(
    adapter: Adapter,
    folder: Path,
    *,
    base_model: str,
    extra: Mapping[str, Tensor] | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write the adapter into `folder` (made if absent), with `extra` tensors of any dtype and JSON `details`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: view.cpu().contiguous() for name, view in adapter.views.items()}
    with writing():
        save_file(tensors, folder / "adapter.safetensors")
    if extra:
        with writing():
            save_file({name: t.cpu().contiguous() for name, t in extra.items()}, folder / "extra.safetensors")
    alpha = adapter.scale * adapter.rank
    config = adapter_config(
        adapter.shape, base_model, alpha=alpha, scale=adapter.scale, extra=extra or (), details=details
    )
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_adapter(folder: Path, config: DecoderConfig, *, device: str | torch.device = "cpu") -> LoadedAdapter:
    """Read an adapter of a model with this `config`. AdapterFileError names a bad tensor or field."""
    fields = _fields(folder)
    if fields.get("peft_type") == "LORA":
        return _load_export(folder, fields, config, device)
    shape = _shape(folder, fields, config)
    try:
        scale, base_model, extra_names = float(fields["scale"]), str(fields["base_model"]), list(fields["extra"])
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterFileError(f"{folder}: adapter_config.json: bad or missing field: {error}") from error
    adapter = Adapter(shape, torch.zeros(shape.numel, device=device), scale)
    _fill(adapter, _read_all(folder / "adapter.safetensors"), folder / "adapter.safetensors")
    extra = _read_all(folder / "extra.safetensors") if extra_names else {}
    if sorted(extra) != extra_names:
        raise AdapterFileError(f"{folder}: extra.safetensors holds {sorted(extra)}, adapter_config.json {extra_names}")
    return LoadedAdapter(adapter, base_model, extra, dict(fields.get("details", {})))


def adapter_bytes(folder: Path, config: DecoderConfig) -> int:
    """How much memory the adapter in a folder takes. Raises AdapterFileError if its shape cannot be told."""
    fields = _fields(folder)
    if fields.get("peft_type") == "LORA":  # it trains the parts that it has tensors for
        return 4 * _load_export(folder, fields, config, "meta").adapter.shape.numel
    return 4 * _shape(folder, fields, config).numel


def _fields(folder: Path) -> dict[str, Any]:
    if (folder / f"adapter_config.json{ENCRYPTED}").exists():
        raise AdapterFileError(f"{folder}: is encrypted: only its recipients can read it")
    return read_json(folder / "adapter_config.json")


def _shape(folder: Path, fields: Mapping[str, Any], config: DecoderConfig) -> AdapterShape:
    """The shape of an adapter in our own format."""
    if fields.get("format") != FORMAT:
        raise AdapterFileError(f"{folder}: adapter_config.json has format {fields.get('format')!r}, need {FORMAT!r}")
    try:
        trained = (fields["train_attn"], fields["train_mlp"], fields["train_unembed"])
        kept = (fields.get("shared_experts", True), fields.get("whole_projections", False))
        return AdapterShape(config, fields["rank"], *trained, *kept)
    except (KeyError, TypeError, ValueError) as error:
        raise AdapterFileError(f"{folder}: adapter_config.json: bad or missing field: {error}") from error


def _load_export(
    folder: Path, fields: Mapping[str, Any], config: DecoderConfig, device: str | torch.device
) -> LoadedAdapter:
    """An adapter written by peft_format; it trains the parts that it has tensors for."""
    file = folder / WEIGHTS_FILE
    arrays: dict[str, Array] = {name: tensor.float().numpy() for name, tensor in _read_all(file).items()}
    try:
        tensors = read_layout(arrays)
        rank, alpha, base_model = int(fields["r"]), float(fields["lora_alpha"]), str(fields["base_model_name_or_path"])
        shape = AdapterShape.of_tensors(config, rank, tensors)
        tensors = with_zeros(tensors, shape)
    except (PeftFormatError, KeyError, TypeError, ValueError) as error:
        raise AdapterFileError(f"{folder}: {error}") from error
    adapter = Adapter(shape, torch.zeros(shape.numel, device=device), alpha / rank)
    _fill(adapter, {name: torch.from_numpy(array) for name, array in tensors.items()}, file)
    return LoadedAdapter(adapter, base_model)


def version_of(details: object) -> int:
    """The optimizer steps behind the weights, by `LoadedAdapter.details`; 0 if they do not say."""
    step = details.get("step") if isinstance(details, Mapping) else None
    return step if isinstance(step, int) else 0


def _fill(adapter: Adapter, found: Mapping[str, Tensor], file: Path) -> None:
    missing, unexpected = sorted(adapter.views.keys() - found.keys()), sorted(found.keys() - adapter.views.keys())
    if missing or unexpected:
        raise AdapterFileError(f"{file}: missing tensors {missing[:3]}, unexpected tensors {unexpected[:3]}")
    for name, view in adapter.views.items():
        tensor = found[name]
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            got, need = f"{tensor.dtype} {list(tensor.shape)}", f"{view.dtype} {list(view.shape)}"
            raise AdapterFileError(f"{file}: tensor {name} is {got}, the model needs {need}")
        view.copy_(tensor)


def _read_all(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise AdapterFileError(f"{file} is missing")
    with safe_open(str(file), framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  (not a dict)
