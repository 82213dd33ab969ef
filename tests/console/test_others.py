"""Every page and every button of the console, asked with the ids of another organisation, finds nothing and changes
nothing. A new route with an id in its path, or a new form, fails the test until it is listed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import select

from store.tables import ApiKey, Membership
from tests.console.conftest import Console
from tests.tenancy.conftest import routes_of

Ids = dict[str, str]
#: Forms that name things by id.
FORMS: dict[str, Callable[[Ids], dict[str, Any]]] = {
    "/runs/{run_id}/notes": lambda ids: {"notes": "x"},
    "/checkpoints/ttl": lambda ids: {"path": ids["path"], "days": 1},
    "/checkpoints/delete": lambda ids: {"path": ids["path"]},
    "/keys": lambda ids: {"scopes": "sample", "user_id": ids["user_id"]},
    "/keys/{key_id}/rotate": lambda ids: {},
    "/keys/{key_id}/revoke": lambda ids: {},
    "/members/{user_id}/role": lambda ids: {"role": "viewer"},
    "/members/{user_id}/remove": lambda ids: {},
    "/members/{user_id}/link": lambda ids: {},
    "/invitations/{invitation_id}/revoke": lambda ids: {},
    "/projects/{project_id:path}/archive": lambda ids: {},
    "/budgets": lambda ids: {"of": f"key:{ids['key_id']}", "limit_usd": 1},
    "/budgets/{budget_id}/remove": lambda ids: {},
    "/limits": lambda ids: {"of": f"key:{ids['key_id']}", "requests_per_minute": 1},
}
#: Forms that name nothing of an organisation, and those for people who are not signed in.
NO_IDS = {
    *("/login", "/login/{token}", "/logout", "/sso", "/join/{secret}"),
    *("/members", "/members/sso", "/invitations", "/projects", "/billing/topup"),
}
#: Pages that name things in their path or their address.
PAGES: dict[str, Callable[[Ids], str]] = {
    "/runs/{run_id}": lambda ids: f"/runs/{ids['run_id']}",
    "/runs/{run_id}/live": lambda ids: f"/runs/{ids['run_id']}/live",
    "/compare": lambda ids: f"/compare?run={ids['run_id']}",
    "/compare/curves": lambda ids: f"/compare/curves?run={ids['run_id']}",
}
NO_PAGES = {"/login/{token}", "/join/{secret}", "/static/{name:path}"}


def paths(console: Console, method: str) -> set[str]:
    found = (route for route in routes_of(console.app) if route.path.startswith("/console/"))
    return {route.path.removeprefix("/console") for route in found if route.method == method}


def things(console: Console) -> Ids:
    """One of everything that has an id, made by the rival."""

    def make(method: str, path: str, **body: Any) -> dict[str, Any]:
        headers = {"x-api-key": console.made.keys["rival"]}
        reply = console.http.request(method, f"/api/v1/weft/{path}", json=body, headers=headers)
        assert reply.is_success, reply.text
        found: dict[str, Any] = reply.json()
        return found

    with console.database.read() as session:
        key_id = session.scalars(select(ApiKey.id).filter_by(org_id=console.made.rival_id)).one()
    run_id = "rival-session:train:0"
    budget = {"scope": "key", "scope_id": str(key_id), "period": "month", "limit_nusd": 10**9}
    return {
        "run_id": run_id,
        "path": f"tinker://{run_id}/weights/step-100",
        "key_id": str(key_id),
        "user_id": make("POST", "members", email="guest@rival.example", role="member")["user_id"],
        "invitation_id": make("POST", "invitations", email="new@rival.example", role="viewer")["id"],
        "project_id": make("POST", "projects", name="rival-secret-project")["id"],
        "budget_id": make("PUT", "budgets", **budget)["id"],
    }


def test_every_form_and_page_is_listed(console: Console) -> None:
    assert paths(console, "POST") - {"/playground"} == FORMS.keys() | NO_IDS  # the playground is an OpenAI route
    assert {path for path in paths(console, "GET") if "{" in path} == {path for path in PAGES if "{" in path} | NO_PAGES


def test_nothing_of_another_organisation_is_found_or_changed(console: Console) -> None:
    ids = things(console)
    console.sign_in()
    for path, ask in PAGES.items():
        assert "rival" not in console.get(ask(ids), status=404).replace(ids["run_id"], ""), path
    headers = {"x-csrf-token": console.csrf(), "hx-request": "true", "sec-fetch-site": "same-origin"}
    for path, form in FORMS.items():
        where = path.replace(":path", "").format(**ids)
        reply = console.http.post(f"/console{where}", data=form(ids), headers=headers)
        assert reply.status_code == 404, (path, reply.status_code, reply.text)
        assert "rival-secret" not in reply.text.replace(ids["project_id"], ""), path
    with console.database.read() as session:
        assert session.get_one(ApiKey, int(ids["key_id"])).revoked_at is None
        assert session.get_one(Membership, (console.made.rival_id, ids["user_id"])).role == "member"
