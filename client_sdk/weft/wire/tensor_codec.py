"""`TensorData` to a wire tensor and back, in the layout it has: what is sparse stays sparse."""

from __future__ import annotations

import numpy as np

from weft.wire import weft_wire_pb2 as pb
from weft.wire.arrays import FLOAT32, INT64, read_csr, read_tensor, stored_dtype
from weft.wire.tensor import TensorData, TensorDtype


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
