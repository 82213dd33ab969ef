"""Turns of clients' own sessions that are being sampled: they count against a quota before they are stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class ComingTurn:
    """At most so many bytes, of one organisation."""

    org_id: str
    size_bytes: int
