"""Example data for the console, made by the service's own functions: people, runs, curves, usage, checkpoints."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from billing.metering import charges
from billing.metering.charges import Charge
from billing.money import ledger
from billing.money.accounts import Payer
from billing.money.budgets import set_budget
from billing.money.wallets import set_mode
from billing.prices import PriceList
from scheduler.order.plans import BODY_ONLY, Step
from store import tables
from store.curves import Point, log_points
from store.database.caller import Caller, acting_as, caller
from store.people import organisations
from store.people.keys import new_key
from store.people.organisations import organisation_named

MODEL = "weft/tiny-moe"
HOSTILE = "<img src=x onerror=alert(1)>\"'{{7*7}}"
DAY = timedelta(days=1)
#: The prepaid balance at the start.
TOPUP_NUSD = 250 * 10**9


@dataclass
class Seeded:
    """The ids of what was made, and the secrets of keys by role."""

    org_id: str = ""
    rival_id: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    projects: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)


def seed(
    session: Session, prices: PriceList, now: datetime | None = None, days: int = 30, tidy: bool = False
) -> Seeded:
    """An organisation with a month of work behind it and two runs under way, and a rival."""
    now, rng, made = now or datetime.now(UTC), random.Random(7), Seeded()
    made.org_id = organisation_named(session, "Acme Research").id
    made.rival_id = organisation_named(session, "Rival Labs").id
    _people(session, made)
    set_mode(session, made.org_id, "prepaid", 0)
    ledger.post(
        session,
        org_id=made.org_id,
        type="topup",
        amount_nusd=TOPUP_NUSD,
        ref_type="payment",
        ref_id="pi_1",
        memo="Card ending 4242",
        at=now - days * DAY,
    )
    names = [
        "gsm8k-grpo",
        "sft-docs-v2",
        "code-review-dpo",
        "tool-use-grpo",
        "style-transfer",
        "math-rl" if tidy else HOSTILE,
    ]
    for number, name in enumerate(names):
        owner = ["member", "owner", "member"][number % 3]
        project = [made.projects["post-training"], made.projects["evals"], None][number % 3]
        made.runs.append(_run(session, made, number, name, made.users[owner], project, now - rng.random() * 20 * DAY))
    _usage(session, made, prices, rng, now, days)
    _curves(session, made.org_id, made.runs[0], rng, now)
    _curves(session, made.org_id, made.runs[3], rng, now, steps=180, delay=0.22)
    _checkpoints(session, made, now)
    _operations(session, made, rng, now)
    if tidy:
        set_budget(session, made.org_id, "org", made.org_id, "month", 120 * 10**9, now=now)
        set_budget(session, made.org_id, "project", made.projects["evals"], "month", 60 * 10**9, hard=False, now=now)
    session.add(_session_row(made.rival_id, "rival-session", None, None, now))
    session.flush()
    session.add(_run_row(made.rival_id, "rival-session", "rival-session:train:0", now, {"name": "rival-secret-run"}))
    charge = Charge(Payer(made.rival_id), "rival-session", None, "rival-op", MODEL, now, {"train": 123_456_789}, None)
    charges.settle(session, [charge], prices, now)
    session.flush()
    return made


def _people(session: Session, made: Seeded) -> None:
    for role in ("owner", "admin", "billing-admin", "member", "viewer"):
        by = Caller(None, f"user:{made.users['owner']}", "203.0.113.7") if made.users else caller()
        with acting_as(by):
            made.users[role] = organisations.add_member(session, made.org_id, f"{role}@acme.example", role).id
    with acting_as(Caller(None, f"user:{made.users['admin']}", "203.0.113.8")):
        for name in ("post-training", "evals"):
            made.projects[name] = organisations.create_project(session, made.org_id, name).id
    for role, scopes in (("owner", ["admin"]), ("member", ["admin"]), ("viewer", ["admin"])):
        _, secret = new_key(session, made.org_id, name=f"{role}'s laptop", scopes=scopes, user_id=made.users[role])
        made.keys[role] = secret
    made.keys["rival"] = new_key(session, made.rival_id, name="rival")[1]


def _session_row(org_id: str, name: str, user_id: str | None, project: str | None, at: datetime) -> tables.Session:
    return tables.Session(
        id=name,
        org_id=org_id,
        state="active",
        sdk_version="0.1.0",
        display_name=None,
        project_id=project,
        user_id=user_id,
        tags=[],
        user_metadata={},
        created_at=at,
        last_seen_at=at,
    )


def _run_row(org_id: str, session_id: str, run_id: str, at: datetime, metadata: dict[str, Any]) -> tables.Run:
    return tables.Run(
        id=run_id,
        org_id=org_id,
        session_id=session_id,
        model_seq_id=0,
        base_model=MODEL,
        rank=32,
        alpha=32.0,
        seed=0,
        train_attn=True,
        train_mlp=True,
        train_unembed=False,
        state="live",
        user_metadata=metadata,
        created_at=at,
        last_request_at=at + timedelta(hours=3),
    )


def _run(session: Session, made: Seeded, number: int, name: str, user: str, project: str | None, at: datetime) -> str:
    session_id = f"5e55{number:04d}-acme"
    session.add(_session_row(made.org_id, session_id, user, project, at))
    session.flush()
    run_id = f"{session_id}:train:0"
    metadata = {"name": name, "batch_size": 64 if number % 2 else 128, "dataset": "gsm8k" if "grpo" in name else "own"}
    row = _run_row(made.org_id, session_id, run_id, at, metadata)
    row.notes = "Baseline: the reward rises late.\nNext: a larger batch." if number == 0 else None
    row.state = "live" if number in (0, 5) else "closed"
    session.add(row)
    session.flush()
    return run_id


def _usage(session: Session, made: Seeded, prices: PriceList, rng: random.Random, now: datetime, days: int) -> None:
    for back in range(days, -1, -1):
        weekend = (now - back * DAY).weekday() >= 5
        for part in range(3):
            at = now - back * DAY - timedelta(minutes=part)
            scale = int((0.25 if weekend else 1.0) * (0.5 + rng.random()) * (1 + (days - back) / days) * 1_000_000)
            number = rng.choice([0, 0, 1, 2, 3, 4, 5])
            quantities = {
                "train": int(1.6 * scale),
                "sample": int(0.9 * scale),
                "prefill": int(0.8 * scale),
                "cached_prefill": int(2.2 * scale),
            }
            payer = Payer(made.org_id, [made.projects["post-training"], made.projects["evals"], None][number % 3], 1)
            user = made.users["member" if number % 3 != 1 else "owner"]
            run_id = made.runs[number]
            op = f"op-{back}-{part}"
            charge = Charge(payer, run_id.split(":")[0], run_id, op, MODEL, at, quantities, None, user)
            charges.settle(session, [charge], prices, at)


def _curves(
    session: Session,
    org_id: str,
    run_id: str,
    rng: random.Random,
    now: datetime,
    steps: int = 240,
    delay: float = 0.0,
) -> None:
    """Log a run's curves; `delay` is how much later its reward rises, as a share of the run."""
    run = session.get_one(tables.Run, run_id)
    run.last_request_at = now
    for start in range(0, steps, 12):
        points = []
        for step in range(start, start + 12):
            done = step / steps
            points.append(
                Point("reward", step, 0.08 + 0.78 / (1 + math.exp(-7 * (done - 0.42 - delay))) + rng.gauss(0, 0.03))
            )
            points.append(Point("loss", step, 2.4 * math.exp(-3.2 * done) + 0.35 + rng.gauss(0, 0.04)))
            points.append(Point("kl", step, 0.002 + 0.03 * done**1.5 + abs(rng.gauss(0, 0.002))))
            points.append(Point("entropy", step, 1.9 * math.exp(-1.1 * done) + rng.gauss(0, 0.03)))
        log_points(session, org_id, run_id, points, run.created_at + (now - run.created_at) * (start + 12) / steps)


def _operations(session: Session, made: Seeded, rng: random.Random, now: datetime) -> None:
    """An hour of passes and samples, shared with the rival more or less."""
    for second in range(3500, 20, -20):
        at = now - timedelta(seconds=second)
        mine = 0.35 + 0.5 * math.sin(second / 700) ** 2
        total, length = 4096, int(12e6 + rng.random() * 6e6)
        for number, (org_id, lane, share) in enumerate(
            ((made.org_id, made.runs[0], mine), (made.rival_id, "rival-session:train:0", 1 - mine))
        ):
            for kind in ("forward_backward", "sample"):
                session.add(_operation(f"{kind}-{second}-{number}", org_id, lane, kind, at, length, share, total))
        step = _operation(f"optim_step-{second}-0", made.org_id, made.runs[0], "optim_step", at, length, 0.0, total)
        step.timings = None
        step.plan = msgspec.to_builtins(
            Step({"learning_rate": 4e-5, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01})
        )
        session.add(step)
    session.flush()


def _operation(
    name: str, org_id: str, lane: str, kind: str, at: datetime, length_us: int, share: float, total: int
) -> tables.Operation:
    place = ("forward_backward", "sample", "optim_step").index(kind)
    number = int(name.split("-")[1]) * 6 + place * 2 + int(name.split("-")[2])
    return tables.Operation(
        id=name,
        org_id=org_id,
        session_id=lane.split(":")[0],
        lane=lane,
        seq=number,
        kind=kind,
        base_model=MODEL,
        state="done",
        tokens=max(1, int(total * share)),
        body_ref="",
        body_sha256="",
        plan=msgspec.to_builtins(BODY_ONLY),
        accepted_at=at,
        finished_at=at + timedelta(microseconds=length_us),
        timings={"stretches": [[number, 200_000, length_us, 2, 2, total]], "computed": length_us, "settled": length_us},
    )


def _checkpoints(session: Session, made: Seeded, now: datetime) -> None:
    for number, run_id in enumerate(made.runs[:4]):
        for step in (100, 200):
            session.add(
                tables.Checkpoint(
                    id=f"checkpoint-{number}-{step}",
                    org_id=made.org_id,
                    run_id=run_id,
                    kind="weights" if step == 200 else "sampler_weights",
                    name=f"step-{step}",
                    ref=f"checkpoints/{number}-{step}",
                    size_bytes=(number + 1) * step * 431_234,
                    public=number == 2 and step == 200,
                    user_metadata={},
                    created_at=now - (number + 1) * DAY,
                    expires_at=now + number * 9 * DAY if number else None,
                )
            )
    session.flush()
