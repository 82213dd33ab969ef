"""The people of an organisation, their roles and how they get in; and its projects."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from api.console import sessions
from api.console.forms import as_json
from api.console.render import console_router, long_page, page, say
from api.console.security import PREFIX, ViewerDep, need_fresh
from api.errors import Forbidden
from api.http.access import declare
from api.http.auth import while_good
from api.routes.people.invitations import browser_base, create_invitation, list_invitations, revoke_invitation
from api.routes.people.members import add_member, change_role, list_members, remove_member
from api.routes.people.projects import change_project, create_project, list_projects
from api.state.service import ServiceDep
from api.who.credentials import changed_member
from api.who.reach import Reach, permit
from store.people import organisations
from store.people.roles import ROLES
from store.tables import Organisation

router = console_router()

#: What a role may do, in a few words.
MEANING = {
    "owner": "everything, and who else is an owner",
    "admin": "everything but owners",
    "billing-admin": "money only",
    "member": "trains, samples, keeps checkpoints",
    "viewer": "looks at runs and bills",
}


@router.get("/members", **declare(scope="public", limit="poll"))
async def members(request: Request, service: ServiceDep, viewer: ViewerDep) -> HTMLResponse:
    viewer.need("admin")
    found = (await list_members(service, viewer.who)).members
    projects = (await list_projects(service, viewer.who, archived=True)).projects
    invited = (await list_invitations(service, viewer.who)).invitations
    oidc = service.settings.oidc

    def read(session: Session) -> dict[str, Any]:
        rows = organisations.members(session, viewer.org_id)
        return {
            "by_groups": {row.user_id for row, _ in rows if row.issuer is not None},
            "required": sessions.sso_required(session.get_one(Organisation, viewer.org_id), oidc),
        }

    values = {"members": found, "projects": projects, "invited": invited, "oidc": oidc, **await service.read(read)}
    return await long_page(request, "members.html", viewer, roles=ROLES, meaning=MEANING, link=None, **values)


@router.post("/members", **declare(scope="public", limit="poll"))
async def add(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    email: Annotated[str, Form(max_length=254)],
    role: Annotated[str, Form(max_length=32)],
) -> Response:
    viewer.need("admin")
    need_fresh(request, viewer)
    await add_member(as_json(request, email=email, role=role), service, viewer.who)
    return say("Member added: give them a sign-in link")


@router.post("/members/{user_id}/role", **declare(scope="public", limit="poll"))
async def set_role(
    request: Request, service: ServiceDep, viewer: ViewerDep, user_id: str, role: Annotated[str, Form(max_length=32)]
) -> Response:
    viewer.need("admin")
    need_fresh(request, viewer)
    await change_role(user_id, as_json(request, role=role), service, viewer.who)
    return say("Role changed")


@router.post("/members/{user_id}/remove", **declare(scope="public", limit="poll"))
async def remove(service: ServiceDep, viewer: ViewerDep, user_id: str) -> Response:
    viewer.need("admin")
    await remove_member(user_id, service, viewer.who)
    return say("Member removed")


@router.post("/members/{user_id}/link", **declare(scope="public", limit="poll"))
async def sign_in_link(request: Request, service: ServiceDep, viewer: ViewerDep, user_id: str) -> HTMLResponse:
    """A link that signs a member in once. It gives what the member may do, so it never goes beyond who makes it."""
    viewer.need("admin")
    need_fresh(request, viewer)
    who = viewer.who

    oidc = service.settings.oidc

    def write(session: Session) -> str:
        changed_member(session, who, user_id, "make a sign-in link for this member")
        if sessions.sso_required(session.get_one(Organisation, who.org_id), oidc):
            raise Forbidden(f"members of this organisation sign in with {oidc.name}, and so a link would open nothing")
        made_by = who.link_by or who.actor
        return sessions.new_link(session, who.org_id, user_id, made_by=made_by, key_id=who.key_id)

    token = await service.database.write(while_good(request, who, write), lock=who.org_id)
    base = browser_base(service, request)
    values: dict[str, Any] = {"link": f"{base}{PREFIX}/login/{token}", "minutes": sessions.LINK_LIFE.seconds // 60}
    return page(request, "members_link.html", viewer, **values)


@router.post("/invitations", **declare(scope="public", limit="poll"))
async def invite(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    role: Annotated[str, Form(max_length=32)],
    days: Annotated[int, Form(ge=0, le=3650)] = 7,
    email: Annotated[str, Form(max_length=254)] = "",
) -> HTMLResponse:
    viewer.need("admin")
    need_fresh(request, viewer)
    made = await create_invitation(as_json(request, role=role, days=days, email=email), service, viewer.who)
    return page(request, "members_invitation.html", viewer, made=made)


@router.post("/invitations/{invitation_id}/revoke", **declare(scope="public", limit="poll"))
async def take_back(service: ServiceDep, viewer: ViewerDep, invitation_id: str) -> Response:
    viewer.need("admin")
    await revoke_invitation(invitation_id, service, viewer.who)
    return say("Invitation taken back")


@router.post("/members/sso", **declare(scope="public", limit="poll"))
async def require_sso(
    request: Request, service: ServiceDep, viewer: ViewerDep, required: Annotated[bool, Form()]
) -> Response:
    """Require sign-in by the provider. Only owners who came in that way may do it: nobody can shut themselves out by
    it."""
    viewer.need("admin")
    need_fresh(request, viewer)
    who, oidc = viewer.who, service.settings.oidc
    permit(who.reach, Reach.of_member("owner"), "say how members sign in")
    if required and not viewer.by_provider:
        raise Forbidden(f"sign in with {oidc.name} yourself first: only so do you know that it lets you in")

    def write(session: Session) -> None:
        organisations.require_sso(session, session.get_one(Organisation, who.org_id), required, who.key_id)

    await service.database.write(write)
    return say(f"Members sign in with {oidc.name} alone" if required else "Keys and links open the console again")


@router.post("/projects", **declare(scope="public", limit="poll"))
async def add_project(
    request: Request, service: ServiceDep, viewer: ViewerDep, name: Annotated[str, Form(max_length=128)]
) -> Response:
    viewer.need("admin")
    await create_project(as_json(request, name=name), service, viewer.who)
    return say("Project made")


@router.post("/projects/{project_id:path}/archive", **declare(scope="public", limit="poll"))
async def archive_project(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    project_id: str,
    archived: Annotated[bool, Form()] = True,
) -> Response:
    viewer.need("admin")
    await change_project(project_id, as_json(request, archived=archived), service, viewer.who)
    return say("Project archived" if archived else "Project restored")
