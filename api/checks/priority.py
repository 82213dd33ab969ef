"""The priority that a request asks for, in its header `x-weft-priority`.

On `create_model` and `create_model_from_state` it holds for all the run's operations, which keep their order; on
`asample` for that request. It orders work within the organisation alone: other organisations do not notice.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from api.errors import Invalid, quote
from scheduler.links.contract import PRIORITY_SHARES
from scheduler.order.operations import INTERACTIVE

HEADER = "x-weft-priority"


async def priority_of(request: Request) -> str:
    """The priority in the header. Raises Invalid if there is no such priority."""
    value = request.headers.get(HEADER, INTERACTIVE)
    if value not in PRIORITY_SHARES:
        raise Invalid(f"{HEADER}: {quote(value)} is none of {', '.join(PRIORITY_SHARES)}")
    return value


PriorityDep = Annotated[str, Depends(priority_of)]
