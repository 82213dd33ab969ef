"""One thing that is wrong with a plan."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Problem:
    """`where` in the plan (`steps[0].data[3].loss_fn_inputs['weights']`), `what` is wrong, and the limit and the value
    if there are any."""

    where: str
    what: str
    limit: Any = None
    value: Any = None

    def __str__(self) -> str:
        """One line for a person."""
        details = [
            f"{name} {value}" for name, value in (("got", self.value), ("limit", self.limit)) if value is not None
        ]
        return f"{self.where}: {self.what}" + (f" ({'; '.join(details)})" if details else "")


def build(kind: type[B], fields: Mapping[str, Any], where: str) -> Generator[Problem, None, B | None]:
    """Make a `kind` of `fields`. Yields a problem for each field that is wrong; returns None if there are any."""
    try:
        return kind(**fields)
    except ValidationError as error:
        for found in error.errors():
            path = ".".join(str(part) for part in found["loc"])
            yield Problem(f"{where}.{path}" if path else where, found["msg"], None, repr(found["input"])[:80])
        return None
