"""The half of a `RestClient` that finds sessions, moves them and exports their traces."""

from __future__ import annotations

import asyncio

from weft.errors import RequestFailedError
from weft.future import APIFuture
from weft.rest_base import RestBase, part
from weft.wire.rest import AccessScope, GetSessionResponse, ListSessionsResponse
from weft.wire.sampling import GetSamplerResponse
from weft.wire.sessions import (
    AssignProjectRequest,
    SessionSearchRequest,
    SessionSearchResponse,
    TraceExportResponse,
    WhoamiResponse,
)

TRACE_POLL_S = 2.0


class RestSessions(RestBase):
    """Sessions, and who we are."""

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Ids of sessions, newest first."""
        return self._get("/sessions", ListSessionsResponse, limit=limit, offset=offset, access_scope=access_scope)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> APIFuture[GetSessionResponse]:
        """The runs and samplers of a session."""
        return self._get(f"/sessions/{part(session_id)}", GetSessionResponse, access_scope=access_scope)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """One page of sessions that match, newest first; its `next_cursor` is the next request's `cursor`."""
        return self._post("/sessions/search", SessionSearchResponse, request)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session, with its runs and samplers, into a project."""
        return self._do("PUT", f"/sessions/{part(session_id)}/project", AssignProjectRequest(project_id=project_id))

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """The URL of a trace of the session's operations, for ui.perfetto.dev; fetched without credentials."""
        return APIFuture.start(self._export_session_trace(session_id))

    async def _export_session_trace(self, session_id: str) -> str:
        route = f"/sessions/{part(session_id)}/trace_export"
        while True:
            export = await self._transport.ask("GET", route, TraceExportResponse)
            if export.status == "ready" and export.url:
                return export.url
            if export.status != "pending":
                raise RequestFailedError(f"trace of session {session_id}: {export.error}", session_id, "server")
            await asyncio.sleep(TRACE_POLL_S)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """What a sampler draws from."""
        return self._get(f"/samplers/{part(sampler_id)}", GetSamplerResponse)

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Who the credential speaks for, as the token says that the server gives for it."""
        return APIFuture.start(self._transport.identity())
