"""An API key for a test."""

from __future__ import annotations

from sqlalchemy.orm import Session

from store.people import keys, organisations


def create_key(session: Session, org_name: str) -> str:
    """A new key with all scopes for the organisation of that name, which is made if it does not exist."""
    return keys.new_key(session, organisations.organisation_named(session, org_name).id)[1]
