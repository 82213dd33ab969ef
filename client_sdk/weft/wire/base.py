"""What every JSON body on the wire is made from.

A request with a field we do not know is refused (a misspelt option must not be dropped in silence); a response ignores
what it does not know, so that a server can add fields.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

#: `model_id` and the like are names of the protocol; `defer_build` keeps `import weft` fast.
_SHARED = ConfigDict(protected_namespaces=(), defer_build=True, frozen=True, populate_by_name=True)


class Request(BaseModel):
    """A body or part of a body that a client sends."""

    model_config = ConfigDict(**_SHARED, extra="forbid")

    def body(self) -> dict[str, Any]:
        """The JSON form: fields that are None are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Response(BaseModel):
    """A body or part of a body that a server sends."""

    model_config = ConfigDict(**_SHARED, extra="ignore")


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        raise PydanticCustomError("number", "must be a number, not true or false")
    return value


#: Of a number: true is not taken for 1.
NotBoolean = BeforeValidator(_no_boolean)
#: Integers that databases and arrays can hold.
MAX_INT = 2**63 - 1
Integer = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT), NotBoolean]
Count = Annotated[int, Field(ge=0, le=MAX_INT), NotBoolean]
Positive = Annotated[int, Field(ge=1, le=MAX_INT), NotBoolean]
#: Sequence numbers of a training run fit int32; those of a sampler may be any 64-bit number.
TrainSeq = Annotated[int, Field(ge=1, le=2**31 - 1), NotBoolean]
SampleSeq = Count
#: Numbers of clones of a sampling client; their requests are numbered in strides of 1e9.
CloneId = Annotated[int, Field(ge=0, le=MAX_INT // 10**9 - 1), NotBoolean]
#: Microseconds since 1970, within the four-digit years.
Instant = Annotated[int, Field(ge=0, le=250 * 10**15), NotBoolean]
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
SEEDS = f"must be {MIN_SEED} to {MAX_SEED}"


def _seed(value: int) -> int:
    if not MIN_SEED <= value <= MAX_SEED:
        raise PydanticCustomError("seed", SEEDS)
    return value


#: A seed, of an adapter's initial weights or of a sample: 64 bits, as in OpenAI's API.
Seed = Annotated[
    int,
    NotBoolean,
    AfterValidator(_seed),
    WithJsonSchema({"type": "integer", "minimum": MIN_SEED, "maximum": MAX_SEED}),
]
Finite = Annotated[float, Field(allow_inf_nan=False), NotBoolean]
UserMetadata = dict[str, str]
