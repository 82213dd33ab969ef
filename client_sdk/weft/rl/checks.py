"""Arguments of the toolkit, looked at where they are given: later, what was sampled for them is paid for."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

R = TypeVar("R")

#: What other libraries call an argument.
_MEANT = {"lr": "learning_rate"}


def count(name: str, value: Any, least: int = 1) -> None:
    """Raises ValueError, or TypeError for what is no whole number, unless `value` is at least `least`."""
    try:
        whole = operator.index(value)
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r:.80}")
    if whole < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def number(name: str, value: Any, least: float = 0.0, *, above: bool = False, most: float = math.inf) -> None:
    """Raises ValueError, or TypeError for what is no number, unless `value` is from `least` (with `above`: above it) to
    `most`, which NaN is not."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r:.80}")
    if not least <= float(value) <= most or (above and float(value) == least):
        bound = f"above {least:g}" if above else f"at least {least:g}"
        raise ValueError(f"{name} must be {bound}{f' and at most {most:g}' if most < math.inf else ''}, got {value}")


def finite(name: str, value: Any, least: float = 0.0, *, above: bool = False) -> None:
    """`number`, and not infinite."""
    number(name, value, least, above=above)
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}")


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ValueError unless `value` is one of `known`."""
    if value not in (among := list(known)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, among))}, got {value!r:.80}")


def rate(name: str, value: float | Callable[[int], float]) -> None:
    """Raises unless `value` is a learning rate, or gives one for each step."""
    if not callable(value):
        finite(name, value)


def made(name: str, value: Any, kind: Any, example: str) -> None:
    """Raises TypeError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be as {example} makes it, got {value!r:.80}")


def does(name: str, value: Any, method: str, example: str) -> None:
    """Raises TypeError unless `value` has `method`."""
    if not hasattr(value, method):
        raise TypeError(f"{name} must be as {example} makes it, got {value!r:.80}")


def function(name: str, value: Any, example: str) -> None:
    """Raises TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, such as {example}, got {value!r:.80}")


def functions(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a list of functions."""
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise TypeError(f"{name} must be a list of functions, got {value!r:.80}")


def listed(name: str, value: Any) -> None:
    """Raises TypeError unless `value` can be drawn from: a length, and a place for each."""
    if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")) or isinstance(value, str | dict):
        raise TypeError(f"{name} must be a list, or what has a length and an index as one, got {value!r:.80}")


def tasks(value: Any) -> None:
    """Raises unless `value` is `listed`, and has one at least."""
    listed("tasks", value)
    if len(value) == 0:
        raise ValueError("tasks must have at least one: there are none")


def recipe(kind: type[R], given: Mapping[str, Any]) -> R:
    """A `kind` of these arguments. Raises TypeError that says what a name that it does not have may mean."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(_MEANT.get(name, name), known, 1)
            meant = f": did you mean {close[0]}?" if close else ""
            raise TypeError(f"there is no argument {name}{meant} (there are {', '.join(known)})")
    return kind(**given)
