"""What goes into a model: prompts, and data with the inputs of their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, field_validator

from weft.wire.base import Count, Request
from weft.wire.binary.arrays import Array
from weft.wire.error import WireError
from weft.wire.shown import shown
from weft.wire.tensor import TensorData, TensorDtype

__all__ = [
    "Datum",
    "DmelChunk",
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "LossFnInputs",
    "ModelInput",
    "ModelInputChunk",
    "PromptProvenanceSpan",
    "ProvenanceSpan",
    "ProvenanceSpans",
    "SampledProvenanceSpan",
]

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class EncodedTextChunk(Request):
    """Text as token ids."""

    # the first wrong token says enough, and there may be millions
    tokens: Annotated[list[Token], Field(fail_fast=True)]
    type: Literal["encoded_text"] = "encoded_text"

    @field_validator("tokens", mode="before")
    @classmethod
    def _plain(cls, tokens: Any) -> Any:
        """Arrays, tensors and tuples of integers are taken as lists."""
        if hasattr(tokens, "tolist"):
            return tokens.tolist()
        return list(tokens) if isinstance(tokens, tuple | range) else tokens

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"EncodedTextChunk({shown(self.tokens)})"


class ImageChunk(Request):
    """An image. Known to the protocol; text models refuse it."""

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: Count | None = None
    type: Literal["image"] = "image"


class ImageAssetPointerChunk(Request):
    """An image elsewhere. Known to the protocol; text models refuse it."""

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: Count | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"


class DmelChunk(Request):
    """Audio. Known to the protocol; text models refuse it."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"


ModelInputChunk = Annotated[
    EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk, Field(discriminator="type")
]


class ModelInput(Request):
    """A prompt: chunks, laid end to end."""

    chunks: Annotated[list[ModelInputChunk], Field(fail_fast=True)]

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | npt.NDArray[Any]) -> ModelInput:
        """One chunk of text."""
        return prompt_of(tokens, "tokens")

    @classmethod
    def empty(cls) -> ModelInput:
        """No chunks."""
        return cls(chunks=[])

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """A new prompt with one more chunk."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new prompt with one more token."""
        last = self.chunks[-1] if self.chunks else None
        if not isinstance(last, EncodedTextChunk):
            return self.append(EncodedTextChunk(tokens=[token]))
        return ModelInput(chunks=[*self.chunks[:-1], EncodedTextChunk(tokens=[*last.tokens, token])])

    def to_ints(self) -> list[int]:
        """All token ids; `WireError` if a chunk is not text."""
        tokens: list[int] = []
        for index, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise WireError(f"chunk {index} is {chunk.type}, not encoded_text")
            tokens.extend(chunk.tokens)
        return tokens

    @property
    def length(self) -> int:
        """Number of tokens; `WireError` if a chunk is not text."""
        return len(self.to_ints())

    def __repr__(self) -> str:
        only = self.chunks[0] if len(self.chunks) == 1 else None
        inside = shown(only.tokens) if isinstance(only, EncodedTextChunk) else repr(self.chunks)
        return f"ModelInput({inside})"


#: The forms in which a prompt is accepted: a `ModelInput` of chunks, or token ids.
AnyPrompt = ModelInput | Sequence[int] | npt.NDArray[Any]


def prompt_of(given: AnyPrompt, name: str) -> ModelInput:
    """The prompt that the caller gave as the argument `name`; `WireError` says what is wrong with it."""
    if isinstance(given, ModelInput):
        return given
    kind: Any = type(given).__name__
    if isinstance(given, str | bytes):
        raise WireError(f"{name} is text; give token ids, as of tokenizer.encode(...), or a ModelInput")
    if isinstance(given, Mapping):
        raise WireError(f"{name} is a {kind}; give token ids (its 'input_ids', if a tokenizer made it) or a ModelInput")
    if not hasattr(given, "tolist") and not isinstance(given, list | tuple | range):
        raise WireError(f"{name} is a {kind}; give token ids in a list or an array, or a ModelInput")
    tokens = given.tolist() if hasattr(given, "tolist") else given
    try:
        plain = [token.item() if isinstance(token, np.integer) else token for token in tokens]
        return ModelInput(chunks=[EncodedTextChunk.model_validate({"tokens": plain}, strict=True)])
    except ValidationError as error:
        problem = error.errors()[0]
        place = "".join(f"[{part}]" for part in problem["loc"] if isinstance(part, int))
        wrong = f"{name}{place} is {problem['input']!r}" if place else f"{name} is a {kind}"
        raise WireError(f"{wrong}; token ids are integers from 0 to {2**31 - 1}") from None


@dataclass(frozen=True)
class PromptProvenanceSpan:
    """`length` tokens copied from position `offset` of the prompt of a sampled sequence."""

    sequence_id: str
    offset: int = 0
    length: int = 0


@dataclass(frozen=True)
class SampledProvenanceSpan:
    """`length` tokens copied from position `offset` of what was sampled for a sequence."""

    sequence_id: str
    offset: int = 0
    length: int = 0


ProvenanceSpan = PromptProvenanceSpan | SampledProvenanceSpan
ProvenanceSpans = list[ProvenanceSpan]
LossFnInputs = dict[str, TensorData]

#: The dtype of a plain list, by the name of the loss input. Other inputs get the dtype that numpy finds.
LIST_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
    "sampling_temperature": "float32",
}

#: Mostly-zero [tokens, targets] inputs that go as CSR when handed over as torch tensors.
_SPARSE_INPUTS = frozenset({"target_tokens", "weights"})


@dataclass(frozen=True)
class Datum:
    """One training example: a prompt [T], as a `ModelInput` or token ids, and the inputs of its loss, by name, as
    `TensorData`, numpy, torch, lists or numbers.

    Position i of the prompt predicts `target_tokens[i]`: the caller has shifted. Spans come as a pair or not at all.
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None

    if TYPE_CHECKING:  # for type checkers: more types are accepted than the fields hold

        def __init__(
            self,
            model_input: AnyPrompt,
            loss_fn_inputs: Mapping[str, Any] = ...,
            model_input_spans: ProvenanceSpans | None = None,
            loss_fn_input_spans: ProvenanceSpans | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        given: Mapping[str, Any] = self.loss_fn_inputs
        if not isinstance(given, Mapping):
            raise WireError(f"loss_fn_inputs is a {type(given).__name__}; give a dict of inputs by name")
        if unnamed := [name for name in given if not isinstance(name, str)]:
            raise WireError(f"loss_fn_inputs has the key {unnamed[0]!r}; inputs have names, such as 'target_tokens'")
        object.__setattr__(self, "model_input", prompt_of(self.model_input, "model_input"))
        object.__setattr__(self, "loss_fn_inputs", {name: _as_tensor(name, value) for name, value in given.items()})
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise WireError("provenance needs both model_input_spans and loss_fn_input_spans")

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Datum:
        """A copy that says where its tokens come from; each list of spans tiles its field exactly."""
        _check_tiling("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and (targets.shape is None or len(targets.shape) == 1):
            _check_tiling("target_tokens", loss_fn_inputs, targets.values.size)
        return replace(self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)


def _check_tiling(name: str, spans: ProvenanceSpans, length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise WireError(f"provenance spans of {name} cover {covered} positions of {length}")


def _as_tensor(name: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    try:
        if isinstance(value, np.ndarray) or hasattr(value, "detach"):  # torch's, recognised without importing torch
            return _from_array(name, value)
        if isinstance(value, list | tuple | range):
            return _from_list(name, value)
        if isinstance(value, int | float | np.number):
            return _from_list(name, [value])
    except WireError as error:
        raise WireError(f"loss input {name!r}: {error}") from None
    raise WireError(
        f"loss input {name!r} is a {type(value).__name__}; use TensorData, numpy, torch, a list or a number"
    )


def _from_array(name: str, value: Any) -> TensorData:
    if isinstance(value, np.ndarray):
        return TensorData.from_numpy(value)
    tensor = TensorData.from_torch(value)
    return TensorData.from_dense(tensor.to_numpy()) if name in _SPARSE_INPUTS else tensor


def _from_list(name: str, value: Sequence[Any]) -> TensorData:
    try:
        array: Array = np.asarray(value)
    except ValueError:
        raise WireError("the list is not rectangular") from None
    dtype = LIST_DTYPES.get(name, "float32" if array.dtype.kind == "f" else "int64")
    return TensorData(array, dtype, list(array.shape))
