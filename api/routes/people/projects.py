"""Projects: made, listed, renamed, archived."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire.account.organisation import ProjectRow, ProjectsResponse

from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.state.service import ServiceDep
from api.who.projects import visible_project, visible_projects
from store import tables
from store.people import organisations

router = APIRouter(prefix="/api/v1/weft/projects")


class NewProject(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class ProjectChange(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str | None = None
    archived: bool | None = None


@router.get("", **declare(scope="any", limit="call"))
async def list_projects(service: ServiceDep, who: PrincipalDep, archived: bool = False) -> ProjectsResponse:
    """Projects by name; archived ones if asked."""

    def read(session: Session) -> list[ProjectRow]:
        query = select(tables.Project).where(visible_projects(who))
        if not archived:
            query = query.filter_by(archived_at=None)
        return [_shown(row) for row in session.scalars(query.order_by(tables.Project.name))]

    return ProjectsResponse(projects=await service.read(read))


@router.post("", **declare(scope="admin", limit="call"))
async def create_project(request: Request, service: ServiceDep, who: PrincipalDep) -> ProjectRow:
    body = await read_json(request, NewProject)

    def write(session: Session) -> ProjectRow:
        return _shown(organisations.create_project(session, who.org_id, body.name, key_id=who.key_id))

    return await service.database.write(write, lock=who.org_id)


@router.get("/{project_id:path}", **declare(scope="any", limit="call"))
async def get_project(project_id: str, service: ServiceDep, who: PrincipalDep) -> ProjectRow:
    return await service.read(lambda session: _shown(visible_project(session, who, project_id)))


@router.patch("/{project_id:path}", **declare(scope="admin", limit="call"))
async def change_project(project_id: str, request: Request, service: ServiceDep, who: PrincipalDep) -> ProjectRow:
    """Rename, archive, restore. The id stays, and with it what its sessions and bills say."""
    body = await read_json(request, ProjectChange)

    def write(session: Session) -> ProjectRow:
        row = organisations.project_by_id(session, who.org_id, project_id)
        if body.name is not None:
            organisations.rename_project(session, row, body.name, who.key_id)
        if body.archived is not None:
            organisations.archive_project(session, row, body.archived, who.key_id)
        return _shown(row)

    return await service.database.write(write, lock=who.org_id)


def _shown(row: tables.Project) -> ProjectRow:
    return ProjectRow.model_validate(row, from_attributes=True)
