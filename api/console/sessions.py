"""Who is signed in: sessions of browsers, kept by the server, and the links that begin them.

A secret (session id or link) is 256 random bits that only the browser has; here is its SHA-256. What a session may do
is looked up at each request, so a revoked key or an ended membership ends it at once. A session stands for what opened
it, and goes as far (`api.who.reach`): a key, or by a link the member; what gives out secrets asks for a fresh one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from api.who.principal import Principal, RateLimit, principal_of
from store.database import audit
from store.database.caller import acting_as, caller
from store.people.identities import Account
from store.people.keys import find, is_good, secret_ends
from store.people.oidc_settings import OidcSettings
from store.people.roles import ALLOWED
from store.people.secret import digest
from store.tables import ApiKey, BrowserSession, LoginLink, Membership, Organisation, User

#: A session ends when it has not been used for this long, and in any case this long after its start.
IDLE = timedelta(hours=2)
ABSOLUTE = timedelta(hours=24)
#: Making keys and moving money requires a sign-in not older than this.
FRESH = timedelta(hours=1)
#: How long a sign-in link is valid.
LINK_LIFE = timedelta(minutes=15)
#: The time of proof for sessions whose provider does not tell one.
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
#: How often the use of a session is written down.
NOTED = timedelta(minutes=1)
#: How many sessions one key, or one member, may have; the oldest are ended.
MAX_SESSIONS = 100


@dataclass(frozen=True)
class SignedIn:
    """Somebody with a good session. `name` is what they are called."""

    who: Principal
    org_name: str
    name: str
    operator: bool
    since: datetime  # when they proved who they are
    stale: bool  # whether its use should be written down
    by_provider: bool


class SsoNeeded(Exception):
    """The organisation's members sign in by the OpenID provider alone."""


def sso_required(org: Organisation, oidc: OidcSettings) -> bool:
    """True if only the provider (or a link of the operator) can open a session of this organisation: keys, and links
    that members make, cannot."""
    return oidc.required or org.sso_required_at is not None


def sign_in_with_key(session: Session, key: str, before: str, now: datetime, oidc: OidcSettings) -> str | None:
    """A new session for the holder of an API key; None if the key is not good. It replaces the session that the browser
    had `before`, as every sign-in does. Raises SsoNeeded."""
    row = find(session, key, now)
    if row is None:
        return None
    if sso_required(session.get_one(Organisation, row.org_id), oidc):
        raise SsoNeeded
    _note(session, row.org_id, f"key:{row.id}", row.id, row.prefix)
    return _begin(session, row.org_id, before, now, key_id=row.id, until=secret_ends(row, key))


def new_link(
    session: Session,
    org_id: str,
    user_id: str,
    *,
    operator: bool = False,
    made_by: str | None = None,
    key_id: int | None = None,
) -> str:
    """The secret of a link that signs a member in, once, made by the actor `made_by` (None: the operator) with the key
    `key_id`."""
    now, token = datetime.now(UTC), secrets.token_urlsafe(32)
    detail = {"operator": True} if operator else None
    audit.record(session, org_id=org_id, key_id=key_id, event="member_link_made", target=user_id, detail=detail, at=now)
    session.add(
        LoginLink(
            token_sha256=digest(token),
            org_id=org_id,
            user_id=user_id,
            operator=operator,
            made_by=made_by,
            created_at=now,
            expires_at=now + LINK_LIFE,
        )
    )
    return token


def sign_in_with_link(session: Session, token: str, before: str, now: datetime, oidc: OidcSettings) -> str | None:
    """A new session for whom the link is for, who must still be a member. Only the first use counts. Raises SsoNeeded
    for the link of a member; the operator's is the way in when the provider is away."""
    unused = (LoginLink.token_sha256 == digest(token), LoginLink.used_at.is_(None), LoginLink.expires_at > now)
    used = update(LoginLink).where(*unused).values(used_at=now).returning(LoginLink)
    link = session.scalars(used, execution_options={"synchronize_session": False}).one_or_none()
    if link is None or session.get(Membership, (link.org_id, link.user_id)) is None:
        return None
    if link.made_by is not None and sso_required(session.get_one(Organisation, link.org_id), oidc):
        raise SsoNeeded
    _note(session, link.org_id, f"user:{link.user_id}", None, link.user_id, link.made_by)
    user_id, operator, link_by = link.user_id, link.operator, link.made_by
    return _begin(session, link.org_id, before, now, user_id=user_id, operator=operator, link_by=link_by)


def sign_in_member(session: Session, org_id: str, user_id: str, before: str, now: datetime, link_by: str) -> str:
    """A new session for a person who has just become a member by a link that `link_by` made."""
    _note(session, org_id, f"user:{user_id}", None, user_id, link_by)
    return _begin(session, org_id, before, now, user_id=user_id, link_by=link_by)


def sign_in_with_account(
    session: Session, org_id: str, user_id: str, before: str, account: Account, now: datetime, life_s: int
) -> str:
    """A new session for a member whose account at the provider has been proved."""
    _note(session, org_id, f"user:{user_id}", None, user_id, issuer=account.issuer)
    issuer, proved_at, ends = account.issuer, account.proved_at, now + timedelta(seconds=life_s)
    return _begin(session, org_id, before, now, user_id=user_id, until=ends, issuer=issuer, proved_at=proved_at)


def signed_in(session: Session, sid: str, now: datetime, oidc: OidcSettings) -> SignedIn | None:
    """The person who is signed in by this session; None if the session is not good."""
    row = session.get(BrowserSession, digest(sid))
    if row is None or now >= row.expires_at or now - row.last_seen_at >= IDLE:
        return None
    org = session.get_one(Organisation, row.org_id)
    by_provider, by_operator = row.issuer is not None, row.key_id is None and row.link_by is None
    if row.issuer != oidc.issuer if by_provider else sso_required(org, oidc) and not by_operator:
        return None
    found = _holder(session, row, org)
    if found is None:
        return None
    who, name = found
    since = row.proved_at or LONG_AGO if by_provider else row.created_at
    return SignedIn(who, org.name, name, row.operator, since, now - row.last_seen_at >= NOTED, by_provider)


def note_use(session: Session, sid: str, now: datetime) -> None:
    session.execute(update(BrowserSession).filter_by(sid_sha256=digest(sid)).values(last_seen_at=now))


def sign_out(session: Session, sid: str) -> None:
    session.execute(delete(BrowserSession).where(BrowserSession.sid_sha256 == digest(sid)))


def _holder(session: Session, row: BrowserSession, org: Organisation) -> tuple[Principal, str] | None:
    if row.key_id is not None:
        key = session.get(ApiKey, row.key_id)
        if key is None or not is_good(key):
            return None
        who = principal_of(session, key, row.opened_until)
        return (who, key.name or f"{key.prefix}…") if who is not None else None
    member = session.get(Membership, (row.org_id, row.user_id or ""))
    user = session.get(User, row.user_id or "")
    if member is None or user is None:
        return None
    scopes, limits = ALLOWED[member.role], (RateLimit.of(org),)
    who = Principal(org.id, None, user.id, None, member.role, scopes, org.status, limits, link_by=row.link_by)
    return who, user.email


def _note(
    session: Session,
    org_id: str,
    actor: str,
    key_id: int | None,
    target: str,
    link_by: str | None = None,
    issuer: str | None = None,
) -> None:
    detail = {"issuer": issuer} if issuer is not None else None
    with acting_as(replace(caller(), org_id=org_id, actor=actor, link_by=link_by)):
        audit.record(session, org_id=org_id, key_id=key_id, event="console_signed_in", target=target, detail=detail)


def _begin(
    session: Session,
    org_id: str,
    before: str,
    now: datetime,
    *,
    key_id: int | None = None,
    user_id: str | None = None,
    operator: bool = False,
    until: datetime | None = None,
    link_by: str | None = None,
    issuer: str | None = None,
    proved_at: datetime | None = None,
) -> str:
    """Begin a session under a new id. Sessions that have ended, or are too many, are deleted; also the one that the
    browser had `before`, since the browser forgets it and nobody could sign out of it any more."""
    session.execute(delete(BrowserSession).where(BrowserSession.expires_at <= now))
    session.execute(delete(LoginLink).where(LoginLink.expires_at <= now - ABSOLUTE))
    theirs = select(BrowserSession.sid_sha256).filter_by(org_id=org_id, key_id=key_id, user_id=user_id)
    for old in session.scalars(theirs.order_by(BrowserSession.created_at.desc()).offset(MAX_SESSIONS - 1)).all():
        session.execute(delete(BrowserSession).where(BrowserSession.sid_sha256 == old))
    sid = secrets.token_urlsafe(32)
    session.add(
        BrowserSession(
            sid_sha256=digest(sid),
            org_id=org_id,
            key_id=key_id,
            user_id=user_id,
            operator=operator,
            opened_until=until if key_id is not None else None,
            link_by=link_by,
            issuer=issuer,
            proved_at=proved_at,
            created_at=now,
            last_seen_at=now,
            expires_at=now + ABSOLUTE if until is None else min(now + ABSOLUTE, until),
        )
    )
    if before:
        sign_out(session, before)
    session.flush()
    return sid
