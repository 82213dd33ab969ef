"""One thing that is wrong with a request, or with a plan for many."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from weft.wire.shown import QUOTED

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
        """One line for a person. Value and limit are added where `what` does not name them."""
        details = [
            f"{name} {value}"
            for name, value in (("got", self.value), ("limit", self.limit))
            if value is not None and str(value) not in self.what
        ]
        return f"{self.where}: {self.what}" + (f" ({'; '.join(details)})" if details else "")

    def within(self, place: str) -> Problem:
        """The same problem with `where` made a part of something larger."""
        return replace(self, where=f"{place}.{self.where}" if self.where else place)


def bounds(least: int | None, most: int | None) -> str:
    """A range in words. An older server may not name one of its ends."""
    if most is None:
        return f"at least {least}"
    return f"at most {most}" if least is None else f"{least} to {most}"


def build(kind: type[B], fields: Mapping[str, Any], where: str) -> Generator[Problem, None, B | None]:
    """Make a `kind` from `fields`. Yields a problem for each wrong field, and then returns None."""
    try:
        return kind(**fields)
    except ValidationError as error:
        for found in error.errors():
            path = ".".join(str(part) for part in found["loc"])
            yield Problem(".".join(filter(None, (where, path))), found["msg"], None, repr(found["input"])[:QUOTED])
        return None
