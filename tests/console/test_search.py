"""What Ctrl-K finds, and for whom."""

from __future__ import annotations

import re

import pytest
from sqlalchemy.orm import Session

from api.console.pages.search import MOST
from api.state import rates
from store.people.keys import new_key
from tests.console.conftest import Console
from tests.console.seed import HOSTILE


def hits(console: Console, text: str) -> list[tuple[str, str, str]]:
    """Kind, title and address of each hit."""
    reply = console.http.get("/console/search", params={"q": text})
    assert reply.status_code == 200, reply.text
    found = re.findall(r'href="/console([^"]*)"><span class="tag">(\w+)</span><span class="what">([^<]*)', reply.text)
    return [(kind, title, path) for path, kind, title in found]


def test_each_kind_by_its_name(console: Console) -> None:
    console.sign_in()
    run = console.made.runs[0].replace(":", "%3A")
    assert hits(console, "GSM8K") == [
        ("Run", "gsm8k-grpo", f"/runs/{run}"),
        ("Checkpoint", "step-100 of gsm8k-grpo", f"/runs/{run}#checkpoints"),
        ("Checkpoint", "step-200 of gsm8k-grpo", f"/runs/{run}#checkpoints"),
    ]
    assert hits(console, console.made.runs[0])[0] == ("Run", "gsm8k-grpo", f"/runs/{run}")
    assert ("Member", "viewer@acme.example", "/members") in hits(console, "VIEWER@")
    assert ("Page", "Audit log", "/audit") in hits(console, "audit")
    assert len([hit for hit in hits(console, "step-") if hit[0] == "Checkpoint"]) == MOST
    assert hits(console, "100%") == hits(console, "_x_") == []  # neither is a pattern


def test_nothing_typed_shows_pages(console: Console) -> None:
    console.sign_in()
    assert {kind for kind, _, _ in hits(console, " ")} == {"Page"}


def test_each_sees_their_own(console: Console) -> None:
    for role, members in (("owner", True), ("member", False), ("viewer", False)):
        console.sign_in(role)
        assert hits(console, "rival") == []
        assert ("Member" in {kind for kind, _, _ in hits(console, "acme")}) == members
        assert bool(hits(console, "audit")) == members
    console.sign_in("rival")
    assert [title for _, title, _ in hits(console, "rival")] == ["rival-secret-run"]
    assert hits(console, "gsm8k") == []
    console.http.cookies.clear()
    assert console.http.get("/console/search?q=a").status_code == 401


def test_a_key_of_a_project_finds_its_runs(console: Console) -> None:
    made = console.made

    def write(session: Session) -> str:
        return new_key(session, made.org_id, user_id=made.users["owner"], project_id=made.projects["evals"])[1]

    made.keys["evals"] = console.database.write_now(write)
    console.sign_in("evals")
    assert hits(console, "gsm8k") == []
    assert {title for _, title, _ in hits(console, "sft")} == {
        "sft-docs-v2",
        "step-100 of sft-docs-v2",
        "step-200 of sft-docs-v2",
    }


@pytest.mark.parametrize("text", ["x" * 129, "a\0"])
def test_limits_on_the_text(console: Console, text: str) -> None:
    console.sign_in()
    assert console.http.get("/console/search", params={"q": text}).status_code == 422


def test_hostile_names_are_text(console: Console) -> None:
    console.sign_in()
    page = console.http.get("/console/search", params={"q": "<img"}).text
    assert HOSTILE not in page
    assert "&lt;img src=x" in page
    assert "<script" not in console.http.get("/console/search", params={"q": "<script>"}).text


def test_not_too_often(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SEARCHES_PER_MINUTE", 2)
    console.sign_in()
    assert [console.http.get("/console/search?q=a").status_code for _ in range(3)] == [200, 200, 429]
    console.sign_in("rival")
    assert hits(console, "rival")
