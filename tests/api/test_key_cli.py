"""`weftd key` and `weftd org` print what they make, on whatever folder."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.cli import weftd as command
from store.database.db import Database
from store.people import keys
from tests.api.stand_in import operators_weftd, refused, serving, weftd


def test_key_create_prints_a_key_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path):  # keys are made beside a running server
        done = operators_weftd("key", "create", "--data-dir", str(tmp_path), "--org", "acme")
        out, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (0, "")
    assert re.fullmatch(r"tml-[A-Za-z0-9]{8}_[A-Za-z0-9]{43}\n", out)
    database = Database(f"sqlite:///{tmp_path}/weft.db")
    with database.read() as session:
        assert keys.find(session, out.strip()) is not None
    database.close()


def test_a_key_for_a_folder_that_no_server_has_used_is_made_with_a_warning(tmp_path: Path) -> None:
    """The folder's name may be mistyped."""
    out, err = weftd("key", "create", "--data-dir", str(tmp_path / "slip"), "--org", "acme").communicate(timeout=60)
    assert re.fullmatch(r"tml-\w{8}_.{43}\n", out)
    assert err == f"weftd: {tmp_path / 'slip'} is new: the key is good for a server that is started on it\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["key", "list"],
        ["org", "list"],
        ["org", "export", "acme", "{out}"],
        ["org", "status", "acme", "closed"],
        ["user", "list", "--org", "acme"],
        ["jobs", "list"],
        ["audit", "verify"],
        ["billing", "reconcile"],
        ["credit", "grant", "--org", "acme", "--usd", "5"],
        ["backup", "{out}"],
    ],
    ids=" ".join,
)
def test_who_looks_into_a_folder_that_is_not_there_makes_none(tmp_path: Path, arguments: list[str]) -> None:
    """The folder's name is mistyped: an empty list, or a backup of nothing, would look like an answer."""
    slip = tmp_path / "slip"
    given = [argument.format(out=tmp_path / "out") for argument in arguments]
    found = CliRunner().invoke(command, [*given, "--data-dir", str(slip)])
    assert (found.exit_code, str(slip) in found.output, len(found.output.splitlines())) == (2, True, 1)
    assert list(tmp_path.iterdir()) == []


def test_key_list_and_revoke(tmp_path: Path) -> None:
    def key(*arguments: str) -> str:
        out, err = weftd("key", *arguments, "--data-dir", str(tmp_path)).communicate(timeout=60)
        assert err == "" or "is new" in err
        return out

    secret = key("create", "--org", "acme").strip()
    assert re.fullmatch(rf"{secret[:12]}\tacme\t\d{{4}}-\d\d-\d\d\tactive\t1\n", key("list"))
    assert key("revoke", secret[:12]) == ""
    assert "revoked" in key("list")
    assert "no key in use" in refused("key", "revoke", secret[:12], "--data-dir", str(tmp_path))


@pytest.mark.parametrize("org", ["", " a", "a\n", "x" * 129])
def test_org_names(tmp_path: Path, org: str) -> None:
    assert "--org must be" in refused("key", "create", "--data-dir", str(tmp_path), "--org", org)


@pytest.mark.parametrize("name", ["x" * 129, "two\nlines"])
def test_what_a_key_is_called_fits_a_line_and_every_database(tmp_path: Path, name: str) -> None:
    message = refused("key", "create", "--data-dir", str(tmp_path), "--org", "acme", "--name", name)
    assert message == "weftd: --name must be at most 128 printable characters\n"


def test_a_database_that_cannot_be_opened_or_asked_is_one_line(tmp_path: Path) -> None:
    """Such as on a read-only disk, or in another user's folder."""
    (tmp_path / "weft.db").mkdir()
    found = CliRunner().invoke(command, ["key", "list", "--data-dir", str(tmp_path)])
    assert found.exit_code == 2
    assert found.output == f"weftd: cannot use the database of {tmp_path}: unable to open database file\n"
    (tmp_path / "weft.db").rmdir()
    assert CliRunner().invoke(command, ["migrate", "--data-dir", str(tmp_path)]).exit_code == 0
    with sqlite3.connect(tmp_path / "weft.db") as database:
        database.execute("ALTER TABLE api_keys RENAME TO elsewhere")
    found = CliRunner().invoke(command, ["key", "list", "--data-dir", str(tmp_path)])
    assert found.exit_code == 2
    assert found.output == f"weftd: the database of {tmp_path} does not do it: no such table: api_keys\n"
