"""Arrays as the wire holds them: little-endian bytes with a dtype and a shape, dense or compressed sparse rows.

Invariant: whatever the bytes, a read either returns a well-formed, writable, contiguous array or raises `WireError`.
Every read takes `where`, the place in the message, so that the error can name it. Used by the codec and `TensorData`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.error import WireError

Array = npt.NDArray[np.generic]

UINT16 = np.dtype("<u2")
INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
FLOAT32 = np.dtype("<f4")

#: A sparse tensor may claim any number of columns; this bounds what it may expand to (64 Mi cells).
MAX_EXPANDED_CELLS = 2**26
#: No tensor of the protocol has more dimensions than [tokens, targets]; one more is kept for outputs.
MAX_DIMENSIONS = 3

#: The type of the numbers in the bytes, by the wire's dtype; bfloat16 arrives as 16-bit words.
_STORED: dict[int, np.dtype[np.generic]] = {
    pb.DTYPE_FLOAT32: FLOAT32,
    pb.DTYPE_INT64: INT64,
    pb.DTYPE_INT32: INT32,
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


def stored_dtype(dtype: int, where: str) -> np.dtype[np.generic]:
    """The numpy dtype of the stored bytes of wire dtype `dtype`."""
    found = _STORED.get(dtype)
    if found is None:
        raise WireError(f"{where}: dtype {dtype} is unknown; use float32 (1), int64 (2), int32 (3) or bfloat16 (4)")
    return found


def widen(stored: Array, dtype: int) -> Array:
    """Stored words as one of the two public dtypes: int32 becomes int64, bfloat16 becomes float32 (exactly)."""
    if dtype == pb.DTYPE_INT32:
        return stored.astype(np.int64)
    if dtype == pb.DTYPE_BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored


def read_flat(data: bytes, dtype: np.dtype[np.generic], where: str) -> Array:
    """All of `data` as a fresh one-dimensional array."""
    if len(data) % dtype.itemsize:
        raise WireError(f"{where}: {len(data)} bytes are not a whole number of {dtype.itemsize}-byte values")
    return np.frombuffer(data, dtype=dtype).copy()


def read_tensor(message: pb.Tensor, where: str) -> Array:
    """A dense array [*shape] of float32 or int64 from a wire tensor; cells that a sparse tensor does not list are 0.

    Without a shape a dense tensor is one-dimensional.
    """
    stored = stored_dtype(message.dtype, where)
    shape = list(message.shape)
    check_shape(shape, where)
    encoding = message.WhichOneof("encoding")
    if encoding == "sparse_csr":
        values, crow, col = read_csr(message, stored, where)
        return expand_csr(values, crow, col, shape, where)
    flat = widen(read_flat(message.dense, stored, where), message.dtype)
    if not shape:
        return flat
    if math.prod(shape) != flat.size:
        raise WireError(f"{where}: shape {shape} needs {math.prod(shape)} values, the bytes hold {flat.size}")
    return flat.reshape(shape)


def read_csr(message: pb.Tensor, stored: np.dtype[np.generic], where: str) -> tuple[Array, Array, Array]:
    """The three arrays (values, crow_indices, col_indices) of a sparse tensor, not yet checked against its shape."""
    csr = message.sparse_csr
    values = widen(read_flat(csr.values, stored, f"{where} values"), message.dtype)
    crow = read_flat(csr.crow_indices, INT64, f"{where} crow_indices")
    col = read_flat(csr.col_indices, INT64, f"{where} col_indices")
    return values, crow, col


def check_shape(shape: Sequence[int], where: str) -> None:
    """Refuse shapes no tensor of the protocol can have, before anything is allocated for them."""
    if len(shape) > MAX_DIMENSIONS:
        raise WireError(f"{where}: {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
    if any(size < 0 for size in shape):
        raise WireError(f"{where}: shape {list(shape)} has a negative dimension")
    if math.prod(max(size, 1) for size in shape) > 2**40:
        raise WireError(f"{where}: shape {list(shape)} is larger than any tensor can be")


def expand_csr(values: Array, crow: Array, col: Array, shape: Sequence[int], where: str) -> Array:
    """The dense [rows, columns] array of a sparse one, after checking every invariant of the format."""
    if len(shape) != 2:
        raise WireError(f"{where}: a sparse tensor needs a two-dimensional shape, got {list(shape)}")
    rows, columns = shape
    if rows * columns > MAX_EXPANDED_CELLS:
        raise WireError(f"{where}: shape {list(shape)} expands to more than {MAX_EXPANDED_CELLS} cells")
    if crow.size != rows + 1:
        raise WireError(f"{where}: crow_indices has {crow.size} entries, {rows} rows need {rows + 1}")
    if col.size != values.size:
        raise WireError(f"{where}: {col.size} col_indices for {values.size} values")
    starts = crow.astype(np.int64)
    columns_of = col.astype(np.int64)
    if starts[0] != 0 or starts[-1] != values.size or bool(np.any(starts[1:] < starts[:-1])):
        raise WireError(f"{where}: crow_indices must rise from 0 to the number of values, {values.size}")
    if values.size and (columns_of.min() < 0 or columns_of.max() >= columns):
        raise WireError(f"{where}: col_indices must be in 0..{columns - 1}")
    # Row-major positions rise strictly exactly when the columns of every row are sorted and distinct.
    positions = np.repeat(np.arange(rows, dtype=np.int64), np.diff(starts)) * columns + columns_of
    if bool(np.any(positions[1:] <= positions[:-1])):
        raise WireError(f"{where}: col_indices must rise within each row")
    dense = np.zeros(rows * columns, dtype=values.dtype)
    dense[positions] = values
    return dense.reshape(rows, columns)


def to_public(array: npt.ArrayLike, where: str) -> Array:
    """`array` as contiguous float32 or int64, the two dtypes that the SDKs write."""
    values = np.asarray(array)
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, dtype=FLOAT32)
    if values.dtype.kind in "iub":
        return np.ascontiguousarray(values, dtype=INT64)
    raise WireError(f"{where}: values of dtype {values.dtype} cannot be sent; use floats or integers")


def public_code(array: Array) -> pb.DType:
    """The wire dtype of an array that `to_public` made."""
    return pb.DTYPE_FLOAT32 if array.dtype.kind == "f" else pb.DTYPE_INT64


def write_tensor(message: pb.Tensor, array: npt.ArrayLike, where: str) -> None:
    """Fill `message` with the dense form of `array`."""
    values = to_public(array, where)
    message.dtype = public_code(values)
    message.shape.extend(np.shape(array))
    message.dense = values.tobytes()
