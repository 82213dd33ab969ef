"""Saving and loading the weights of runs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UntypedAPIFuture,
    WeightsInfoRequest,
    WeightsInfoResponse,
)

from api.checks.adapter_sizes import stored_bytes
from api.checks.optimizers import CONFIGS, check_same_optimizer, family_of
from api.checks.priority import PriorityDep
from api.checks.runs import check_metadata, check_sequence
from api.errors import Invalid, quote
from api.http.access import LOOKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import parse, read_body, read_json
from api.operations.new_run import check_session, create, repeat, run_id_of
from api.operations.submit import Checked, submit_json
from api.paths import check_name, parse_path
from api.state.service import Service, ServiceDep
from api.who.lookup import readable_checkpoint, run_of, served_model
from api.who.principal import Principal
from scheduler.journal import rows
from scheduler.journal.recovery import spec_of
from scheduler.links.messages import OpKind, RunSpec
from scheduler.order.plans import Create, Load, NewSampler, Save, Source
from store import tables
from workers.model.adapters.encryption import BadRecipient, parse_recipients

router = APIRouter(prefix="/api/v1")

#: The key in a run's metadata for the path of the checkpoint that it was started from.
CONTINUED_FROM = "continued_from"


@router.post(
    "/save_weights", response_model_exclude_none=True, **declare(scope="train", limit="work", meters="storage")
)
async def save_weights(request: Request, service: ServiceDep, who: PrincipalDep) -> UntypedAPIFuture:
    """Adapter and optimizer under a name. Whether the name is free is decided in order, by the journal."""

    def check(body: SaveWeightsRequest, run: tables.Run) -> Checked:
        return Checked(
            Save(
                "weights",
                f"auto-{body.seq_id}" if body.path is None else check_name(body.path, "path"),
                body.ttl_seconds,
                overwrite=body.overwrite,
                user_metadata=check_metadata(body.user_metadata),
            ),
            stores_bytes=_stores(service, run, OpKind.SAVE_STATE),
        )

    raw = await read_body(request)
    return await submit_json(service, who, OpKind.SAVE_STATE, raw, SaveWeightsRequest, check)


@router.post(
    "/save_weights_for_sampler",
    response_model_exclude_none=True,
    **declare(scope="train", limit="work", meters="storage"),
)
async def save_weights_for_sampler(request: Request, service: ServiceDep, who: PrincipalDep) -> UntypedAPIFuture:
    """The adapter alone: under a name, or unnamed and at once as a sampler."""

    def check(body: SaveWeightsForSamplerRequest, run: tables.Run) -> Checked:
        if body.path is not None:
            plan: Save | NewSampler = _named_sampler(body, body.path)
        else:
            with service.database.read() as session:
                plan = _unnamed_sampler(body, session, run)
        return Checked(plan, stores_bytes=_stores(service, run, OpKind.SAVE_SAMPLER))

    raw = await read_body(request)
    return await submit_json(service, who, OpKind.SAVE_SAMPLER, raw, SaveWeightsForSamplerRequest, check)


def _stores(service: Service, run: tables.Run, kind: OpKind) -> int:
    spec = spec_of(run)
    return stored_bytes(spec, service.sizes(spec), kind)


def _named_sampler(body: SaveWeightsForSamplerRequest, path: str) -> Save:
    if body.kind != "snapshot":
        raise Invalid(f"kind: a named save is a snapshot; {body.kind!r} needs sampling_session_seq_id")
    name, metadata = check_name(path, "path"), check_metadata(body.user_metadata)
    return Save("sampler_weights", name, body.ttl_seconds, user_metadata=metadata)


def _unnamed_sampler(body: SaveWeightsForSamplerRequest, session: Session, run: tables.Run) -> NewSampler:
    number = check_sequence(body.sampling_session_seq_id, "sampling_session_seq_id")
    sampler_id = f"{run.session_id}:sample:{number}"
    saving = select(tables.Operation.id).where(
        tables.Operation.session_id == run.session_id,
        tables.Operation.kind == OpKind.SAVE_SAMPLER.value,
        tables.Operation.state == "queued",
        rows.sampler_id == sampler_id,
    )
    if session.get(tables.Sampler, sampler_id) is not None or session.scalars(saving).first() is not None:
        raise Invalid(f"sampling_session_seq_id: {number} is taken in this session; use the next number")
    return NewSampler(sampler_id, number, inflight=body.kind == "inflight")


@router.post(
    "/save_weights_external", response_model_exclude_none=True, **declare(scope="train", limit="work", meters="storage")
)
async def save_weights_external(request: Request, service: ServiceDep, who: PrincipalDep) -> UntypedAPIFuture:
    """The adapter as files for other tools (`workers.model.adapters.peft_format`), for their recipients only where it
    names some."""

    def check(body: SaveWeightsExternalRequest, run: tables.Run) -> Checked:
        try:
            parse_recipients(body.age_encryption_recipients or [])
        except BadRecipient as error:
            raise Invalid(f"age_encryption_recipients{error}") from None
        plan = Save("external_weights", check_name(body.path, "path"), body.ttl_seconds)
        return Checked(plan, stores_bytes=_stores(service, run, OpKind.SAVE_EXTERNAL))

    raw = await read_body(request)
    return await submit_json(service, who, OpKind.SAVE_EXTERNAL, raw, SaveWeightsExternalRequest, check)


@router.post("/load_weights", response_model_exclude_none=True, **declare(scope="train", limit="work"))
async def load_weights(
    request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep
) -> UntypedAPIFuture:
    """Weights of a checkpoint: into a new run when the body names a session, in place when it names a model."""
    raw = await read_body(request)

    def check(body: LoadWeightsRequest, run: tables.Run) -> Checked:
        with service.database.read() as session:
            return _load_in_place(body, session, who, run)

    if (await parse(service, raw, _Target)).model_id is not None:
        return await submit_json(service, who, OpKind.LOAD_STATE, raw, LoadWeightsRequest, check)
    return await _create_from(service, who, await parse(service, raw, LoadWeightsRequest), raw, priority)


@router.post("/weights_info", **declare(scope=LOOKING, limit="call"))
async def weights_info(request: Request, service: ServiceDep, who: PrincipalDep) -> WeightsInfoResponse:
    body = await read_json(request, WeightsInfoRequest)
    path = parse_path(body.tinker_path, "tinker_path")

    def read(session: Session) -> tables.Run:
        return run_of(session, readable_checkpoint(session, who, path))

    run = await service.read(read)
    return WeightsInfoResponse(
        base_model=run.base_model,
        optimizer_config=CONFIGS[run.optimizer],
        is_lora=True,
        lora_rank=run.rank,
        train_unembed=run.train_unembed,
        train_mlp=run.train_mlp,
        train_attn=run.train_attn,
    )


class _Target(BaseModel):
    """Distinguishes the two uses of load_weights."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model_id: str | None = None


def _load_in_place(body: LoadWeightsRequest, session: Session, who: Principal, run: tables.Run) -> Checked:
    checkpoint, source = _source(session, who, body)
    for field in ("base_model", "rank", "train_attn", "train_mlp", "train_unembed"):
        theirs, ours = getattr(source, field), getattr(run, field)
        if theirs != ours:
            raise Invalid(f"path: that checkpoint has {field} {quote(theirs)}, this model has {quote(ours)}")
    if body.optimizer:
        check_same_optimizer(source.optimizer, run.optimizer)
    return Checked(Load(Source(checkpoint.ref, body.path, body.optimizer)))


def _source(session: Session, who: Principal, body: LoadWeightsRequest) -> tuple[tables.Checkpoint, tables.Run]:
    """The checkpoint that training goes on from, and the run that it was saved from."""
    path = parse_path(body.path, "path")
    if path.kind == "sampler_weights" or (path.kind == "external_weights" and body.optimizer):
        raise Invalid(f"path: {path} holds no training state; load one that save_state has made")
    checkpoint = readable_checkpoint(session, who, path, body.weights_access_token)
    return checkpoint, run_of(session, checkpoint)


async def _create_from(
    service: Service, who: Principal, body: LoadWeightsRequest, raw: bytes, priority: str
) -> UntypedAPIFuture:
    """A new run that goes on from a checkpoint: the base model, rank and trained parts are those of its run."""
    session_id = body.session_id or ""
    seq = check_sequence(body.model_seq_id, "model_seq_id")
    run_id = run_id_of(session_id, seq)
    optimizer = family_of(body.optimizer_config, "optimizer_config")

    def read(session: Session) -> tuple[RunSpec, str] | None:
        if check_session(session, who, session_id, run_id):
            return None
        checkpoint, source = _source(session, who, body)
        if body.base_model is not None and body.base_model != source.base_model:
            raise Invalid(f"base_model: that checkpoint is of {source.base_model}, not of {quote(body.base_model)}")
        served_model(service.cards, source.base_model, "path")
        spec = replace(spec_of(source), run_id=run_id, optimizer=optimizer or source.optimizer)
        if body.optimizer:
            check_same_optimizer(source.optimizer, spec.optimizer)
        return spec, checkpoint.ref

    found = await service.read(read)
    if found is None:
        return await repeat(service, who, session_id, run_id, raw)
    spec, ref = found
    plan = Create(spec, priority, Source(ref, body.path, body.optimizer))
    metadata = {**check_metadata(body.user_metadata), CONTINUED_FROM: body.path}
    return await create(service, who, session_id, seq, plan, metadata, raw)
