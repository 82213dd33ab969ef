"""API keys of organisations.

A key is `tml-<8 id characters>_<43 secret characters>`: 256 random bits, so its SHA-256 is enough to keep and a slow
password hash would add nothing. The database never holds the key itself; `prefix` is its public part.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import string
import uuid
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from store import audit
from store.tables import ApiKey, Organisation

_ALPHABET = string.ascii_letters + string.digits
_PREFIX_LENGTH = len("tml-") + 8


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(session: Session, org_name: str) -> str:
    """A new key for the organisation of that name, which is made if it is not there. Returns the key, only here."""
    now = datetime.now(UTC)
    org = session.scalar(select(Organisation).where(Organisation.name == org_name))
    if org is None:
        org = Organisation(id=uuid.uuid4().hex, name=org_name, created_at=now)
        session.add(org)
        session.flush()
    secret = f"tml-{_random(8)}_{_random(43)}"
    prefix = secret[:_PREFIX_LENGTH]
    session.add(ApiKey(org_id=org.id, prefix=prefix, secret_sha256=_digest(secret), created_at=now))
    audit.record(session, org_id=org.id, key_id=None, event="key_created", target=prefix, at=now)
    session.flush()
    return secret


def authenticate(session: Session, secret: str) -> str | None:
    """The id of the organisation that the key belongs to; None for an unknown or revoked key."""
    digest = _digest(secret)
    key = session.scalar(select(ApiKey).where(ApiKey.secret_sha256 == digest))
    if key is None or key.revoked_at is not None or not hmac.compare_digest(key.secret_sha256, digest):
        return None
    return key.org_id


def revoke(session: Session, key: str, by: int | None = None) -> int:
    """Revoke by prefix (or by the whole key), at the wish of the key `by` (None: the operator). Returns how many keys
    were revoked by this call."""
    rows = session.scalars(select(ApiKey).where(ApiKey.prefix == key[:_PREFIX_LENGTH], ApiKey.revoked_at.is_(None)))
    now = datetime.now(UTC)
    revoked = 0
    for row in rows:
        if len(key) > _PREFIX_LENGTH and not hmac.compare_digest(row.secret_sha256, _digest(key)):
            continue
        row.revoked_at = now
        audit.record(session, org_id=row.org_id, key_id=by, event="key_revoked", target=row.prefix, at=now)
        revoked += 1
    return revoked


def list_keys(session: Session) -> list[tuple[Organisation, ApiKey]]:
    """Every key with its organisation, oldest first."""
    rows = session.execute(
        select(Organisation, ApiKey).join(ApiKey, ApiKey.org_id == Organisation.id).order_by(ApiKey.id)
    )
    return [(org, key) for org, key in rows]
