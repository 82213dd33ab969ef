"""`weftd adapter`: adapters that other tools have trained."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from sqlalchemy.orm import Session

from api.commands.changes import organisation
from api.commands.places import Place, blobs_to_change, database_of, refuse, settings_of, where
from billing.metering import storage
from store import tables
from store.database import audit
from store.database.caller import OPERATOR, acting_as
from store.database.sure import write_surely

if TYPE_CHECKING:
    from workers.model.adapters.imported import Imported


@click.group()
def adapter() -> None:
    """Import adapters trained by other tools."""


@adapter.command("import")
@where
@click.option("--org", required=True, help="Name of the organisation that is to own the checkpoint.")
@click.option("--model", help="Name of its base model, as clients see it (default: the built-in one).")
@click.option("--name", default="imported", show_default=True, help="Name of the checkpoint.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def import_(place: Place, org: str, model: str | None, name: str, folder: Path) -> None:
    """Store the PEFT adapter in FOLDER as a checkpoint, and print its tinker:// path.

    Clients train on from it with create_training_client_from_state. An adapter that has a pair of factors for each
    expert keeps them."""
    from api.errors import ApiError
    from api.paths import check_name
    from api.server.serve import CannotServe, read_cards
    from workers.model.adapters.imported import CannotImport, read_adapter

    settings = settings_of(place)
    try:
        cards = read_cards(settings.models)
        card = cards[model or next(iter(cards))]
        check_name(name, "--name")
        found = read_adapter(folder, card.config)
    except KeyError:
        refuse(f"no model {model!r} in the settings; they have {', '.join(sorted(cards))}")
    except (CannotServe, CannotImport) as error:
        refuse(error)
    except ApiError as error:
        refuse(error.detail)
    ref = f"weights/{uuid.uuid4().hex}"
    with database_of(place) as database, acting_as(OPERATOR):
        with database.read() as session:
            org_id = organisation(session, org).id
        blobs = blobs_to_change(settings, database)
        with blobs.new_folder(ref) as target:
            found.write(target, card.name)
        size = blobs.size_bytes(ref)
        made = partial(_record, org_id=org_id, base_model=card.name, name=name, found=found, ref=ref, size_bytes=size)
        click.echo(write_surely(database, made))


def _record(
    session: Session, org_id: str, base_model: str, name: str, found: Imported, ref: str, size_bytes: int
) -> str:
    """Make a closed run that has only this checkpoint, so that the checkpoint is listed, loaded, billed and deleted
    like any other."""
    now, shape = datetime.now(UTC), found.shape
    owner = tables.Session(
        id=uuid.uuid4().hex,
        org_id=org_id,
        state="finished",
        sdk_version="weftd",
        tags=[],
        user_metadata={"imported": "true"},
        finish_reason="imported",
        created_at=now,
        last_seen_at=now,
        ended_at=now,
    )
    run = tables.Run(
        id=f"{owner.id}:train:0",
        org_id=org_id,
        session_id=owner.id,
        model_seq_id=0,
        base_model=base_model,
        rank=shape.rank,
        alpha=found.alpha,
        seed=0,
        train_attn=shape.train_attn,
        train_mlp=shape.train_mlp,
        train_unembed=shape.train_unembed,
        state="closed",
        user_metadata={},
        created_at=now,
        last_request_at=now,
    )
    checkpoint = tables.Checkpoint(
        id=uuid.uuid4().hex,
        org_id=org_id,
        run_id=run.id,
        kind="weights",
        name=name,
        ref=ref,
        size_bytes=size_bytes,
        public=False,
        user_metadata={},
        created_at=now,
    )
    path = f"tinker://{run.id}/weights/{name}"
    for row in (owner, run, checkpoint):
        session.add(row)
        session.flush()
    storage.begin(session, checkpoint, now)
    detail = {"model_id": run.id, "base_model": base_model, "session_id": owner.id, "size_bytes": size_bytes}
    audit.record(session, org_id=org_id, key_id=None, event="checkpoint_created", target=path, detail=detail, at=now)
    return path
