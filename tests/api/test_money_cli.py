"""`weftd credit`, `budget`, `billing` and `alert` on a data folder, as an operator types them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from click.testing import CliRunner, Result
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.cli import weftd
from billing.money.alerts import raise_alert
from store.people.organisations import add_member, organisation_named
from store.tables import AuditEntry
from tests.keys import create_key
from tests.migrated import database_in


def run(folder: Path, *command: str) -> Result:
    return CliRunner().invoke(weftd, [*command, "--data-dir", str(folder)])


def test_the_operator_s_part(tmp_path: Path) -> None:
    database = database_in(tmp_path)
    database.write_now(lambda session: create_key(session, "acme"))
    database.close()
    acme = ("--org", "acme")
    assert run(tmp_path, "credit", "grant", *acme, "--usd", "10.000000001").output == "acme\tbalance 10.000000001\n"
    assert "available 12.500000001" in run(tmp_path, "billing", "mode", *acme, "--overdraft", "2.5", "prepaid").output
    made = run(tmp_path, "budget", "set", *acme, "--usd", "100", "--key", "1")
    assert made.exit_code == 0
    listed = run(tmp_path, "budget", "list", *acme).output
    assert listed.startswith(f"{made.output.strip()}\tkey 1\tmonth\thard\tlimit 100.000000000\tspent 0.000000000")
    assert run(tmp_path, "budget", "set", *acme, "--usd", "1", "--key", "2").exit_code == 2
    assert run(tmp_path, "budget", "remove", *acme, made.output.strip()).exit_code == 0
    assert run(tmp_path, "billing", "reconcile").output == "the books agree\n"
    assert run(tmp_path, "credit", "refund", *acme, "--operation", "none").exit_code == 2
    taken = run(tmp_path, "credit", "take", *acme, "--usd", "12", "--memo", "refund of invoice 7")
    assert taken.output == "acme\tbalance -1.999999999\n"
    assert run(tmp_path, "billing", "reconcile").output == "the books agree\n"
    assert run(tmp_path, "credit", "take", *acme, "--usd", "0", "--memo", "x").exit_code == 2
    for amount in ("ten", "-1", "0.0000000001", "nan", "1e30", "5_0", "\u096b"):
        assert run(tmp_path, "credit", "grant", *acme, "--usd", amount).exit_code == 2
    assert "0 to 4,000,000,000 dollars" in run(tmp_path, "credit", "grant", *acme, "--usd", "4000000000.1").output
    assert run(tmp_path, "credit", "grant", "--org", "nobody", "--usd", "1").exit_code == 2


def test_alerts_are_listed_until_a_person_has_seen_to_them(tmp_path: Path) -> None:
    database, now = database_in(tmp_path), datetime(2026, 11, 29, 12, tzinfo=UTC)
    for ref in ("re_1", "re_2"):
        told = {"kind": "refund_by_hand", "ref": ref, "message": f"refund {ref}: book it by hand"}
        database.write_now(lambda session, told=told: raise_alert(session, **told, now=now))  # type: ignore[misc]
    database.close()
    second = "2\t2026-11-29 12:00\trefund_by_hand\tthe operator\trefund re_2: book it by hand\n"
    assert second in run(tmp_path, "alert", "list").output
    assert run(tmp_path, "alert", "resolve", "1").exit_code == 0
    assert run(tmp_path, "alert", "list").output == second
    for number in ("1", "3"):
        assert run(tmp_path, "alert", "resolve", number).exit_code == 2


def test_a_balance_that_could_not_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    database = database_in(tmp_path)
    database.write_now(lambda session: create_key(session, "acme"))
    database.close()
    most = ("--org", "acme", "--usd", "4000000000")
    assert run(tmp_path, "credit", "grant", *most).exit_code == 0
    beyond = run(tmp_path, "credit", "grant", *most)
    assert (beyond.exit_code, "it may be -4,000,000,000 to 4,000,000,000 dollars" in beyond.stderr) == (2, True)
    for code in (0, 0, 2):
        assert run(tmp_path, "credit", "take", *most, "--memo", "x").exit_code == code
    assert run(tmp_path, "billing", "reconcile").output == "the books agree\n"


def test_who_may_spend_nothing_in_a_mode_is_named_when_it_is_set(tmp_path: Path) -> None:
    database = database_in(tmp_path)
    database.write_now(lambda session: create_key(session, "acme"))
    database.close()
    for options, warned in (([], True), (["--overdraft", "5"], False)):
        done = run(tmp_path, "billing", "mode", "--org", "acme", "postpaid", *options)
        assert (done.exit_code, "refused until it may spend" in done.stderr) == (0, warned)
        assert done.stdout.startswith("acme\tpostpaid\t")


def test_what_an_operator_does_with_money_and_access_is_the_operator_s_in_the_audit_log(tmp_path: Path) -> None:
    database = database_in(tmp_path)
    database.write_now(lambda session: create_key(session, "acme"))
    now = datetime.now(UTC)

    def prepare(session: Session) -> None:
        org_id = organisation_named(session, "acme").id
        add_member(session, org_id, "ada@acme.example", "owner")
        raise_alert(session, kind="dispute", ref="dp_1", message="disputed", now=now, org_id=org_id)

    database.write_now(prepare)
    assert run(tmp_path, "alert", "resolve", "1").exit_code == 0
    for command in (
        ("user", "login-link", "--email", "ada@acme.example", "--operator"),
        ("credit", "grant", "--usd", "10"),
        ("credit", "take", "--usd", "1", "--memo", "by mistake"),
        ("budget", "set", "--usd", "100"),
        ("billing", "mode", "prepaid"),
    ):
        assert run(tmp_path, *command, "--org", "acme").exit_code == 0
    with database.read() as session:
        noted = session.execute(select(AuditEntry.event, AuditEntry.actor).order_by(AuditEntry.id)).all()
    database.close()
    told = ("alert_resolved", "member_link_made", "credit_granted", "credit_taken", "budget_set", "wallet_mode_set")
    assert noted[2:] == [(event, "operator") for event in told]
