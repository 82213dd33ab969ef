"""What people write about a run."""

from __future__ import annotations

from weft.wire.base import Request, Response

__all__ = ["RunNotes", "SetNotesRequest"]


class SetNotesRequest(Request):
    """At most 4,096 characters; empty takes the notes away."""

    notes: str


class RunNotes(Response):
    notes: str
