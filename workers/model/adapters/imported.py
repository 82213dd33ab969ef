"""An adapter that another tool trained, converted to Weft's own format. No torch: the operator's command runs it.

Read are PEFT's and Tinker's layouts (peft_reading.py), in float32, float16 or bfloat16. What Weft cannot train or serve
is refused by name: other modules, other variants of LoRA, another model's shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from workers.model.adapters.peft_format import CONFIG_FILE, PARTED, WEIGHTS_FILE, Array, PeftFormatError
from workers.model.adapters.peft_reading import read_layout, with_zeros
from workers.model.adapters.shape import AdapterShape, adapter_config
from workers.model.adapters.writing import writing
from workers.model.config import DecoderConfig

#: A larger file is not accepted as an adapter.
MAX_BYTES = 64 << 30

#: Fields of PEFT's configuration that change what the factors mean, with the only value that Weft supports.
_PLAIN: dict[str, Any] = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False}
_EMPTY = (
    "modules_to_save",
    "layers_to_transform",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
)
#: Initial values with which PEFT leaves the base unchanged. With others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) PEFT
#: subtracts the adapter's initial product from the base, so the factors do not fit the base that is served.
_PLAIN_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


class CannotImport(ValueError):
    """The folder cannot be imported. The text is one line for the operator."""


@dataclass(frozen=True)
class Imported:
    """An adapter in memory; `tensors` by their names in `shape`."""

    shape: AdapterShape
    alpha: float
    tensors: Mapping[str, Array]

    def write(self, folder: Path, base_model: str) -> None:
        """As `workers.model.adapters.adapter.save_adapter` would, for a model served as `base_model`."""
        scale = self.alpha / self.shape.rank
        config = adapter_config(self.shape, base_model, alpha=self.alpha, scale=scale, details={"step": 0})
        tensors = {name: np.ascontiguousarray(x) for name, x in self.tensors.items()}
        with writing():
            save_file(tensors, folder / "adapter.safetensors")
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(folder: Path, config: DecoderConfig) -> Imported:
    """The adapter in `folder`, of a model with this `config`. Raises CannotImport."""
    fields = _fields(folder / CONFIG_FILE)
    try:
        rank, alpha = fields["r"], float(fields["lora_alpha"])
        if type(rank) is not int:
            raise CannotImport(f"r is {rank!r}, which is no whole number")
        if not abs(alpha) <= float(np.finfo(np.float32).max):  # numpy warns where it casts 1e39 itself
            raise CannotImport(f"lora_alpha is {alpha}, which is no scale: every output would be NaN")
        _check_patterns(fields, rank, alpha)
        tensors = read_layout(_arrays(folder / WEIGHTS_FILE))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = str(error) if isinstance(error, PeftFormatError | CannotImport) else f"bad or missing field {error}"
        raise CannotImport(f"{folder}: {reason}") from None
    try:
        shape = AdapterShape.of_tensors(config, rank, tensors)
        tensors = with_zeros(tensors, shape)
    except ValueError as error:
        raise CannotImport(f"{folder}: {error}") from None
    wanted = {name: slot.shape for name, slot in shape.slots.items()}
    for name in sorted(wanted.keys() | tensors.keys()):
        found = tensors[name].shape if name in tensors else None
        if found != wanted.get(name):
            raise CannotImport(f"{folder}: {name} is {found or 'missing'}, the model needs {wanted.get(name, 'none')}")
    if not all(np.isfinite(x).all() for x in tensors.values()):
        raise CannotImport(f"{folder}: some values are not finite")
    return Imported(shape, alpha, tensors)


def _fields(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text())
    except FileNotFoundError:
        raise CannotImport(f"{file} is not there: name a folder that PEFT, or weft download, has written") from None
    except (OSError, ValueError) as error:
        raise CannotImport(f"{file}: cannot be read: {error}") from None
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise CannotImport(f"{file}: not the configuration of a LoRA adapter (peft_type LORA)")
    for name, plain in _PLAIN.items():
        if fields.get(name, plain) != plain:
            raise CannotImport(f"{file}: {name} is {fields[name]!r}; only {plain!r} can be imported")
    for name in _EMPTY:
        if fields.get(name):
            raise CannotImport(f"{file}: {name} is set, which cannot be imported")
    if (begun := fields.get("init_lora_weights", True)) not in _PLAIN_BASE:
        way_out = "have PEFT save it with path_initial_model_for_weight_conversion"
        raise CannotImport(f"{file}: init_lora_weights is {begun!r}, which has changed the base: {way_out}")
    return fields


def _check_patterns(fields: Mapping[str, Any], rank: int, alpha: float) -> None:
    """Check that rank and alpha patterns name only modules in parts, each with as many times the usual value as it has
    parts."""
    for pattern, usual, number in (("rank_pattern", "r", rank), ("alpha_pattern", "lora_alpha", alpha)):
        found = fields.get(pattern) or {}
        wanted = {name: len(PARTED.get(name, ("",))) * number for name in found}
        if found != wanted or found.keys() != (fields.get("rank_pattern") or {}).keys():
            times = " and ".join(f"{name} ({len(parts)} times {usual})" for name, parts in PARTED.items())
            raise CannotImport(f"{pattern} is {found!r}; only {times} may have another, in both patterns")


def _arrays(file: Path) -> dict[str, Array]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CannotImport(f"{file.name} has {file.stat().st_size} bytes, the limit is {MAX_BYTES}")
        return {name: _array(name, tensor) for name, tensor in deserialize(file.read_bytes())}  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise CannotImport(f"{file.name} cannot be read: {error}") from None


def _array(name: str, tensor: Mapping[str, Any]) -> Array:
    data, kind = tensor["data"], tensor["dtype"]
    if kind == "BF16":  # bfloat16 is the upper half of a float32
        found = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif kind in ("F32", "F16"):
        found = np.frombuffer(data, np.float32 if kind == "F32" else np.float16).astype(np.float32)
    else:
        raise PeftFormatError(f"tensor {name} has dtype {kind}; F32, F16 and BF16 can be imported")
    return found.reshape(tensor["shape"])
