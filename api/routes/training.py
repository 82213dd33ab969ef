"""Runs: creating them, training them, saving and loading their weights."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import (
    CreateModelRequest,
    GetInfoRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    WeightsInfoRequest,
)

from api.auth import PrincipalDep
from api.bodies import parse_json, read_body, read_json
from api.errors import Invalid, quote
from api.lookup import active_session, checkpoint_at, run_by_id, served_model
from api.paths import check_name, parse_path
from api.state import Service, ServiceDep
from api.submit import Checked, accept, known, submit_json
from api.validate.optimizers import check_adam, check_family
from api.validate.runs import ALPHA, check_lora, check_metadata, check_sequence, seed_of
from scheduler.messages import OpKind, RunSpec
from scheduler.operations import NewOperation
from store import tables

router = APIRouter(prefix="/api/v1")

#: Optimizer of every run, as clients are told.
ADAM = {"type": "adamw"}


@router.post("/create_model")
async def create_model(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """A fresh run. Idempotent on (session, model_seq_id): it is operation 0 of its run."""
    body = await read_json(request, CreateModelRequest)
    seq = check_sequence(body.model_seq_id, "model_seq_id")
    served_model(service.cards, body.base_model)
    lora = body.lora_config or LoraConfig(rank=32)
    check_lora(lora, service.settings.limits.max_rank)
    check_family(body.optimizer_config, "optimizer_config")
    spec = RunSpec(
        run_id=_run_id(body.session_id, seq),
        base_model=body.base_model,
        rank=lora.rank,
        alpha=ALPHA,
        seed=seed_of(lora),
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )
    await service.read(lambda session: _check_session(session, who.org_id, body.session_id, spec.run_id))
    metadata = check_metadata(body.user_metadata)
    raw = body.model_dump_json(exclude_none=True).encode()
    return await _create(service, who.org_id, body.session_id, seq, spec, metadata, raw, {})


@router.post("/load_weights")
async def load_weights(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """Weights of a checkpoint: into a new run when the body names a session, in place when it names a model."""
    raw = await read_body(request)
    if parse_json(raw, _Target).model_id is not None:
        return await submit_json(service, who.org_id, OpKind.LOAD_STATE, raw, LoadWeightsRequest, _load_in_place)
    return await _create_from(service, who.org_id, parse_json(raw, LoadWeightsRequest), raw)


@router.post("/get_info")
async def get_info(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    body = await read_json(request, GetInfoRequest)
    run = await service.read(lambda session: run_by_id(session, who.org_id, body.model_id))
    card = service.cards.get(run.base_model)
    data = {
        "arch": card.architecture if card else None,
        "model_name": run.base_model,
        "tokenizer_id": run.base_model,
    }
    return {
        "type": "get_info",
        "model_data": data,
        "model_id": run.id,
        "optimizer_config": ADAM,
        "is_lora": True,
        "lora_rank": run.rank,
        "model_name": run.base_model,
    }


@router.post("/weights_info")
async def weights_info(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    body = await read_json(request, WeightsInfoRequest)
    path = parse_path(body.tinker_path, "tinker_path")

    def read(session: Session) -> tables.Run:
        return session.get_one(tables.Run, checkpoint_at(session, who.org_id, path).run_id)

    run = await service.read(read)
    return {
        "base_model": run.base_model,
        "optimizer_config": ADAM,
        "is_lora": True,
        "lora_rank": run.rank,
        "train_unembed": run.train_unembed,
        "train_mlp": run.train_mlp,
        "train_attn": run.train_attn,
    }


@router.post("/optim_step")
async def optim_step(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    def check(body: OptimStepRequest, session: Session, run: tables.Run) -> Checked:
        if body.adam_params is None:
            check_family(body.optimizer_params, "optimizer_params")
            raise Invalid("optimizer_params: AdamW takes its parameters under the name adam_params")
        check_adam(body.adam_params)
        return Checked()

    raw = await read_body(request)
    return await submit_json(service, who.org_id, OpKind.OPTIM_STEP, raw, OptimStepRequest, check)


@router.post("/save_weights")
async def save_weights(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """Adapter and optimizer under a name. Whether the name is free is decided in order, by the journal."""

    def check(body: SaveWeightsRequest, session: Session, run: tables.Run) -> Checked:
        return Checked(
            {
                "kind": "weights",
                "name": f"auto-{body.seq_id}" if body.path is None else check_name(body.path, "path"),
                "overwrite": body.overwrite,
                "ttl_seconds": body.ttl_seconds,
                "user_metadata": check_metadata(body.user_metadata),
            }
        )

    raw = await read_body(request)
    return await submit_json(service, who.org_id, OpKind.SAVE_STATE, raw, SaveWeightsRequest, check)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """The adapter alone: under a name, or unnamed and at once as a sampler."""
    raw = await read_body(request)
    model = SaveWeightsForSamplerRequest
    return await submit_json(service, who.org_id, OpKind.SAVE_SAMPLER, raw, model, _check_sampler_save)


def _check_sampler_save(body: SaveWeightsForSamplerRequest, session: Session, run: tables.Run) -> Checked:
    metadata = check_metadata(body.user_metadata)
    if body.path is not None:
        if body.kind != "snapshot":
            raise Invalid(f"kind: a named save is a snapshot; {body.kind!r} needs sampling_session_seq_id")
        name = check_name(body.path, "path")
        plan = {"kind": "sampler_weights", "name": name, "ttl_seconds": body.ttl_seconds, "user_metadata": metadata}
        return Checked(plan)
    number = check_sequence(body.sampling_session_seq_id, "sampling_session_seq_id")
    sampler_id = f"{run.session_id}:sample:{number}"
    saving = select(tables.Operation.id).where(
        tables.Operation.session_id == run.session_id,
        tables.Operation.kind == OpKind.SAVE_SAMPLER.value,
        tables.Operation.state == "queued",
        tables.Operation.plan["sampler_id"].as_string() == sampler_id,
    )
    if session.get(tables.Sampler, sampler_id) is not None or session.scalars(saving).first() is not None:
        raise Invalid(f"sampling_session_seq_id: {number} is taken in this session; use the next number")
    return Checked(
        {
            "kind": "sampler_weights",
            "name": None,
            "sampler_id": sampler_id,
            "sampling_session_seq_id": number,
            "sampler_kind": body.kind,
        }
    )


class _Target(BaseModel):
    """Tells the two addressings of load_weights apart."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model_id: str | None = None


def _load_in_place(body: LoadWeightsRequest, session: Session, run: tables.Run) -> Checked:
    checkpoint, source = _source(session, run.org_id, body)
    for field in ("base_model", "rank", "train_attn", "train_mlp", "train_unembed"):
        theirs, ours = getattr(source, field), getattr(run, field)
        if theirs != ours:
            raise Invalid(f"path: that checkpoint has {field} {quote(theirs)}, this model has {quote(ours)}")
    return Checked({"source_ref": checkpoint.ref, "with_optimizer": body.optimizer, "path": body.path})


def _source(session: Session, org_id: str, body: LoadWeightsRequest) -> tuple[tables.Checkpoint, tables.Run]:
    """The checkpoint that training goes on from, and the run that it was saved from."""
    path = parse_path(body.path, "path")
    if path.kind != "weights":
        raise Invalid(f"path: {path} holds no training state; load a checkpoint of the kind 'weights' (save_weights)")
    checkpoint = checkpoint_at(session, org_id, path)
    return checkpoint, session.get_one(tables.Run, checkpoint.run_id)


async def _create_from(service: Service, org_id: str, body: LoadWeightsRequest, raw: bytes) -> dict[str, Any]:
    """A new run that goes on from a checkpoint: the base model, rank and trained parts are those of its run."""
    session_id = body.session_id or ""
    seq = check_sequence(body.model_seq_id, "model_seq_id")
    run_id = _run_id(session_id, seq)
    check_family(body.optimizer_config, "optimizer_config")

    def read(session: Session) -> tuple[RunSpec, str] | None:
        if _check_session(session, org_id, session_id, run_id):
            return None
        checkpoint, source = _source(session, org_id, body)
        if body.base_model is not None and body.base_model != source.base_model:
            raise Invalid(f"base_model: that checkpoint is of {source.base_model}, not of {quote(body.base_model)}")
        served_model(service.cards, source.base_model, "path")
        spec = RunSpec(
            run_id=run_id,
            base_model=source.base_model,
            rank=source.rank,
            alpha=source.alpha,
            seed=source.seed,
            train_attn=source.train_attn,
            train_mlp=source.train_mlp,
            train_unembed=source.train_unembed,
        )
        return spec, checkpoint.ref

    found = await service.read(read)
    if found is None:
        return await _repeat(service, org_id, session_id, run_id, raw)
    spec, ref = found
    plan = {"source_ref": ref, "with_optimizer": body.optimizer, "path": body.path}
    metadata = check_metadata(body.user_metadata)
    return await _create(service, org_id, session_id, seq, spec, metadata, raw, plan)


def _run_id(session_id: str, seq: int) -> str:
    """Clients predict this id, so its form is fixed."""
    return f"{session_id}:train:{seq}"


def _check_session(session: Session, org_id: str, session_id: str, run_id: str) -> bool:
    """True when the run exists already, which makes the request a repeat; else its session must take new runs."""
    if known(session, run_id, 0):
        run_by_id(session, org_id, run_id)
        return True
    active_session(session, org_id, session_id)
    return False


async def _create(
    service: Service,
    org_id: str,
    session_id: str,
    seq: int,
    spec: RunSpec,
    metadata: dict[str, Any],
    raw: bytes,
    plan: dict[str, Any],
) -> dict[str, Any]:
    now = datetime.now(UTC)
    facts = msgspec.structs.asdict(spec)
    run = tables.Run(
        id=facts.pop("run_id"),
        org_id=org_id,
        session_id=session_id,
        model_seq_id=seq,
        state="live",
        user_metadata=metadata,
        created_at=now,
        last_request_at=now,
        **facts,
    )
    whole = {"spec": msgspec.structs.asdict(spec), **plan}
    new = NewOperation(org_id, session_id, spec.run_id, 0, OpKind.CREATE, spec.base_model, 0, raw, whole)
    return {"request_id": await accept(service, new, run), "model_id": spec.run_id}


async def _repeat(service: Service, org_id: str, session_id: str, run_id: str, raw: bytes) -> dict[str, Any]:
    """The first answer again, for the creation of a run that exists."""
    run = await service.read(lambda session: run_by_id(session, org_id, run_id))
    new = NewOperation(org_id, session_id, run_id, 0, OpKind.CREATE, run.base_model, 0, raw)
    return {"request_id": await accept(service, new), "model_id": run_id}
