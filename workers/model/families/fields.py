"""A config.json, read field by field.

What a family's reader has not asked for, and what is not known to change no number (`_NEUTRAL`), is refused by its name
when it is set to anything: a model with a feature that we do not know is not served wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from workers.model.config import UnsupportedModel

#: Fields that do not affect what a frozen decoder computes: tokens' ids, files, libraries, losses of pretraining, and
#: dropout.
_NEUTRAL = """
architectures model_type auto_map name_or_path dtype torch_dtype transformers_version tokenizer_class
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
use_cache use_bfloat16 return_dict use_return_dict output_attentions output_hidden_states output_router_logits
is_encoder_decoder is_decoder add_cross_attention id2label label2id problem_type task_specific_params
finetuning_task prefix chunk_size_feed_forward pruned_heads torchscript
initializer_range initializer_factor attention_dropout hidden_dropout embd_pdrop resid_pdrop embedding_dropout
output_dropout router_aux_loss_coef router_jitter_noise router_z_loss_coef aux_loss_alpha seq_aux
pretraining_tp ep_size initial_context_length
"""
#: Prefixes of such fields.
_NEUTRAL_PREFIXES = ("_", "unsloth")
#: How many characters of a wrong value a message shows: a value may be of any length.
_SHOWN = 500
#: The largest whole number; the largest count of things enumerated one by one; and the largest other number. More is a
#: mistake, or meant to exhaust memory.
MOST, _MOST_LAYERS, _MOST_EXPERTS, _MOST_NUMBER = 1 << 24, 1 << 12, 1 << 16, 1e12
_MOST_OF = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), _MOST_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _MOST_EXPERTS),
}


def is_neutral(key: str) -> bool:
    """True if a field of this name changes no number that the model computes."""
    return key in _NEUTRAL.split() or key.startswith(_NEUTRAL_PREFIXES)


class Fields:
    """config.json of the model in `path`, served as `name`."""

    def __init__(self, name: str, path: Path, raw: Mapping[str, Any]) -> None:
        self._name, self._path, self._raw = name, path, raw
        self._read: set[str] = set()

    def refuse(self, problem: str, supported: str) -> NoReturn:
        raise UnsupportedModel(self._name, self._path, problem[:_SHOWN], supported[:_SHOWN])

    def get(self, key: str, default: Any = None) -> Any:
        """The field's value; `default` where it is missing or null."""
        self._read.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """True if the field is there and null. Libraries do not always treat that like a missing field."""
        return key in self._raw and self._raw[key] is None

    def need(self, key: str) -> int:
        """A positive whole number that must be there."""
        return self.whole(key, None)

    def whole(self, key: str, default: int | None) -> int:
        """A positive whole number."""
        return self._from(1, key, default)

    def count(self, key: str, default: int) -> int:
        """A whole number, 0 or more."""
        return self._from(0, key, default)

    def _from(self, least: int, key: str, default: int | None) -> int:
        value, most = self.get(key, default), _MOST_OF.get(key, MOST)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(f"config.json has {key}={value!r}", f"a whole number from {least} to {most:,} there")
        return value

    def several(self, key: str, default: Sequence[Any] = ()) -> Sequence[Any]:
        value = self.get(key, default)
        if not isinstance(value, list | tuple):
            self.refuse(f"config.json has {key}={value!r}", "a list there")
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """The contents of the object in a field; empty if the field is missing."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            self.refuse(f"config.json has {key}={value!r}", "an object there")
        return value

    def within(self, *keys: str) -> Fields:
        """The fields of these objects together; the last one counts. Objects inside of them are refused."""
        for key in keys:
            if any(isinstance(own, Mapping) for own in self.object(key).values()):
                self.refuse(f"config.json has {key}={self.get(key)!r}", "one set of numbers there, for all layers")
        return Fields(self._name, self._path, {name: x for key in keys for name, x in self.object(key).items()})

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._raw.items()

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if default and self.is_null(key):  # libraries take null for false
            value = None
        if not isinstance(value, bool):
            self.refuse(f"config.json has {key}={value!r}", "true or false there")
        return value

    def number(self, key: str, default: float | None, *, above: float = 0.0) -> float:
        """A number above that; it must be there unless there is a default."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= _MOST_NUMBER:
            self.refuse(f"config.json has {key}={value!r}", f"a number above {above:g} there")
        return float(value)

    def only(self, key: str, supported: Any) -> None:
        """Refuse any other value of this field; a missing one is taken for the supported one."""
        value = self.get(key, supported)
        if value != supported:
            self.refuse(f"{key}={value!r}", f"{supported!r}")

    def same(self, one: str, value: float, other: str, found: float) -> None:
        """Refuse two fields that mean the same number but differ."""
        if found != value:
            self.refuse(f"{one}={value}, {other}={found}", "the same number in both")

    def unset(self, key: str, instead: str) -> None:
        """Refuse this field if it is set to anything; `instead` says what is supported."""
        value = self.get(key)
        if value:
            shown = "true" if value is True else repr(value)
            self.refuse(f"{key}={shown}", instead)

    def finish(self) -> None:
        """Refuse a field that is set, that nobody has read and that may change what is computed."""
        for key, value in self._raw.items():
            if value and key not in self._read and not is_neutral(key):
                self.refuse(f"{key}={value!r}, a field that is not known here", "a config.json without it, or null")
