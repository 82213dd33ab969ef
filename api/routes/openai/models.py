"""What `model` names: a base model, saved weights (`tinker://...`), or a run (`run:<id>`: its newest sampler weights).

Each request uses a sampler. If a client has made one of a run's newest weights (a snapshot or one that follows the
run), that is used; otherwise each caller has a session of its own here, with a sampler for each model.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import CreateSamplingSessionRequest

from api.errors import Invalid, NotFound, quote
from api.operations.submit import Submitter
from api.paths import parse_path
from api.routes.computing.sampling import new_sampler
from api.routes.openai.errors import NoModel
from api.routes.openai.text import ModelText, text_of
from api.state.service import Service
from api.who.lookup import checkpoint_at, readable_checkpoint, run_by_id
from api.who.principal import Principal
from api.who.projects import project_for
from scheduler.journal.rows import plan_of
from scheduler.links.messages import OpKind
from scheduler.order.plans import NewSampler, Save
from store import tables
from workers.model.card import ModelCard

RUN = "run:"
#: How many saves of a run are searched for its newest weights; earlier ones may have been deleted.
LOOK_BACK = 50


@dataclass(frozen=True)
class Target:
    """What a request samples from, and on whose behalf. `lanes`: samplers that an earlier try of the same request may
    have used."""

    name: str
    card: ModelCard
    sampler: tables.Sampler
    submitter: Submitter
    lanes: tuple[str, ...]

    @property
    def text(self) -> ModelText:
        return text_of(self.card.path, self.card.context_length)


async def target_of(service: Service, who: Principal, name: str) -> Target:
    """The target of a request. Raises NoModel if there is none."""

    def read(session: Session) -> Target | None:
        sampler = _existing(service, session, who, name)
        return _target(service, session, who, name, sampler) if sampler is not None else None

    def write(session: Session) -> Target:
        sampler = _existing(service, session, who, name)
        if sampler is None:
            sampler = _made(service, session, who, name)
            session.flush()
        return _target(service, session, who, name, sampler)

    try:
        found: Target | None = await service.read(read)
        return found if found is not None else await service.database.write(write)
    except (NotFound, Invalid) as error:
        raise NoModel(f"the model {quote(name)} is not there: {error.detail}") from None


def _target(service: Service, session: Session, who: Principal, name: str, sampler: tables.Sampler) -> Target:
    card = service.cards.get(sampler.base_model)
    if card is None:
        raise NotFound(f"its base model {sampler.base_model} is not served here")
    lanes: tuple[str, ...] = (sampler.id,)
    if name.startswith(RUN):
        lanes = tuple(session.scalars(select(tables.Sampler.id).filter_by(run_id=sampler.run_id)))
    return Target(name, card, sampler, Submitter.of(session, who, sampler.session_id), lanes)


def _existing(service: Service, session: Session, who: Principal, name: str) -> tables.Sampler | None:
    """The sampler of `name`, if it exists."""
    if name.startswith(RUN):
        newest = _newest(session, who, name.removeprefix(RUN))
        if isinstance(newest, tables.Sampler):
            return newest
        name = newest
    return session.get(tables.Sampler, _sampler_id(service, session, who, name))


def _made(service: Service, session: Session, who: Principal, name: str) -> tables.Sampler:
    path = name
    if name.startswith(RUN):
        newest = _newest(session, who, name.removeprefix(RUN))
        assert isinstance(newest, str)
        path = newest
    owner, sampler_id = _openai_session(session, who), _sampler_id(service, session, who, path)
    of_path = path.startswith("tinker://")
    asked = CreateSamplingSessionRequest(
        session_id=owner.id,
        sampling_session_seq_id=int(sampler_id.rpartition(":")[2][:7], 16),
        base_model=None if of_path else path,
        model_path=path if of_path else None,
    )
    row = new_sampler(service, session, who, owner, sampler_id, asked)
    session.add(row)
    return row


def _sampler_id(service: Service, session: Session, who: Principal, name: str) -> str:
    """The id of a sampler. It also depends on the weights that a path has now, since a name may be saved again."""
    ref = ""
    if name.startswith("tinker://"):
        ref = readable_checkpoint(session, who, parse_path(name, "model")).ref
    elif name not in service.cards:
        raise NotFound(f"this server has {', '.join(sorted(service.cards))}, tinker:// paths and run:<id>")
    digest = hashlib.sha256(f"{name} {ref}".encode()).hexdigest()
    return f"{_openai_session_id(who)}:openai:{digest[:24]}"


def _newest(session: Session, who: Principal, run_id: str) -> tables.Sampler | str:
    """The newest weights of a run: a sampler made of them, or their path."""
    run = run_by_id(session, who, run_id)
    row = tables.Operation
    saves = select(row).where(row.lane == run.id, row.kind == OpKind.SAVE_SAMPLER.value, row.state == "done")
    for save in session.scalars(saves.order_by(row.seq.desc()).limit(LOOK_BACK)):
        plan = plan_of(save)
        if isinstance(plan, NewSampler):
            sampler = session.get(tables.Sampler, plan.sampler_id)
            if sampler is not None:
                return sampler
        elif isinstance(plan, Save):
            path = f"tinker://{run.id}/{plan.kind}/{plan.name}"
            try:
                checkpoint_at(session, who, parse_path(path, "model"))
            except NotFound:
                continue
            return path
    raise NotFound("this run has no sampler weights yet; save some (save_weights_for_sampler)")


def _openai_session_id(who: Principal) -> str:
    """The id of a caller's session. It is made of a text that no retry key of `create_session` can be: those begin with
    an organisation's id."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"openai {who.domain} {who.actor}"))


def _openai_session(session: Session, who: Principal) -> tables.Session:
    """The session of all requests that a caller sends to these APIs."""
    row = session.get(tables.Session, _openai_session_id(who))
    if row is not None:
        return row
    now = datetime.now(UTC)
    made: dict[str, Any] = {"org_id": who.org_id, "key_id": who.key_id, "user_id": who.user_id, "state": "active"}
    row = tables.Session(
        id=_openai_session_id(who),
        **made,
        sdk_version="openai",
        display_name="OpenAI API",
        tags=["openai"],
        user_metadata={},
        created_at=now,
        last_seen_at=now,
        project_id=project_for(session, who, None),
    )
    session.add(row)
    session.flush()
    return row
