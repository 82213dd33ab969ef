"""Pages from templates. Everything that a template prints is escaped: names of runs and projects are hostile input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from api.console import formats
from api.console.security import PREFIX, SignInNeeded, Viewer
from api.errors import ApiError, explain
from api.state.service import service_of

HERE = Path(__file__).parent
STATIC = HERE / "static"


@dataclass(frozen=True)
class Link:
    """A page in the navigation, for those who have one of `scopes` (none: everybody)."""

    path: str
    title: str
    icon: str
    scopes: tuple[str, ...] = ()
    operator: bool = False

    def shown_to(self, viewer: Viewer) -> bool:
        return viewer.operator if self.operator else not self.scopes or viewer.may(*self.scopes)


NAVIGATION: tuple[tuple[str, tuple[Link, ...]], ...] = (
    (
        "",
        (
            Link("/", "Overview", "home"),
            Link("/usage", "Usage", "chart", ("billing:read",)),
            Link("/runs", "Runs", "run"),
            Link("/checkpoints", "Checkpoints", "disk"),
            Link("/queues", "Queues", "queue"),
            Link("/playground", "Playground", "chat", ("sample",)),
        ),
    ),
    (
        "Organisation",
        (
            Link("/keys", "API keys", "key"),
            Link("/members", "Members", "people", ("admin",)),
            Link("/budgets", "Limits", "gauge", ("admin", "billing:read")),
            Link("/billing", "Billing", "card", ("admin", "billing:read")),
            Link("/audit", "Audit log", "list", ("admin",)),
        ),
    ),
    ("Operator", (Link("/ownership", "Cost of ownership", "server", operator=True),)),
)


def page(request: Request, template: str, viewer: Viewer | None, status: int = 200, **values: Any) -> HTMLResponse:
    """A page (or a part of one) as HTML."""
    sections = [
        (title, [link for link in links if viewer is not None and link.shown_to(viewer)]) for title, links in NAVIGATION
    ]
    html = (
        _environment()
        .get_template(template)
        .render(
            viewer=viewer,
            sections=[(title, links) for title, links in sections if links],
            here=request.scope["path"].removeprefix(PREFIX) or "/",
            **values,
        )
    )
    return HTMLResponse(html, status)


async def long_page(request: Request, template: str, viewer: Viewer, **values: Any) -> HTMLResponse:
    """As `page`, for pages with all people, projects or keys of an organisation: with thousands that takes a second, so
    it is made in a thread, in the organisation's turn."""
    return await service_of(request).threads.run(viewer.org_id, lambda: page(request, template, viewer, **values))


def say(message: str) -> Response:
    """The answer to a button: a message, and the page as it is now."""
    return PlainTextResponse(message, 200, {"hx-refresh": "true"})


def link_with(query: Mapping[str, Any], **changes: Any) -> str:
    """The present filters as a query string, some of them changed; empty ones are left out."""
    merged = {**query, **changes}
    return "?" + urlencode({name: value for name, value in merged.items() if value not in (None, "")})


def link_with_all(query: Mapping[str, Any], **lists: Sequence[str]) -> str:
    """As `link_with`; a name may have several values."""
    filters = [(name, value) for name, value in query.items() if value not in (None, "")]
    return "?" + urlencode([*filters, *((name, value) for name, values in lists.items() for value in values)])


class ConsoleRoute(APIRoute):
    """A route whose errors are pages, or one line for the part of a page that asked."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response: Response = await handle(request)
            except SignInNeeded as error:
                return error.response()
            except RequestValidationError as error:
                return _failed(request, 422, explain(error, prefix=("query", "path", "body")))
            except ApiError as error:
                return _failed(request, error.status, error.detail, error.code)
            return response

        return answer


def console_router() -> APIRouter:
    """A router for the routes of one page."""
    return APIRouter(prefix=PREFIX, route_class=ConsoleRoute)


def looks(request: Request) -> bool:
    """Whether a person's browser asks for a whole page, not for a part of one."""
    return "hx-request" not in request.headers and "text/html" in request.headers.get("accept", "")


def failed_page(request: Request, status: int, detail: str, code: str = "") -> Response:
    return page(request, "error.html", None, status, error_status=status, detail=detail, code=code)


def _failed(request: Request, status: int, detail: str, code: str = "") -> Response:
    return failed_page(request, status, detail, code) if looks(request) else PlainTextResponse(detail, status)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("usd", "usd_text", "count", "size", "number", "when", "lasts", "minute", "as_data"):
        environment.filters[name] = getattr(formats, name)
    environment.globals.update(
        kind_names=formats.KIND_NAMES,
        link_with=link_with,
        link_with_all=link_with_all,
        root=PREFIX,
        static=static_url,
        zip=zip,
    )
    return environment


@cache
def static_url(name: str) -> str:
    """The address of a static file. It changes with the file's content, so browsers may keep the file for ever."""
    version = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"{PREFIX}/static/{name}?v={version}"
