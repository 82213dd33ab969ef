"""The members of an organisation and their roles."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy.orm import Session
from weft.wire.account.organisation import MemberRoleResponse, MemberRow, MembersResponse
from weft.wire.service import StatusResponse

from api.http.access import declare
from api.http.auth import PresentPrincipalDep, PrincipalDep, while_good
from api.http.bodies import read_json
from api.state.service import ServiceDep
from api.who.credentials import changed_member
from api.who.reach import Reach, permit
from store import tables
from store.people import organisations
from store.people.roles import ADMIN, Role

router = APIRouter(prefix="/api/v1/weft/members")


class NewMember(BaseModel):
    model_config = ConfigDict(extra="forbid")
    email: str
    role: Role


class RoleChange(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Role


@router.get("", **declare(scope="any", limit="call"))
async def list_members(service: ServiceDep, who: PrincipalDep) -> MembersResponse:
    """Members see their colleagues. A key that is bound to a project, and one of nobody without `admin`, see at most
    whose they are: addresses are no part of their work."""
    everybody = who.project_id is None and (who.user_id is not None or ADMIN in who.scopes)

    def read(session: Session) -> list[MemberRow]:
        found = organisations.members(session, who.org_id)
        return [_shown(row, user) for row, user in found if everybody or user.id == who.user_id]

    return MembersResponse(members=await service.read(read))


@router.post("", **declare(scope="admin", limit="call"))
async def add_member(request: Request, service: ServiceDep, who: PresentPrincipalDep) -> MemberRow:
    """Make a person a member. They sign in with a link that the operator or the console gives them."""
    body = await read_json(request, NewMember)
    permit(who.reach, Reach.of_member(body.role), "add this member")

    def write(session: Session) -> MemberRow:
        user = organisations.add_member(session, who.org_id, body.email, body.role, who.key_id)
        return _shown(session.get_one(tables.Membership, (who.org_id, user.id)), user)

    return await service.database.write(while_good(request, who, write), lock=who.org_id)


@router.put("/{user_id}", **declare(scope="admin", limit="call"))
async def change_role(
    user_id: str, request: Request, service: ServiceDep, who: PresentPrincipalDep
) -> MemberRoleResponse:
    """Another role. The member's keys have it within seconds."""
    body = await read_json(request, RoleChange)

    def write(session: Session) -> MemberRoleResponse:
        changed_member(session, who, user_id, "change the role of this member")
        permit(who.reach, Reach.of_member(body.role), f"give the role {body.role}")
        organisations.change_role(session, who.org_id, user_id, body.role, who.key_id)
        return MemberRoleResponse(user_id=user_id, role=body.role)

    return await service.database.write(while_good(request, who, write), lock=who.org_id)


@router.delete("/{user_id}", **declare(scope="admin", limit="call"))
async def remove_member(user_id: str, service: ServiceDep, who: PresentPrincipalDep) -> StatusResponse:
    """End a membership; the member's keys are revoked with it."""

    def write(session: Session) -> None:
        changed_member(session, who, user_id, "remove this member")
        organisations.remove_member(session, who.org_id, user_id, who.key_id)

    await service.database.write(write, lock=who.org_id)
    return StatusResponse(status="removed")


def _shown(row: tables.Membership, user: tables.User) -> MemberRow:
    return MemberRow(user_id=user.id, email=user.email, role=row.role, created_at=row.created_at)
