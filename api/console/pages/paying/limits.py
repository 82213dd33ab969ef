"""How many requests and tokens a minute, and operations in flight, keys and projects may have: shown and set on the
page of budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Form, Request, Response
from sqlalchemy.orm import Session
from weft.wire.account.organisation import RateLimitsRow

from api.console.forms import as_json
from api.console.lists import names
from api.console.render import console_router, say
from api.console.security import Viewer, ViewerDep
from api.http.access import declare
from api.routes.people.limits import rate_limits, set_rate_limits
from api.state.service import Service, ServiceDep

router = console_router()

#: The name of a project or a key in forms and addresses.
OF = r"^(project:.+|key:\d+)$"
Number = Annotated[int | None, Form(ge=1, le=2**53)]


@router.post("/limits", **declare(scope="public", limit="poll"))
async def set_limits(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    of: Annotated[str, Form(max_length=80, pattern=OF)],
    requests_per_minute: Number = None,
    tokens_per_minute: Number = None,
    max_in_flight: Number = None,
) -> Response:
    """Set all three limits at once: an empty field removes that limit."""
    viewer.need("admin")
    scope, _, id = of.partition(":")
    body = as_json(
        request,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_in_flight=max_in_flight,
    )
    await set_rate_limits("project" if scope == "project" else "key", id, body, service, viewer.who)
    return say("Rate limits set: they hold within seconds")


@dataclass(frozen=True)
class ShownLimits:
    """The limits of one key, project or organisation; `of` is its name in the form, empty if they cannot be changed
    here."""

    row: RateLimitsRow
    of: str
    title: str


async def limits_shown(service: Service, viewer: Viewer) -> list[ShownLimits]:
    """The limits that are set."""
    found = (await rate_limits(service, viewer.who)).limits

    def read(session: Session) -> list[ShownLimits]:
        called = {
            "project": names(session, viewer.org_id, "project", _ids(found, "project")),
            "key": names(session, viewer.org_id, "key", _ids(found, "key")),
        }
        return [_shown(row, called) for row in found]

    return await service.read(read)


def _ids(found: list[RateLimitsRow], scope: str) -> list[str]:
    return [row.id for row in found if row.scope == scope]


def _shown(row: RateLimitsRow, called: dict[str, dict[str | None, str]]) -> ShownLimits:
    if row.scope not in called:
        return ShownLimits(row, "", "The whole organisation")
    return ShownLimits(row, f"{row.scope}:{row.id}", f"{row.scope.capitalize()} {called[row.scope][row.id]}")
