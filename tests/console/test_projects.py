"""A console that was opened with a key of one project shows that project only."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import Session

from store.people.keys import new_key
from store.tables import Run
from tests.console.conftest import Console

LISTS = ("/", "/runs", "/checkpoints", "/queues", "/keys")


@pytest.fixture
def runs(console: Console) -> dict[bool, list[str]]:
    """Signed in with a key of the project `evals`: ids of the runs in it, and of all others."""
    made = console.made

    def write(session: Session) -> str:
        new_key(session, made.org_id, user_id=made.users["owner"], name="laptop elsewhere")
        return new_key(session, made.org_id, user_id=made.users["owner"], project_id=made.projects["evals"])[1]

    made.keys["evals"] = console.database.write_now(write)
    assert console.sign_in("evals").status_code == 303
    inside = [run_id for number, run_id in enumerate(made.runs) if number % 3 == 1]
    return {True: inside, False: [run_id for run_id in made.runs if run_id not in inside]}


def test_lists(console: Console, runs: dict[bool, list[str]]) -> None:
    shown = {path: console.get(path) for path in LISTS}
    for path, page in shown.items():
        assert not [run_id for run_id in runs[False] if run_id in page], path
        assert "gsm8k-grpo" not in page  # the live run of post-training
        assert "laptop" not in page
        assert "post-training" not in page
    for path in ("/", "/runs", "/checkpoints"):
        assert any(run_id in shown[path] for run_id in runs[True]), path


def test_pages_of_runs(console: Console, runs: dict[bool, list[str]]) -> None:
    for within, status in ((True, 200), (False, 404)):
        for run_id in runs[within]:
            for path in (f"/runs/{run_id}", f"/runs/{run_id}/live", f"/usage?run={run_id}", f"/usage.csv?run={run_id}"):
                console.get(path, status=status)


def test_checkpoints_of_others(console: Console, runs: dict[bool, list[str]]) -> None:
    console.press("/checkpoints/delete", path=f"tinker://{runs[False][0]}/weights/step-200", status=404)
    console.press("/checkpoints/ttl", path=f"tinker://{runs[True][0]}/weights/step-200", days=3)


@pytest.mark.parametrize("path", ["/usage", "/members", "/budgets", "/billing", "/audit"])
def test_the_organisations_own(console: Console, runs: dict[bool, list[str]], path: str) -> None:
    console.get(path, status=403)


def test_a_queue_shows_live_runs_of_the_project(console: Console, runs: dict[bool, list[str]]) -> None:
    assert "sft-docs-v2" not in console.get("/queues")
    console.database.write_now(lambda session: setattr(session.get_one(Run, runs[True][0]), "state", "live"))
    assert "sft-docs-v2" in console.get("/queues")
