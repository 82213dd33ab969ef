"""What Triton's interpreter lets NumPy compute directly is what the language gives the long way."""

from __future__ import annotations

import operator
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.workers.model.gpu_kit import DEVICE  # before Triton, which may not be installed

import triton.language as tl  # isort: skip
from triton.runtime.interpreter import TensorHandle, interpreter_semantic  # isort: skip

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels run on the GPU")

LONG = interpreter_semantic
SHAPES = [(), (4,), (1, 4), (2, 1), (2, 4)]
NUMBERS = {tl.int32: np.int32, tl.int64: np.int64, tl.float32: np.float32}


def block(dtype: Any, of: Any, shape: tuple[int, ...]) -> Any:
    """A scalar is an array of one, as the interpreter has it."""
    values = np.array([-(2**31) + 3, 5, -1, 7, 2**31 - 1, 0, 2, -9])
    data = np.resize(values.astype(of), shape or (1,))
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def assert_same(found: Any, wanted: Any) -> None:
    assert found.type == wanted.type
    assert found.dtype == wanted.dtype
    assert found.handle.data.dtype == wanted.handle.data.dtype
    np.testing.assert_array_equal(found.handle.data, wanted.handle.data)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (operator.add, lambda x, y: LONG.add(x, y, True)),
        (operator.sub, lambda x, y: LONG.sub(x, y, True)),
        (operator.mul, lambda x, y: LONG.mul(x, y, True)),
        (operator.lt, LONG.less_than),
        (operator.le, LONG.less_equal),
        (operator.gt, LONG.greater_than),
        (operator.ge, LONG.greater_equal),
    ],
)
def test_numbers(ours: Any, theirs: Any) -> None:
    for one, other in product(NUMBERS, repeat=2):
        for shape, wide in product(SHAPES, repeat=2):
            x, y = block(one, NUMBERS[one], shape), block(other, NUMBERS[other], wide)
            assert_same(ours(x, y), theirs(x, y))
        for number in (3, -(2**31), 2**40, 0.1, -1.5):
            x = block(one, NUMBERS[one], (2, 4))
            if number != 2**40 or one is not tl.int32:
                assert_same(ours(x, number), theirs(x, number))


def test_truths() -> None:
    for shape, wide in product(SHAPES, repeat=2):
        x, y = block(tl.int1, np.bool_, shape), block(tl.int1, np.bool_, wide)
        assert_same(x & y, LONG.and_(x, y))
        assert_same(x | y, LONG.or_(x, y))


@pytest.mark.parametrize("element", [tl.bfloat16, tl.float32, tl.int64, tl.int1])
def test_pointers(element: Any) -> None:
    for shape, wide in product(SHAPES, repeat=2):
        pointers = block(tl.pointer_type(element), np.uint64, shape)
        for dtype in (tl.int32, tl.int64):
            offsets = block(dtype, NUMBERS[dtype], wide)
            assert_same(pointers + offsets, LONG.add(pointers, offsets, True))


def test_what_does_not_fit_is_refused() -> None:
    x, y = block(tl.int32, np.int32, (4,)), block(tl.int32, np.int32, (8,))
    with pytest.raises(ValueError, match=r"broadcast|shape"):
        _ = x + y
