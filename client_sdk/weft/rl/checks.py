"""Checks of the toolkit's arguments when they are given: later, sampling for them has already been paid for."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from weft.wire.base import MIN_SEED

R = TypeVar("R")

#: Names of arguments in other libraries, and what they are called here.
_MEANT = {"lr": "learning_rate"}


def count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless `value` is a whole number (else TypeError) of at least `least`."""
    try:
        whole = operator.index(value)
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r:.80}")
    if whole < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def number(name: str, value: Any, least: float = 0.0, *, above: bool = False, most: float = math.inf) -> None:
    """Raise ValueError unless `value` is a number (else TypeError) from `least` to `most`; with `above`, more than
    `least`. NaN is refused."""
    if isinstance(value, bool | np.bool_ | str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r:.80}")
    if not least <= float(value) <= most or (above and float(value) == least):
        bound = f"above {least:g}" if above else f"at least {least:g}"
        raise ValueError(f"{name} must be {bound}{f' and at most {most:g}' if most < math.inf else ''}, got {value}")


def finite(name: str, value: Any, least: float = 0.0, *, above: bool = False) -> None:
    """`number`, and not infinite."""
    number(name, value, least, above=above)
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}")


def flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r:.80}")


def seed(value: Any) -> None:
    """Raise ValueError unless `value` is a whole number (else TypeError) of 64 bits."""
    count("seed", value, least=MIN_SEED)


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `known`."""
    if value not in (among := list(known)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, among))}, got {value!r:.80}")


def rate(name: str, value: float | Callable[[int], float]) -> None:
    """Raise unless `value` is a learning rate, or a function from step to learning rate."""
    if not callable(value):
        finite(name, value)


def made(name: str, value: Any, kind: Any, example: str) -> None:
    """Raise TypeError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be as {example} makes it, got {value!r:.80}")


def does(name: str, value: Any, method: str, example: str) -> None:
    """Raise TypeError unless `value` has `method`."""
    if not hasattr(value, method):
        raise TypeError(f"{name} must be as {example} makes it, got {value!r:.80}")


def function(name: str, value: Any, example: str) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, such as {example}, got {value!r:.80}")


def functions(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a list of functions."""
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise TypeError(f"{name} must be a list of functions, got {value!r:.80}")


def listed(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a sequence: it has a length and can be indexed."""
    if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")) or isinstance(value, str | dict):
        raise TypeError(f"{name} must be a list, or what has a length and an index as one, got {value!r:.80}")


def sinks(value: Any) -> None:
    """Raise TypeError unless `value` is None or a list of sinks."""
    if value is not None and not (isinstance(value, Sequence) and all(hasattr(sink, "log") for sink in value)):
        raise TypeError(f"sinks must be as [rl.Progress()] makes it, got {value!r:.80}")


def tasks(value: Any) -> None:
    """Raise unless `value` is a sequence with at least one task."""
    listed("tasks", value)
    if len(value) == 0:
        raise ValueError("tasks must have at least one: there are none")


def recipe(kind: type[R], given: Mapping[str, Any]) -> R:
    """Make a `kind` of these arguments. The TypeError for an unknown name suggests the name that was probably meant."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(_MEANT.get(name, name), known, 1)
            meant = f": did you mean {close[0]}?" if close else ""
            raise TypeError(f"there is no argument {name}{meant} (there are {', '.join(known)})")
    return kind(**given)
