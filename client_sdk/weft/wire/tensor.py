"""`TensorData`: a dense or sparse array as users hand it over and get it back. On the wire, what is sparse stays so."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from weft.wire.base import MAX_INT
from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.arrays import FLOAT32, INT64, Array, check_shape, expand_csr, read_csr, read_tensor, stored_dtype
from weft.wire.error import WireError
from weft.wire.shown import shown

__all__ = ["TensorData", "TensorDtype"]

if TYPE_CHECKING:
    import torch

TensorDtype = Literal["int64", "float32"]

_NUMPY: dict[str, np.dtype[Any]] = {"float32": FLOAT32, "int64": INT64}


class TensorData:
    """An array of float32 or int64, copied from what it is made of.

    `data` are its values, flat; with `sparse_crow_indices` and `sparse_col_indices` they are the listed values of a
    two-dimensional compressed-sparse-row array, every other cell being 0. Errors are `WireError` (a `ValueError`).
    """

    __slots__ = ("_values", "dtype", "shape", "sparse_col_indices", "sparse_crow_indices")

    dtype: TensorDtype
    shape: list[int] | None
    sparse_crow_indices: list[int] | None
    sparse_col_indices: list[int] | None
    _values: Array

    def __init__(
        self,
        data: npt.ArrayLike,
        dtype: TensorDtype,
        shape: list[int] | None = None,
        sparse_crow_indices: list[int] | None = None,
        sparse_col_indices: list[int] | None = None,
    ) -> None:
        if dtype not in _NUMPY:
            raise WireError(f"tensor dtype must be float32 or int64, got {dtype!r}")
        values = values_of(data, dtype)
        if (sparse_crow_indices is None) != (sparse_col_indices is None):
            raise WireError("a sparse tensor needs both sparse_crow_indices and sparse_col_indices")
        if shape is None and sparse_crow_indices is None and np.ndim(data) != 1:
            shape = list(np.shape(data))
        if shape is not None:
            check_shape(shape, "tensor")
            if sparse_crow_indices is None and int(np.prod(shape)) != values.size:
                raise WireError(f"tensor of shape {shape} needs {int(np.prod(shape))} values, got {values.size}")
        for name, value in (
            ("dtype", dtype),
            ("shape", shape),
            ("sparse_crow_indices", sparse_crow_indices),
            ("sparse_col_indices", sparse_col_indices),
            ("_values", values),
        ):
            object.__setattr__(self, name, value)
        if sparse_crow_indices is not None:
            self.to_numpy()  # refuse a malformed layout where it is made, not where it is sent

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TensorData is immutable; cannot set {name!r}")

    def __repr__(self) -> str:
        sparse = "" if self.sparse_crow_indices is None else ", sparse"
        return f"TensorData({shown(self.data)}, dtype={self.dtype!r}, shape={self.shape!r}{sparse})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.to_numpy(), other.to_numpy())

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self._values, self.dtype, self.shape, self.sparse_crow_indices, self.sparse_col_indices)
        return TensorData, state

    @property
    def data(self) -> list[int] | list[float]:
        """The values, flat, as Python numbers (only the listed ones of a sparse tensor)."""
        return self._values.tolist()  # type: ignore[no-any-return]

    @property
    def values(self) -> Array:
        """The same values as a flat array."""
        return self._values

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> TensorData:
        """Floats become float32, integers and booleans int64."""
        if array.dtype.kind not in "fiub":
            raise WireError(f"tensor values of dtype {array.dtype} cannot be sent; use floats or integers")
        return cls(array, "float32" if array.dtype.kind == "f" else "int64", list(array.shape))

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Any device and layout, sparse ones as dense; bfloat16 widens to float32."""
        held = tensor.detach().cpu().to_dense()
        return cls.from_numpy((held.float() if held.is_floating_point() else held).contiguous().numpy())

    @classmethod
    def from_dense(cls, array: npt.NDArray[Any]) -> TensorData:
        """As `from_numpy`, but a two-dimensional array goes as CSR where that is smaller (zeros are not listed)."""
        if array.ndim != 2:
            return cls.from_numpy(array)
        listed = array != 0
        if array.shape[0] + 1 + 2 * int(listed.sum()) >= array.size:
            return cls.from_numpy(array)
        crow = np.concatenate([[0], np.cumsum(listed.sum(axis=1))])
        dtype: TensorDtype = "float32" if array.dtype.kind == "f" else "int64"
        columns = np.nonzero(listed)[1]
        return cls(array[listed], dtype, list(array.shape), crow.tolist(), columns.tolist())

    def to_numpy(self) -> Array:
        """The dense array, of `shape`."""
        if self.sparse_crow_indices is None:
            return self._values if self.shape is None else self._values.reshape(self.shape)
        crow = np.asarray(self.sparse_crow_indices, dtype=np.int64)
        columns = np.asarray(self.sparse_col_indices, dtype=np.int64)
        return expand_csr(self._values, crow, columns, self.shape or [], "tensor")

    def to_torch(self) -> torch.Tensor:
        """The dense tensor, of `shape`; needs torch."""
        try:
            import torch
        except ImportError:
            raise ImportError("TensorData.to_torch needs torch, which is not installed; use to_numpy") from None
        return torch.from_numpy(self.to_numpy().copy())

    def tolist(self) -> list[Any]:
        """The dense array as nested lists."""
        return self.to_numpy().tolist()  # type: ignore[no-any-return]

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        fields = {
            "data": self.data,
            "dtype": self.dtype,
            "shape": self.shape,
            "sparse_crow_indices": self.sparse_crow_indices,
            "sparse_col_indices": self.sparse_col_indices,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(cls.to_json, when_used="json")
        return core_schema.chain_schema(
            [
                core_schema.json_or_python_schema(
                    _json_schema(), core_schema.union_schema([core_schema.is_instance_schema(cls), _json_schema()])
                ),
                core_schema.no_info_plain_validator_function(functools.partial(_from_json, cls)),
            ],
            serialization=serialization,
        )


def values_of(data: npt.ArrayLike, dtype: TensorDtype) -> Array:
    """A flat copy of `data` as `dtype`. Raises WireError for values that are no numbers, or that would become others:
    integers have to be whole and fit, and what is finite stays finite."""
    try:
        given: Array = np.asarray(data)
    except ValueError as error:
        raise WireError(f"tensor values are not a rectangular array of {dtype}: {error}") from None
    if given.size and given.dtype.kind not in "fiub":
        raise WireError("tensor holds values that are not numbers")
    with np.errstate(invalid="ignore", over="ignore"):
        values = given.astype(_NUMPY[dtype]).reshape(-1)
    if given.dtype == values.dtype:
        return values
    if dtype == "int64" and not np.array_equal(given.reshape(-1), values):
        raise WireError("tensor holds values that are no 64-bit integers")
    if dtype == "float32" and np.any(np.isinf(values) & np.isfinite(given.reshape(-1))):
        raise WireError("tensor holds values that are too large for float32")
    return values


def _json_schema() -> CoreSchema:
    """The JSON schema, with no other fields. Of a list, only the first mistake is reported."""
    integers = core_schema.list_schema(core_schema.int_schema(ge=-MAX_INT, le=MAX_INT), fail_fast=True)
    number = core_schema.union_schema([core_schema.int_schema(strict=True), core_schema.float_schema()])
    field, optional = core_schema.typed_dict_field, core_schema.nullable_schema(integers)
    return core_schema.typed_dict_schema(
        {
            "data": field(core_schema.list_schema(number, fail_fast=True)),
            "dtype": field(core_schema.literal_schema(["float32", "int64"])),
            "shape": field(optional, required=False),
            "sparse_crow_indices": field(optional, required=False),
            "sparse_col_indices": field(optional, required=False),
        },
        extra_behavior="forbid",
    )


def _from_json(cls: type[TensorData], value: TensorData | dict[str, Any]) -> TensorData:
    return value if isinstance(value, TensorData) else cls(**value)


def write_tensor_data(message: pb.Tensor, tensor: TensorData) -> None:
    """Fill `message`."""
    message.dtype = pb.DTYPE_FLOAT32 if tensor.dtype == "float32" else pb.DTYPE_INT64
    message.shape.extend(tensor.shape or [])
    values = tensor.values.astype(FLOAT32 if tensor.dtype == "float32" else INT64, copy=False).tobytes()
    if tensor.sparse_crow_indices is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = np.asarray(tensor.sparse_crow_indices, dtype=INT64).tobytes()
    message.sparse_csr.col_indices = np.asarray(tensor.sparse_col_indices, dtype=INT64).tobytes()


def read_tensor_data(message: pb.Tensor, where: str) -> TensorData:
    """Read `message`. Raises WireError, naming `where`."""
    if message.WhichOneof("encoding") != "sparse_csr":
        return TensorData.from_numpy(read_tensor(message, where))
    values, crow, col = read_csr(message, stored_dtype(message.dtype, where), where)
    dtype: TensorDtype = "float32" if values.dtype.kind == "f" else "int64"
    return TensorData(values, dtype, list(message.shape), crow.tolist(), col.tolist())
