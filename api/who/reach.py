"""The one rule of credentials: none makes, or touches, one that is stronger or longer-lived than itself.

Credentials are API keys, the tokens and the old secrets that stand for one, sessions of the console, the links that
begin them, signed links, and memberships, which sign-in links and keys follow from. Each has a `Reach`; `beyond`
compares two. `permit` is asked wherever one is made, changed or ended; what merely ends by itself (tokens, signed
links) is cut to the end of what made it (`Reach.ends_by`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from api.errors import Forbidden
from store.people.roles import ADMIN, BEYOND_A_PROJECT, SCOPES


@dataclass(frozen=True)
class Reach:
    """How far a credential goes. `scopes` are those given to it, with `admin` spelled out. They do not depend on what
    the holder's role leaves of them today, because a role can grow. `project_id` None: all projects. `until` None:
    until it is revoked."""

    scopes: frozenset[str]
    role: str
    project_id: str | None = None
    until: datetime | None = None

    @classmethod
    def of(
        cls, scopes: Iterable[str], role: str, project_id: str | None = None, until: datetime | None = None
    ) -> Reach:
        given = frozenset(scopes)
        given = SCOPES if ADMIN in given else given
        return cls(given - BEYOND_A_PROJECT if project_id is not None else given, role, project_id, until)

    @classmethod
    def of_member(cls, role: str) -> Reach:
        """The reach of a membership: signing in by it allows everything that the role may, without end."""
        return cls.of(SCOPES, role)

    def ends_by(self, wished: datetime) -> datetime:
        """The end of something that this credential makes and that is to last until `wished`."""
        return wished if self.until is None else min(wished, self.until)


def beyond(own: Reach, other: Reach) -> list[str]:
    """What `other` allows and `own` does not, or not for as long, in words; empty if nothing."""
    found = []
    if more := other.scopes - own.scopes:
        found.append(f"scopes: {', '.join(sorted(more))}, which yours does not have")
    if _rank(other) > _rank(own):
        found.append(f"role: it {_ADDED[_rank(other)]}, and yours does not")
    if own.project_id is not None and other.project_id != own.project_id:
        found.append(f"project: yours is bound to {own.project_id}")
    if own.until is not None and (other.until is None or other.until > own.until):
        ends = "has no end" if other.until is None else f"ends {other.until:%Y-%m-%d %H:%M:%S} UTC"
        found.append(f"expiry: it {ends}, and yours ends {own.until:%Y-%m-%d %H:%M:%S} UTC")
    return found


def permit(own: Reach, other: Reach, what: str) -> None:
    """Raises Forbidden if `other` goes beyond `own`. `what` says what is asked, such as "make this key"."""
    if found := beyond(own, other):
        raise Forbidden(
            f"you cannot {what}, because it goes beyond the credential that you use ({'; '.join(found)}): use one that "
            "goes as far, or ask an owner of your organisation"
        )


#: What a role allows beyond scopes, by rank: admins and owners change the work of others; owners, with `admin`,
#: everything else.
_ADDED = ("changes its own work", "changes the work of others", "has the scope admin of an owner")


def _rank(reach: Reach) -> int:
    if reach.role not in ("owner", "admin"):
        return 0
    return 2 if reach.role == "owner" and ADMIN in reach.scopes else 1
