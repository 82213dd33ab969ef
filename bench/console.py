"""How long the console's pages take, at rest, of an organisation with 500 runs and 100,000 usage events.

    python bench/console.py [--json] [--quick]

A real weftd, started on a data folder that was filled before: the runs of an organisation, each with four curves, two
checkpoints and its optimizer steps; its usage over 90 days, settled as the service settles it; entries of the audit
log. Each page is asked for by one client that is signed in, one request at a time, and read to its end: the median and
the longest of `ROUNDS` times after one that warms up, and the mean of the processor time that the server took for one,
which a busy machine changes little. `drawn_ms` is the same page in Chromium, from the click to its last chart, where
Chromium is there. `taskset -c 0,1` leaves it two cores.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from playwright.sync_api import sync_playwright
from sqlalchemy import insert
from sqlalchemy.orm import Session

from api.console.sessions import new_link
from bench.parts.results import asked, at_most, machine, tell
from billing.metering.charges import Charge, settle
from billing.money import ledger
from billing.money.accounts import Payer
from billing.money.wallets import set_mode
from billing.prices import PriceList, load_prices
from migrations.upgrade import migrate
from scheduler.order.plans import Step
from store import tables
from store.database import audit
from store.database.db import Database
from store.people import organisations
from store.people.keys import new_key
from store.people.organisations import organisation_named
from tests.console.conftest import CHROMIUM, UNDRAWN
from tests.e2e.conftest import Weftd

MODEL = "weft/tiny-moe"
GOAL_MS = 300
RUNS, EVENTS, DAYS = 500, 100_000, 90
POINTS, STEPS, AUDITED, USERS = 400, 50, 2_000, 20
ROUNDS = 11
#: Kinds of usage of an operation; each one is an event.
QUANTITIES = {"train": 3000, "sample": 900, "prefill": 1200, "cached_prefill": 4000}
NAMES = ("grpo", "sft", "dpo", "distil", "sweep")


def fill(session: Session, prices: PriceList, runs: int, events: int) -> tuple[str, str]:
    """Fill a database with the organisation and a person who owns it."""
    rng, now = random.Random(0), datetime.now(UTC)
    org_id = organisation_named(session, "bench").id
    owner = organisations.add_member(session, org_id, "owner@bench.example", "owner")
    users = [
        owner.id,
        *(organisations.add_member(session, org_id, f"m{n}@bench.example", "member").id for n in range(USERS)),
    ]
    projects = [organisations.create_project(session, org_id, f"project {n}").id for n in range(8)]
    keys = [new_key(session, org_id, name=f"laptop of {n}", user_id=user)[0].id for n, user in enumerate(users)]
    set_mode(session, org_id, "prepaid", 0)
    for back in range(DAYS, 0, -7):
        ledger.post(
            session,
            org_id=org_id,
            type="topup",
            amount_nusd=10**12,
            ref_type="bench",
            ref_id=str(back),
            at=now - timedelta(days=back),
        )
    ids = [f"{number:08x}-bench:train:0" for number in range(runs)]
    begun = [now - timedelta(days=DAYS * (1 - number / runs)) for number in range(runs)]
    insert_rows(session, org_id, ids, begun, users, projects, rng)
    charges = []
    for number in range(events // len(QUANTITIES)):
        place = rng.randrange(runs)
        at = begun[place] + timedelta(seconds=rng.random() * min(3 * 86_400, (now - begun[place]).total_seconds()))
        user = place % len(users)
        payer = Payer(org_id, projects[place % len(projects)], keys[user])
        quantities = {kind: int(mean * (0.5 + rng.random())) for kind, mean in QUANTITIES.items()}
        charge = Charge(
            payer, ids[place].split(":")[0], ids[place], f"op{number}", MODEL, at, quantities, None, users[user]
        )
        charges.append((at, charge))
    for at, charge in sorted(charges, key=lambda each: each[0]):
        settle(session, [charge], prices, at)
    for number in range(AUDITED):
        audit.record(
            session,
            org_id=org_id,
            key_id=rng.choice(keys),
            event="checkpoint_ttl_set",
            target=f"tinker://{rng.choice(ids)}/weights/step-200",
            detail={"ttl_seconds": 86_400},
            at=now - timedelta(hours=AUDITED - number),
        )
    return org_id, owner.id


def insert_rows(
    session: Session,
    org_id: str,
    ids: list[str],
    begun: list[datetime],
    users: list[str],
    projects: list[str],
    rng: random.Random,
) -> None:
    """Insert sessions, runs, curves, checkpoints and steps."""
    rows: dict[type[tables.Base], list[dict[str, Any]]] = {
        table: []
        for table in (
            tables.Session,
            tables.Run,
            tables.RunCurve,
            tables.RunMetric,
            tables.Checkpoint,
            tables.Operation,
        )
    }
    for number, (run_id, at) in enumerate(zip(ids, begun, strict=True)):
        own = {"org_id": org_id, "session_id": run_id.split(":")[0]}
        last = at + timedelta(hours=40)
        rows[tables.Session].append(
            {
                **{"id": own["session_id"], "org_id": org_id, "state": "finished", "sdk_version": "0.38.0", "tags": []},
                **{"display_name": None, "project_id": projects[number % len(projects)], "user_metadata": {}},
                **{"user_id": users[number % len(users)], "created_at": at, "last_seen_at": last},
            }
        )
        metadata = {
            "name": f"{NAMES[number % len(NAMES)]}-{number}",
            "batch_size": rng.choice([64, 128]),
            "seed": number,
        }
        rows[tables.Run].append(
            {
                **{"id": run_id, **own, "model_seq_id": 0, "base_model": MODEL, "rank": 32, "alpha": 32.0, "seed": 0},
                **{"train_attn": True, "train_mlp": True, "train_unembed": False, "user_metadata": metadata},
                **{"state": "live" if number > len(ids) - 8 else "closed", "created_at": at, "last_request_at": last},
            }
        )
        for name in ("reward", "loss", "kl", "entropy"):
            values = [rng.random() for _ in range(POINTS)]
            named = {"run_id": run_id, "name": name, "org_id": org_id}
            at_last = {"last_step": POINTS - 1, "last_value": values[-1], "last_at": last}
            rows[tables.RunCurve].append({**named, "points": POINTS, **at_last})
            rows[tables.RunMetric] += [
                {**named, "step": step, "value": value, "at": at + (last - at) * step / POINTS}
                for step, value in enumerate(values)
            ]
        for step in (100, 200):
            rows[tables.Checkpoint].append(
                {
                    **{"id": f"c{number}-{step}", "org_id": org_id, "run_id": run_id, "kind": "weights"},
                    **{"name": f"step-{step}", "ref": f"c{number}", "size_bytes": 10**7, "public": False},
                    **{"user_metadata": {}, "created_at": last, "expires_at": None},
                }
            )
        plan = msgspec.to_builtins(Step({"learning_rate": 1e-4 / (1 + number % 3), "beta1": 0.9}))
        rows[tables.Operation] += [
            {
                **{"id": f"s{number}-{seq}", **own, "lane": run_id, "seq": seq, "kind": "optim_step", "tokens": 0},
                **{"base_model": MODEL, "state": "done", "body_ref": "", "body_sha256": "", "plan": plan},
                **{"accepted_at": done, "finished_at": done + timedelta(seconds=9), "error": None},
                "timings": {"stretches": [[seq, 200_000, 8_000_000, 2, 2, 4096]], "computed": 8_000_000},
            }
            for seq in range(1, STEPS + 1)
            for done in [at + (last - at) * seq / STEPS]
        ]
    for table, made in rows.items():
        for start in range(0, len(made), 20_000):
            session.execute(insert(table), made[start : start + 20_000])


@contextmanager
def filled(runs: int, events: int) -> Iterator[tuple[Weftd, str, list[str]]]:
    """A server with all these rows, a sign-in link, and the ids of some runs, the latest first."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        server = Weftd(Path(folder))
        server.data_dir.mkdir(parents=True, exist_ok=True)
        database = Database(f"sqlite:///{server.data_dir}/weft.db")
        migrate(database)
        org_id, user = database.write_now(lambda session: fill(session, load_prices(), runs, events))
        link = database.write_now(lambda session: new_link(session, org_id, user, operator=True))
        database.close()
        server.start()
        yield server, link, [f"{number:08x}-bench:train:0" for number in range(runs - 1, runs - 6, -1)]
        server.stop()


def pages(runs: list[str]) -> dict[str, str]:
    """The paths to ask for, by name."""
    run, several = runs[-1], "&".join(f"run={run}" for run in runs)
    return {
        "overview": "/",
        "usage by model": "/usage",
        "usage by run": "/usage?by=run",
        "usage as CSV by run": "/usage.csv?by=run",
        "runs": "/runs",
        "runs, searched": "/runs?search=grpo",
        "a run": f"/runs/{run}",
        "a run's curves": f"/runs/{run}/live",
        "compare five": f"/compare?{several}",
        "compare five, curves": f"/compare/curves?{several}",
        "checkpoints": "/checkpoints?search=sweep",
        "queues": "/queues",
        "playground": "/playground",
        "keys": "/keys",
        "members": "/members",
        "limits": "/budgets",
        "billing": "/billing",
        "audit log": "/audit",
        "cost of ownership": "/ownership",
        "cost of ownership, 90 days": "/ownership?days=90",
        "search": "/search?q=grpo",
    }


def ask(server: Weftd, link: str, paths: dict[str, str], rounds: int) -> tuple[dict[str, dict[str, float]], str]:
    """Milliseconds of each page, and the cookie."""
    found, process = {}, psutil.Process(server.process.pid)
    with httpx.Client(base_url=f"{server.url}/console", timeout=60, headers={"accept": "text/html"}) as http:
        http.post(f"/login/{link}", headers={"sec-fetch-site": "same-origin"})
        for name, path in paths.items():
            http.get(path)
            times, used = [], process.cpu_times()
            for _ in range(rounds):
                start = time.perf_counter()
                reply = http.get(path)
                times.append((time.perf_counter() - start) * 1000)
                assert reply.status_code == 200, (path, reply.status_code, reply.text[:300])
            now = process.cpu_times()
            found[name] = {
                "median_ms": statistics.median(times),
                "longest_ms": max(times),
                "cpu_ms": (now.user + now.system - used.user - used.system) * 1000 / rounds,
                "bytes": len(reply.content),
            }
        return found, http.cookies["weft_console"]


def draw(server: Weftd, cookie: str, paths: dict[str, str], rounds: int) -> dict[str, float]:
    """Median milliseconds until Chromium has drawn each whole page."""
    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1280, "height": 860}, reduced_motion="reduce")
        context.add_cookies([{"name": "weft_console", "value": cookie, "url": server.url}])
        page = context.new_page()
        for name, path in paths.items():
            if re.search(r"\.csv|/live|/curves|/search", path):
                continue
            times = []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                page.goto(f"{server.url}/console{path}", wait_until="load")
                page.locator(UNDRAWN).first.wait_for(state="detached")
                times.append((time.perf_counter() - start) * 1000)
            found[name] = statistics.median(times[1:])
        browser.close()
    return found


def main() -> None:
    options = asked(__doc__, quick="a tenth of it, for a look").parse_args()
    runs, events, rounds = (RUNS // 10, EVENTS // 10, 3) if options.quick else (RUNS, EVENTS, ROUNDS)
    with filled(runs, events) as (server, link, newest):
        paths = pages(newest)
        found, cookie = ask(server, link, paths, rounds)
        drawn = draw(server, cookie, paths, rounds) if Path(CHROMIUM).exists() else {}
    for name, milliseconds in drawn.items():
        found[name]["drawn_ms"] = milliseconds
    slowest = max(each["median_ms"] for each in found.values())
    claims = [at_most("the slowest page, ms", slowest, GOAL_MS)]
    if drawn:
        slowest = max(drawn.values())
        claims.append(at_most("the slowest page drawn, ms", slowest, GOAL_MS))
    result = {"machine": machine(), "runs": runs, "events": events, "pages": found, "claims": claims}
    tell(result, options)


if __name__ == "__main__":
    main()
