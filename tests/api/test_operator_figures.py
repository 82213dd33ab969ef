"""`weftd simulate` and `weftd tco`: what an operator sees, and what a script reads."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy.orm import Session

from api.cli import weftd
from store.database.db import Database
from store.tables import Organisation, UsageHour


def run(*arguments: str) -> Result:
    return CliRunner().invoke(weftd, list(arguments))


SMALL = ("simulate", "--tenants", "3", "--gpus", "16", "--hours", "0.5")


def test_a_simulation_as_data_and_as_a_table() -> None:
    rows = json.loads(run(*SMALL, "--json").stdout)
    assert [(row["tenants"], row["order"]) for row in rows] == [
        ("1 reasoning", "alone"),
        ("1 tools", "alone"),
        ("3", "fair"),
        ("3", "by arrival"),
    ]
    assert all(0 < row["utilisation"] <= 1 for row in rows)
    table = run(*SMALL).stdout.splitlines()
    assert len(table) == 1 + len(rows)
    assert table[0].split()[:2] == ["tenants", "order"]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.svg"
    assert run(*SMALL, "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"<?xml")


def test_a_plot_of_another_kind_is_refused(tmp_path: Path) -> None:
    refused = run(*SMALL, "--plot", str(tmp_path / "plot.txt"))
    assert refused.exit_code == 2
    assert refused.stderr == "weftd: --plot: name a file that ends in .png or .svg\n"


def test_the_cost_of_a_service_that_has_done_nothing(tmp_path: Path) -> None:
    run("migrate", "--data-dir", str(tmp_path))
    facts = json.loads(run("tco", "--data-dir", str(tmp_path), "--days", "1", "--gpu-hour", "2", "--json").stdout)
    assert (facts["gpu_hour_usd"], facts["paid_usd"], facts["margins"]) == (2.0, 0, [])
    assert 48 <= facts["cost_usd"] < 50
    lines = run("tco", "--data-dir", str(tmp_path), "--gpus", "3").stdout.splitlines()
    assert lines[0].startswith("GPU-hour $1.5919 (capital 1.1538, running 0.4381), 3 GPUs, ")


def test_it_looks_back_no_further_than_samples_are_kept(tmp_path: Path) -> None:
    run("migrate", "--data-dir", str(tmp_path))
    refused = run("tco", "--data-dir", str(tmp_path), "--days", "91")
    assert refused.exit_code == 2
    assert "--days: samples are known for 90 days (limits.sample_days), got 91" in refused.stderr


def test_organisations_are_called_by_name_and_models_of_long_names_are_told_apart(tmp_path: Path) -> None:
    run("migrate", "--data-dir", str(tmp_path))
    models = [f"Qwen/Qwen3-30B-A3B-{kind}-2507" for kind in ("Instruct", "Thinking")]
    database = Database(f"sqlite:///{tmp_path}/weft.db")
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    names: dict[str, Any] = dict.fromkeys(("project_id", "user_id", "session_id", "run_id", "price_version"), "")
    facts: dict[str, Any] = {"hour": now, "kind": "train", "key_id": 0, "rate_uusd": 1, "per_units": 10**6}
    facts |= {"quantity": 9, "amount_nusd": 9, "events": 1}

    def write(session: Session) -> None:
        session.add(Organisation(id="1" * 32, name="acme", created_at=now))
        session.flush()
        session.add_all(UsageHour(org_id="1" * 32, base_model=model, **facts, **names) for model in models)

    database.write_now(write)
    database.close()
    lines = run("tco", "--data-dir", str(tmp_path)).stdout.splitlines()[4:]
    assert [line.split()[:2] for line in lines] == [["acme", model] for model in models]


def test_ownership_is_set_in_the_settings(tmp_path: Path) -> None:
    config = tmp_path / "weft.toml"
    config.write_text('data_dir = "data"\n[ownership]\ninterest_per_year = 0\nserver_usd = 5256000\nmonths = 100\n')
    run("migrate", "--config", str(config))
    facts = json.loads(run("tco", "--config", str(config), "--json").stdout)
    assert facts["gpu_hour_usd"] == pytest.approx(5_256_000 / 100 / 8 / 730 + 0.4381, abs=1e-4)
