"""How long values are shortened in a `repr`, and how errors name a caller's wrong arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from weft.wire.error import WireError

#: How many values of a list are shown.
MOST = 8
#: How many characters of a bad value an error quotes.
QUOTED = 80


def shown(values: Sequence[Any]) -> str:
    """A list's first values and how many more there are: `[1, 2, 3, ... 997 more]`."""
    if len(values) <= MOST:
        return f"[{', '.join(map(repr, values))}]"
    head = ", ".join(map(repr, values[: MOST - 2]))
    return f"[{head}, ... {len(values) - MOST + 2} more]"


@contextmanager
def arguments(**names: str) -> Iterator[None]:
    """Raise what is wrong with a request made of a caller's arguments as one `WireError` that uses the caller's
    argument names. `names` maps fields to arguments that are named differently."""
    try:
        yield
    except ValidationError as error:
        raise WireError("; ".join(_line(problem, names) for problem in error.errors(include_url=False))) from None


def _line(problem: Any, names: dict[str, str]) -> str:
    first, *rest = problem["loc"] or ("arguments",)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    given = "" if isinstance(problem["input"], dict) else f", got {quote(problem['input'])}"
    told = problem["msg"].removeprefix("Value error, ")  # pydantic's own words before those of a validator
    return f"{names.get(str(first), first)}{place}: {told[:1].lower()}{told[1:]}{given}"


def quote(value: object) -> str:
    """A value as an error may show it: on one line, and not longer than a line."""
    text = repr(value)
    return text if len(text) <= QUOTED else text[: QUOTED - 3] + "..."
