"""What a run was made with: its adapter's shape, its optimizer's settings, and its client's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.console.titles import NAME_FIELDS
from api.routes.stored.weights import CONTINUED_FROM
from store.tables import Operation, Run

#: How long a shown value may be, and how many entries of the metadata are shown.
LONGEST, MOST = 200, 100
_SETTINGS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_RATE = Operation.plan["settings", "learning_rate"].as_float()


def hyperparameters(session: Session, run: Run) -> dict[str, str]:
    """A run's hyperparameters by name, in the order in which people read them; entries of the run's metadata come
    last."""
    parts = {"attention": run.train_attn, "MLP": run.train_mlp, "unembedding": run.train_unembed}
    own = {
        "base model": run.base_model,
        "rank": str(run.rank),
        "trains": ", ".join(name for name, trained in parts.items() if trained) or "nothing",
        "seed": str(run.seed),
        "optimizer": run.optimizer,
        **dict(_settings(session, run)),
    }
    for name, value in _metadata(run.user_metadata):
        own[name if name not in own else f"{name} (metadata)"] = value
    return own


def _settings(session: Session, run: Run) -> Iterator[tuple[str, str]]:
    """Settings of the first and the last completed step: "0.0001", or "0.0001 → 1e-05"."""
    steps = select(Operation.plan).where(
        Operation.org_id == run.org_id, Operation.lane == run.id, Operation.kind == "optim_step"
    )
    steps = steps.where(Operation.state == "done")
    first = _of(session.scalar(steps.order_by(Operation.seq).limit(1)))
    last = _of(session.scalar(steps.order_by(Operation.seq.desc()).limit(1)))
    for name in (name for name in _SETTINGS if name in first or name in last):
        told = " → ".join(dict.fromkeys(f"{given[name]:g}" for given in (first, last) if name in given))
        if name == "learning_rate" and "→" in told:
            highest = session.scalar(steps.with_only_columns(func.max(_RATE)))
            if highest is not None and highest > max(first.get(name, 0.0), last.get(name, 0.0)):
                told += f", at most {highest:g}"
        yield name.replace("_", " "), told


def _of(plan: dict[str, Any] | None) -> dict[str, float]:
    return (plan or {}).get("settings") or {}


def _metadata(metadata: dict[str, Any]) -> Iterator[tuple[str, str]]:
    shown = [(name, value) for name, value in metadata.items() if name not in (*NAME_FIELDS, CONTINUED_FROM)]
    for name, value in shown[:MOST]:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield name, text if len(text) <= LONGEST else text[:LONGEST] + "…"
