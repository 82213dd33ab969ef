"""The audit log reads as sentences, for everything that the code writes into it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from api.console.sentences import SENTENCES, Called, Fact, sentence
from store.database.audit import GROUPS
from tests.console.conftest import Console

ROOT = Path(__file__).parents[2]
ROOMS = ("api", "billing", "scheduler", "store", "workers")
#: How sessions end (`api.state.liveness.end`): the name of the event contains it.
ENDINGS = ("finished", "expired")


@cache
def written() -> set[str]:
    """Every event that the code gives to `audit.record`, directly or through a function of its module."""
    texts = (path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {event for text in texts if "audit.record" in text for event in _events(ast.parse(text))}


def _events(module: ast.Module) -> Iterator[str]:
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func) != "audit.record":
                continue
            (given,) = (keyword.value for keyword in call.keywords if keyword.arg == "event")
            names = [argument.arg for argument in function.args.args]
            if isinstance(given, ast.Name) and given.id in names:
                yield from _passed(module, function.name, names.index(given.id), given.id)
            else:
                yield from _values(_assigned(function, given) if isinstance(given, ast.Name) else given)


def _assigned(function: ast.AST, name: ast.Name) -> ast.expr:
    """The expression that `function` assigns to a name."""
    (found,) = (
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name.id
    )
    return found


def _passed(module: ast.Module, function: str, place: int, name: str) -> Iterator[str]:
    """The values that callers give to `function` as argument number `place`, or by `name`."""
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == function:
            named = [keyword.value for keyword in call.keywords if keyword.arg == name]
            yield from _values(named[0] if named else call.args[place])


def _values(given: ast.expr) -> Iterator[str]:
    if isinstance(given, ast.IfExp):
        yield from _values(given.body)
        yield from _values(given.orelse)
    elif isinstance(given, ast.JoinedStr):
        assert ast.unparse(given) == "f'session_{state}'", ast.unparse(given)
        yield from (f"session_{ending}" for ending in ENDINGS)
    else:
        assert isinstance(given, ast.Constant), ast.unparse(given)
        assert isinstance(given.value, str)
        yield given.value


def test_every_event_has_a_sentence() -> None:
    assert written() == SENTENCES.keys()


def test_every_event_stands_on_the_page_beside_the_type_that_asks_for_it() -> None:
    page = (ROOT / "docs" / "sessions.md").read_text().partition("## Audit")[2].partition("## Traces")[0]
    rows = re.findall(r"^\| `(\w+)`.*? \| (.*) \|$", page, re.M)
    told = {kind: set(re.findall(r"`(\w+)`", events)) for kind, events in rows if kind != "event_type"}
    asked = {kind: {event for event in written() if event.startswith(GROUPS[kind])} for kind in GROUPS if kind != "all"}
    assert told == {**asked, "all": written() - set().union(*asked.values())}
    assert {"limits_set", "quotas_set"} <= told["organizations"]


NAMES = Called(
    users={"u1": "ada@acme.example", "u2": "grace@acme.example"},
    keys={"7": "laptop", "tml-abc": "laptop"},
    projects={"p1": "evals"},
    runs={"s:train:0": "gsm8k"},
    sessions={"s": "first try"},
)


@pytest.mark.parametrize(
    ("actor", "event", "target", "detail", "told"),
    [
        (
            "user:u1",
            "key_created",
            "tml-abc",
            {"key_id": 7, "user_id": "u2", "scopes": ["train"], "project_id": "p1"},
            "ada@acme.example made the key “laptop” for grace@acme.example in the project “evals”, which may: train",
        ),
        (
            "key:7",
            "checkpoint_ttl_set",
            "tinker://s:train:0/weights/best",
            {"ttl_seconds": 3600},
            "The key “laptop” let the checkpoint “best of gsm8k” expire after 1 h",
        ),
        (
            "operator",
            "limits_set",
            "api_key 7",
            {"requests_per_minute": 60, "max_in_flight": None},
            "The operator set the rate limits of the key “laptop”: requests per minute 60, no max in flight",
        ),
        (
            "user:u1",
            "budget_set",
            "project:p1",
            {"limit_nusd": 5 * 10**9, "period": "month", "hard": True},
            "ada@acme.example set a budget of $5.00 a month for the project “evals”",
        ),
        (
            "server",
            "session_expired",
            "s",
            {},
            "The server ended, as nothing was heard of its client, the session “first try”",
        ),
        (
            "user:u2",
            "console_signed_in",
            "u2",
            {"link_by": "user:u1"},
            "grace@acme.example signed in to the console, signed in by a link that ada@acme.example made",
        ),
        (
            "server",
            "member_invitation_used",
            "i1",
            {"role": "viewer", "email": "grace@acme.example", "user_id": "u2"},
            "The server made grace@acme.example a member by an invitation as viewer for grace@acme.example",
        ),
        (
            "server",
            "member_role_set",
            "u2",
            {"was": "viewer", "role": "admin", "by_groups_of": "https://id.example"},
            "The server made grace@acme.example admin, who was viewer, by their groups at the provider",
        ),
        ("user:gone", "member_removed", "u2", {"role": "admin"}, "gone removed grace@acme.example, who was admin"),
        ("key:9", "of_tomorrow", "x", {}, "The key “9” did of tomorrow to x"),
    ],
)
def test_who_did_what(actor: str, event: str, target: str, detail: dict[str, object], told: str) -> None:
    assert sentence(Fact(actor, event, target, detail, NAMES)) == told


@pytest.mark.parametrize("event", sorted(SENTENCES))
def test_no_detail_is_needed(event: str) -> None:
    """Entries of older versions, or with odd targets, get a sentence too."""
    for target in ("", "x", "tinker://nonsense", "org:1"):
        assert sentence(Fact("server", event, target, {}, Called())).startswith("The server ")


def test_names_on_the_page(console: Console) -> None:
    made = console.made
    console.sign_in()
    console.press("/keys", name="cluster <b>", scopes=["train"], user_id=made.users["member"])
    console.press("/projects", name="ablations")
    console.press("/members", email="grace@acme.example", role="viewer")
    page = console.get("/members")
    grace = page[page.index("grace@acme.example") :].split("/members/")[1].split("/")[0]
    console.press(f"/members/{grace}/remove")
    console.press(f"/runs/{made.runs[0]}/notes", notes="better")
    page = console.get("/audit")
    for told in (
        "made the key “cluster &lt;b&gt;",
        "for member@acme.example, which may: train",
        "made the project “ablations”",
        "added grace@acme.example as viewer",
        "removed grace@acme.example, who was viewer",
        "wrote notes about the run “gsm8k-grpo”",
    ):
        assert told in page, told
    assert "rival" not in page.lower()
