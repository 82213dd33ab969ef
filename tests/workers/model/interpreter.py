"""Triton's interpreter, in which the CUDA code is tested on a CPU: ready for all of the language, with products of
bfloat16 as a device has them, and without what it does for nothing or for every operation anew, half of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterError, TensorHandle
from triton.runtime.jit import JITFunction


def interpret_library() -> None:
    """Make what Triton's language has in its own language (sum, max, ...) ready for the interpreter: whoever imported
    Triton before the variable was set, transformers for one, got it ready for the compiler."""
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted = InterpretedFunction(function.fn)
            setattr(tl.standard, name, interpreted)
            if hasattr(tl, name):
                setattr(tl, name, interpreted)


def multiply_bfloat16() -> None:
    """Products of bfloat16 as a device makes them, exactly and summed in float32: the interpreter keeps these numbers
    as integers and multiplies those."""
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
    """Whether integers overflow is computed for each sum and product, and looked at in debugging alone."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def patch_once() -> None:
    """A launch makes the language the interpreter's while it lasts. So does each call of a function from a kernel, for
    all that its module sees of the language, and leaves it so: the first call is enough."""
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
    """NumPy's type of each of Triton's, found once."""
    plain, found = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = plain(dtype)
        return found[name]

    interpreter._get_np_dtype = get_np_dtype


def keep_shapes() -> None:
    """A shape is checked once, and is one object in all types that have it: two are soon found to be the same."""
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


def work_once() -> None:
    """Kernels compute the same, bit for bit."""
    skip_overflows()
    patch_once()
    keep_dtypes()
    keep_shapes()
