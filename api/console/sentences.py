"""The audit log as sentences: who did what to what, with names where there are some.

`SENTENCES` has one for every event that the service writes (a test finds them in the code); an event of another version
is told by its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from api.console.formats import compact, usd_text
from api.console.titles import checkpoint_title


@dataclass(frozen=True)
class Called:
    """The names behind ids. An id without a name here is shown itself. API keys are found by their numbers and by their
    prefixes."""

    users: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    projects: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, str] = field(default_factory=dict)
    sessions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """One entry, to be told."""

    actor: str
    event: str
    target: str
    detail: Mapping[str, Any]
    names: Called

    def user(self, user_id: Any) -> str:
        return self.names.users.get(str(user_id), str(user_id))

    def key(self) -> str:
        number = str(self.detail.get("key_id", ""))
        return f"the key {_quoted(self.names.keys.get(number) or self.names.keys.get(self.target, self.target))}"

    def project(self, project_id: Any) -> str:
        return f"the project {_quoted(self.names.projects.get(str(project_id), str(project_id)))}"

    def session(self) -> str:
        return f"the session {_quoted(self.names.sessions.get(self.target, self.target))}"

    def run(self) -> str:
        return f"the run {_quoted(self.names.runs.get(self.target, self.target))}"

    def checkpoint(self, path: Any = None) -> str:
        return f"the checkpoint {_quoted(checkpoint_title(str(path or self.target), dict(self.names.runs)))}"

    def scope(self) -> str:
        """Whose limits or budgets these are: "project evals", "key:7", "organisation 1f"."""
        kind, _, id = self.target.replace(":", " ").partition(" ")
        if kind == "project":
            return self.project(id)
        if kind in ("key", "api_key"):
            return f"the key {_quoted(self.names.keys.get(id, id))}"
        return "the organisation"

    def dollars(self, name: str) -> str:
        return usd_text(int(self.detail.get(name) or 0))


def sentence(fact: Fact) -> str:
    """Who did what: "ada@acme.example made the key “laptop” for grace@acme.example"."""
    tell = SENTENCES.get(fact.event, _plain)
    by = fact.detail.get("link_by")
    link = f", signed in by a link that {actor(str(by), fact.names)} made" if by else ""
    groups = ", by their groups at the provider" if fact.detail.get("by_groups_of") else ""
    return f"{_capital(actor(fact.actor, fact.names))} {tell(fact)}{groups}{link}"


def actor(who: str, names: Called) -> str:
    """The actor `who` (`user:<id>`, `key:<id>`, `operator` or `server`) in the words of people."""
    kind, _, id = who.partition(":")
    if kind == "user":
        return names.users.get(id, id)
    if kind == "key":
        return f"the key {_quoted(names.keys.get(id, id))}"
    return f"the {who}"


def _plain(fact: Fact) -> str:
    return f"did {fact.event.replace('_', ' ')} to {fact.target}"


def _quoted(text: str) -> str:
    return f"“{text}”"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("the ") else text


def _listed(values: Mapping[str, Any]) -> str:
    """The limits of an entry: "requests per minute 60, no tokens per minute"."""
    parts = []
    for name, value in values.items():
        if name != "link_by":
            words = name.replace("_", " ")
            parts.append(f"no {words}" if value is None else f"{words} {value}")
    return ", ".join(parts) or "none"


def _lasts(seconds: Any) -> str:
    days, rest = divmod(int(seconds), 86_400)
    if days and not rest:
        return f"{days} day{'s' if days > 1 else ''}"
    return f"{int(seconds) / 3600:.3g} h"


def _key_created(fact: Fact) -> str:
    user, project = fact.detail.get("user_id"), fact.detail.get("project_id")
    whose = f" for {fact.user(user)}" if user else " for the organisation"
    within = f" in {fact.project(project)}" if project else ""
    may = ", ".join(fact.detail.get("scopes") or ["nothing"])
    return f"made {fact.key()}{whose}{within}, which may: {may}"


def _key_rotated(fact: Fact) -> str:
    overlap = int(fact.detail.get("overlap_s") or 0)
    old = f"; the old one stayed good for {_lasts(overlap)}" if overlap else "; the old one ended at once"
    return f"gave {fact.key()} another secret{old}"


def _session_assigned(fact: Fact) -> str:
    return f"moved {fact.session()} into {fact.project(fact.detail.get('project_id'))}"


def _session_created(fact: Fact) -> str:
    return f"began {fact.session()} in {fact.project(fact.detail.get('project_id'))}"


def _session_ended(how: str) -> Callable[[Fact], str]:
    def tell(fact: Fact) -> str:
        reason = fact.detail.get("reason")
        return f"{how} {fact.session()}{f': {reason}' if reason else ''}"

    return tell


def _checkpoint_created(fact: Fact) -> str:
    size = fact.detail.get("size_bytes")
    again = ", in place of one of that name" if fact.detail.get("overwritten") else ""
    return f"saved {fact.checkpoint()}{f' ({compact(int(size))}B)' if size else ''}{again}"


def _checkpoint_ttl_set(fact: Fact) -> str:
    seconds = fact.detail.get("ttl_seconds")
    return f"let {fact.checkpoint()} {f'expire after {_lasts(seconds)}' if seconds else 'be kept for ever'}"


def _invitation(fact: Fact) -> str:
    whom = fact.detail.get("email")
    return f"an invitation as {fact.detail.get('role', 'member')}{f' for {whom}' if whom else ''}"


def _signed_in(fact: Fact) -> str:
    issuer = fact.detail.get("issuer")
    return f"signed in to the console{f' with an account of {issuer}' if issuer else ''}"


def _limits_set(fact: Fact) -> str:
    return f"set the rate limits of {fact.scope()}: {_listed(fact.detail)}"


def _budget_set(fact: Fact) -> str:
    period = "a month" if fact.detail.get("period") == "month" else "in all"
    hard = "" if fact.detail.get("hard") else ", which only tells"
    return f"set a budget of {fact.dollars('limit_nusd')} {period} for {fact.scope()}{hard}"


SENTENCES: dict[str, Callable[[Fact], str]] = {
    "key_created": _key_created,
    "key_rotated": _key_rotated,
    "key_revoked": lambda fact: f"revoked {fact.key()}",
    "session_created": _session_created,
    "session_finished": _session_ended("ended"),
    "session_expired": _session_ended("ended, as nothing was heard of its client,"),
    "project_session_assigned": _session_assigned,
    "run_notes_set": lambda fact: f"wrote notes about {fact.run()}",
    "checkpoint_created": _checkpoint_created,
    "checkpoint_read": lambda fact: f"loaded {fact.checkpoint()} for {fact.detail.get('purpose', 'use')}",
    "checkpoint_copied": lambda fact: (
        f"copied {fact.checkpoint(fact.detail.get('source_path'))} to {fact.checkpoint()}"
    ),
    "checkpoint_published": lambda fact: f"made {fact.checkpoint()} public",
    "checkpoint_unpublished": lambda fact: f"made {fact.checkpoint()} private again",
    "checkpoint_ttl_set": _checkpoint_ttl_set,
    "checkpoint_deleted": lambda fact: f"deleted {fact.checkpoint()}",
    "checkpoint_expired": lambda fact: f"deleted {fact.checkpoint()}, whose time was over",
    "project_created": lambda fact: f"made {fact.project(fact.target)}",
    "project_renamed": lambda fact: (
        f"renamed the project {_quoted(fact.detail.get('was', ''))} to {_quoted(fact.detail.get('name', ''))}"
    ),
    "project_archived": lambda fact: f"archived {fact.project(fact.target)}",
    "project_restored": lambda fact: f"restored {fact.project(fact.target)}",
    "member_added": lambda fact: (
        f"added {fact.detail.get('email') or fact.user(fact.target)} as {fact.detail.get('role', 'member')}"
    ),
    "member_role_set": lambda fact: (
        f"made {fact.user(fact.target)} {fact.detail.get('role')}, who was {fact.detail.get('was')}"
    ),
    "member_removed": lambda fact: f"removed {fact.user(fact.target)}, who was {fact.detail.get('role', 'member')}",
    "member_link_made": lambda fact: (
        f"made a sign-in link for {fact.user(fact.target)}{', as operator' if fact.detail.get('operator') else ''}"
    ),
    "member_invited": lambda fact: f"made {_invitation(fact)}",
    "member_invitation_used": lambda fact: (
        f"made {fact.user(fact.detail.get('user_id'))} a member by {_invitation(fact)}"
    ),
    "member_invitation_revoked": lambda fact: f"took back {_invitation(fact)}",
    "member_unlinked": lambda fact: f"parted {fact.user(fact.target)} from their account of the OpenID provider",
    "console_signed_in": _signed_in,
    "limits_set": _limits_set,
    "quotas_set": lambda fact: f"set quotas: {_listed(fact.detail)}",
    "budget_set": _budget_set,
    "budget_removed": lambda fact: f"removed the budget {fact.target}",
    "credit_granted": lambda fact: f"gave {fact.dollars('amount_nusd')} of {fact.detail.get('kind', '')} credit",
    "credit_refunded": lambda fact: f"gave back {fact.dollars('amount_nusd')} for the operation {fact.target}",
    "alert_resolved": lambda fact: f"marked the alert {fact.target} as over",
    "credit_taken": lambda fact: f"took {fact.dollars('amount_nusd')} out of the balance",
    "wallet_mode_set": lambda fact: (
        f"made the wallet {fact.detail.get('mode')} with a credit limit of {fact.dollars('overdraft_nusd')}"
    ),
    "organization_status_set": lambda fact: (
        f"made the organisation {_words(fact.detail.get('to'))}, which was {_words(fact.detail.get('from'))}"
    ),
    "organization_weight_set": lambda fact: (
        f"set the organisation's share of the machines to {fact.detail.get('to')}, from {fact.detail.get('from')}"
    ),
    "organization_sso_required": lambda fact: "let members sign in with the OpenID provider alone",
    "organization_sso_not_required": lambda fact: "let members sign in with keys and links again",
    "organization_data_deleted": lambda fact: "deleted the organisation's data",
}


def _words(value: Any) -> str:
    return str(value).replace("_", " ")
