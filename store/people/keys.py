"""API keys of organisations.

A key is `tml-<8 id characters>_<43 secret characters>`: 256 random bits, so its SHA-256 is enough to keep and a slow
password hash would add nothing. The database never holds the key itself; `prefix` is its public part, and stays the
same when a key gets another secret.
"""

from __future__ import annotations

import hmac
import secrets
import string
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from store.database import audit
from store.database.caller import caller
from store.people.roles import ADMIN
from store.people.secret import digest
from store.tables import ApiKey, Organisation

_ALPHABET = string.ascii_letters + string.digits
_PREFIX_LENGTH = len("tml-") + 8


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def new_key(
    session: Session,
    org_id: str,
    *,
    name: str = "",
    scopes: Iterable[str] = (ADMIN,),
    user_id: str | None = None,
    project_id: str | None = None,
    expires_at: datetime | None = None,
    by: int | None = None,
) -> tuple[ApiKey, str]:
    """Make a key, with the key `by` (None: no key); returns its secret and its row. The caller has checked
    everything."""
    now = datetime.now(UTC)
    secret = f"tml-{_random(8)}_{_random(43)}"
    row = ApiKey(
        org_id=org_id,
        project_id=project_id,
        user_id=user_id,
        name=name,
        scopes=sorted(scopes),
        prefix=secret[:_PREFIX_LENGTH],
        last4=secret[-4:],
        secret_sha256=digest(secret),
        given_to=_receiver(),
        created_at=now,
        expires_at=expires_at,
    )
    session.add(row)
    session.flush()
    detail = {"key_id": row.id, "scopes": row.scopes, "user_id": user_id, "project_id": project_id}
    audit.record(session, org_id=org_id, key_id=by, event="key_created", target=row.prefix, detail=detail, at=now)
    return row, secret


def rotate(session: Session, row: ApiKey, overlap: timedelta, by: int | None = None) -> str:
    """Give a key another secret; the present one stays good for `overlap`. Returns the new secret, which is not
    stored."""
    now = datetime.now(UTC)
    secret = f"{row.prefix}_{_random(43)}"
    row.previous_sha256, row.previous_expires_at = row.secret_sha256, now + overlap
    row.secret_sha256, row.last4, row.given_to = digest(secret), secret[-4:], _receiver()
    detail = {"key_id": row.id, "overlap_s": int(overlap.total_seconds())}
    audit.record(session, org_id=row.org_id, key_id=by, event="key_rotated", target=row.prefix, detail=detail, at=now)
    session.flush()
    return secret


def find(session: Session, secret: str, now: datetime | None = None) -> ApiKey | None:
    """The key with that secret, if it is good: not revoked, expired or rotated away."""
    sha256, now = digest(secret), now or datetime.now(UTC)
    query = select(ApiKey).where(or_(ApiKey.secret_sha256 == sha256, ApiKey.previous_sha256 == sha256))
    row = session.scalars(query).one_or_none()
    if row is None or not is_good(row, now):
        return None
    if hmac.compare_digest(row.secret_sha256, sha256):
        return row
    overlaps = row.previous_expires_at is not None and now < row.previous_expires_at
    return row if overlaps and hmac.compare_digest(row.previous_sha256 or "", sha256) else None


def secret_ends(row: ApiKey, secret: str) -> datetime | None:
    """The end of a secret of `row`: that of the key, or of the overlap if the secret has been replaced by a newer one.
    None: no end."""
    if hmac.compare_digest(row.secret_sha256, digest(secret)):
        return row.expires_at
    return earlier(row.expires_at, row.previous_expires_at)


def earlier(one: datetime | None, other: datetime | None) -> datetime | None:
    """The earlier of two ends, where None means no end."""
    return min((end for end in (one, other) if end is not None), default=None)


def _receiver() -> str | None:
    """The person or key that is given a secret made by this call; in a session begun by a link, the maker of the link,
    who could be using the session. None for the operator, who hands the secret on."""
    who = caller()
    receiver = who.link_by or who.actor
    return None if receiver in ("operator", "server") else receiver


def is_good(row: ApiKey, now: datetime | None = None) -> bool:
    now = now or datetime.now(UTC)
    return row.revoked_at is None and (row.expires_at is None or now < row.expires_at)


def good_at(now: datetime) -> ColumnElement[bool]:
    """The condition for `where` that selects the keys for which `is_good` is true."""
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now))


def revoke(session: Session, key: str, by: int | None = None) -> int:
    """Revoke by prefix (or by the whole key), at the wish of the key `by` (None: the operator). Returns how many keys
    were revoked by this call."""
    rows = session.scalars(select(ApiKey).where(ApiKey.prefix == key[:_PREFIX_LENGTH], ApiKey.revoked_at.is_(None)))
    revoked = 0
    for row in rows:
        whole = len(key) > _PREFIX_LENGTH
        if whole and digest(key) not in (row.secret_sha256, row.previous_sha256):
            continue
        revoke_row(session, row, by)
        revoked += 1
    return revoked


def revoke_row(session: Session, row: ApiKey, by: int | None = None) -> None:
    row.revoked_at = datetime.now(UTC)
    detail = {"key_id": row.id}
    audit.record(
        session, org_id=row.org_id, key_id=by, event="key_revoked", target=row.prefix, detail=detail, at=row.revoked_at
    )


def list_keys(session: Session) -> list[tuple[Organisation, ApiKey]]:
    """Every key with its organisation, oldest first."""
    rows = session.execute(
        select(Organisation, ApiKey).join(ApiKey, ApiKey.org_id == Organisation.id).order_by(ApiKey.id)
    )
    return [(org, key) for org, key in rows]
