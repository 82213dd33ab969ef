"""Triton's interpreter, in which the CUDA code is tested on a CPU, with three changes: it runs the whole language,
products of bfloat16 are a device's, and work that it does in vain or again for every operation, half of its time, is
left out."""

from __future__ import annotations

from dataclasses import replace
from inspect import getmembers
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterError, TensorHandle
from triton.runtime.jit import JITFunction


def interpret_library() -> None:
    """Make those functions of Triton's language that are written in it (sum, max, ...) ready for the interpreter. If
    Triton was imported before the variable was set, for instance by transformers, they are ready for the compiler."""
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted = InterpretedFunction(function.fn)
            setattr(tl.standard, name, interpreted)
            if hasattr(tl, name):
                setattr(tl, name, interpreted)


def multiply_bfloat16() -> None:
    """Make products of bfloat16 as a device does, exactly and summed in float32: the interpreter keeps these numbers
    as integers, and would multiply the integers."""
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def skip_overflows() -> None:
    """Leave out the check of every sum and product of integers for overflow: only debugging reads its result."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def patch_once() -> None:
    """Patch the language for a function that a kernel calls on its first call only. A launch patches it while it lasts;
    such a call does so for all that the function's module sees of the language, and never takes it back."""
    patched = set[str]()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        try:
            return self.rewrite()(*args, **options)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    InterpretedFunction.__call__ = call


def keep_dtypes() -> None:
    """Find NumPy's type for each of Triton's once."""
    plain, found = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = plain(dtype)
        return found[name]

    interpreter._get_np_dtype = get_np_dtype


def keep_shapes() -> None:
    """Check each shape once, and keep one object for it in all types that have it: comparing two of them is quick."""
    make_type, broadcast, known = tl.block_type.__init__, TritonSemantic.broadcast_impl_value, dict[Any, Any]()

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes not in known:
            make_type(self, element_ty, shape)
            of_tensors = tl.constexpr(self.numel), tl.tuple([tl.constexpr(size) for size in sizes])
            known[sizes] = self.shape, str(self.shape), self.numel, of_tensors
        self.element_ty = element_ty
        self.shape, written, self.numel, self.of_tensors = known[sizes]
        self.name = f"<{written}, {element_ty.name}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalars

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    of_scalars = tl.constexpr(1), tl.tuple([])
    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_impl_value


#: Operators of the language that are NumPy's unless operands are promoted otherwise than to the wider of two integers.
ARITHMETIC: dict[str, Any] = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__rmul__": np.multiply,
}  # fmt: skip
COMPARISONS: dict[str, Any] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
}
LOGIC: dict[str, Any] = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}


def go_straight() -> None:
    """Let NumPy compute operators directly if both sides have these types: it broadcasts as the language does.
    Everything else takes the long way."""
    tensor, semantic, blocks = tl.tensor, interpreter.interpreter_semantic, dict[Any, Any]()

    def made(data: Any, dtype: Any, block: bool) -> Any:
        if not block:
            return tensor(TensorHandle(data, dtype), dtype)
        if (id(dtype), data.shape) not in blocks:
            blocks[id(dtype), data.shape] = tl.block_type(dtype, list(data.shape))
        return tensor(TensorHandle(data, dtype), blocks[id(dtype), data.shape])

    def straight(operator: str, compute: Any, results: dict[tuple[int, Any], Any]) -> None:
        long_way = getattr(tensor, operator)

        def call(self: Any, other: Any) -> Any:
            if type(other) is tensor:
                result = results.get((id(self.dtype), id(other.dtype)))
                if result is not None:
                    data = compute(self.handle.data, other.handle.data)
                    return made(data, result, self.type.is_block() or other.type.is_block())
            else:
                result = results.get((id(self.dtype), type(other)))
                if result is not None and abs(other) < 2**31:
                    return made(compute(self.handle.data, other), result, self.type.is_block())
            return long_way(self, other, _semantic=semantic)

        setattr(tensor, operator, call)

    integers = [(tl.int32, tl.int32, tl.int32), (tl.int64, tl.int64, tl.int64)]
    integers += [(tl.int32, tl.int64, tl.int64), (tl.int64, tl.int32, tl.int64)]
    given = {(id(one), id(other)): wider for one, other, wider in [*integers, (tl.float32,) * 3]}
    given |= {
        (id(of), number): of
        for of, number in [(tl.int32, int), (tl.int64, int), (tl.float32, int), (tl.float32, float)]
    }
    truths = dict.fromkeys(given, tl.int1)
    for operators, results in ((ARITHMETIC, given), (COMPARISONS, truths), (LOGIC, {(id(tl.int1),) * 2: tl.int1})):
        for name, compute in operators.items():
            straight(name, compute, results)
    point_straight()


def point_straight() -> None:
    """Add an offset to a pointer directly; the sum is a pointer."""
    tensor, plain, widths = tl.tensor, tl.tensor.__add__, {id(tl.int32), id(tl.int64)}

    def add(self: Any, other: Any) -> Any:
        pointer = self.dtype
        if not (isinstance(pointer, tl.pointer_type) and type(other) is tensor and id(other.dtype) in widths):
            return plain(self, other)
        size = max(1, pointer.element_ty.primitive_bitwidth // 8)
        data = self.handle.data + size * other.handle.data.astype(np.uint64)
        block = self.type.is_block() or other.type.is_block()
        return tensor(TensorHandle(data, pointer), tl.block_type(pointer, list(data.shape)) if block else pointer)

    tensor.__add__ = add


def look_once() -> None:
    """Look only once for the parts of the language that a launch patches."""
    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    found = {place: [each for each in getmembers(place) if tl.core.is_builtin(each[1])] for place in places}

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name, member in found[place]:
            interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def work_once() -> None:
    """Apply all of this. Kernels compute the same, bit for bit."""
    go_straight()
    look_once()
    skip_overflows()
    patch_once()
    keep_dtypes()
    keep_shapes()
