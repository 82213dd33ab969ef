"""Invitations: links by which people become members of the organisation, each once and with the role that it has."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session
from weft.wire.account.organisation import InvitationRow, InvitationsResponse, InvitationWithLink
from weft.wire.base import Positive
from weft.wire.service import StatusResponse

from api.errors import Invalid
from api.http.access import declare
from api.http.auth import PresentPrincipalDep, PrincipalDep, while_good
from api.http.bodies import read_json
from api.state.service import Service, ServiceDep
from api.who.lookup import row_of_anyone
from api.who.reach import Reach, permit
from store import tables
from store.people import invitations, organisations
from store.people.roles import Role

router = APIRouter(prefix="/api/v1/weft/invitations")

JOIN = "/console/join/"


class NewInvitation(BaseModel):
    """`email`: the only person who may use it; without one, anybody who signs in by the OpenID provider, or is signed
    in already."""

    model_config = ConfigDict(extra="forbid")
    role: Role
    days: Annotated[Positive, Field(le=invitations.MAX_DAYS)] = 7
    email: str | None = None


@router.get("", **declare(scope="admin", limit="call"))
async def list_invitations(service: ServiceDep, who: PrincipalDep) -> InvitationsResponse:
    """Invitations that may still be used, newest first, without their links."""

    def read(session: Session) -> list[InvitationRow]:
        return [_shown(row) for row in invitations.open_of(session, who.org_id)]

    return InvitationsResponse(invitations=await service.read(read))


@router.post("", **declare(scope="admin", limit="call"))
async def create_invitation(request: Request, service: ServiceDep, who: PresentPrincipalDep) -> InvitationWithLink:
    """A new invitation, and here only its link. Nobody invites anybody to more than they have themselves."""
    body = await read_json(request, NewInvitation)
    if body.email is None and not service.settings.oidc.on:
        raise Invalid(
            "email: say for whom it is: without an OpenID provider nothing else tells who it is that opens the link"
        )
    permit(who.reach, Reach.of_member(body.role), f"invite anybody as {body.role}")

    def write(session: Session) -> InvitationWithLink:
        row, secret = invitations.make(session, who.org_id, body.role, body.days, body.email, who.key_id)
        return InvitationWithLink(**_shown(row).model_dump(), link=browser_base(service, request) + JOIN + secret)

    return await service.database.write(while_good(request, who, write), lock=who.org_id)


@router.delete("/{invitation_id}", **declare(scope="admin", limit="call"))
async def revoke_invitation(invitation_id: str, service: ServiceDep, who: PresentPrincipalDep) -> StatusResponse:
    """Its link is good for nothing from now on."""

    def write(session: Session) -> None:
        row = row_of_anyone(session, tables.Invitation, invitation_id)
        if row is None or row.org_id != who.org_id:
            raise organisations.NoSuch(f"no invitation {invitation_id[:80]!r}")
        permit(who.reach, Reach.of_member(row.role), "take back this invitation")
        invitations.revoke(session, row, who.key_id)

    await service.database.write(write)
    return StatusResponse(status="revoked")


def browser_base(service: Service, request: Request) -> str:
    """The address at which browsers find this server: from the settings, else from the request."""
    return (service.settings.oidc.public_url or str(request.base_url)).rstrip("/")


def _shown(row: tables.Invitation) -> InvitationRow:
    return InvitationRow.model_validate(row, from_attributes=True)
