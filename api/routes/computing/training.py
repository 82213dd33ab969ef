"""Runs: creating them, asking about them, and stepping their optimizers."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from weft.wire import (
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    OptimStepRequest,
    UntypedAPIFuture,
)
from weft.wire.checks.runs import ADAMW

from api.checks.optimizers import CONFIGS, check_step, family_of
from api.checks.priority import PriorityDep
from api.checks.runs import ALPHA, check_lora, check_metadata, check_sequence
from api.http.access import LOOKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_body, read_json
from api.operations.new_run import check_session, create, run_id_of
from api.operations.submit import Checked, submit_json
from api.state.service import ServiceDep
from api.who.lookup import run_by_id, served_model
from scheduler.links.messages import OpKind, RunSpec
from scheduler.order.plans import Create, Step
from store import tables

router = APIRouter(prefix="/api/v1")

#: The seed of a run whose client names no seed, as in Tinker's client.
DEFAULT_RANK = 32


@router.post("/create_model", response_model_exclude_none=True, **declare(scope="train", limit="work"))
async def create_model(
    request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep
) -> UntypedAPIFuture:
    """A fresh run. Idempotent on (session, model_seq_id): it is operation 0 of its run."""
    body = await read_json(request, CreateModelRequest)
    seq = check_sequence(body.model_seq_id, "model_seq_id")
    served_model(service.cards, body.base_model)
    max_rank = service.settings.limits.max_rank
    lora = body.lora_config or LoraConfig(rank=min(DEFAULT_RANK, max_rank))
    check_lora(lora, max_rank)
    spec = RunSpec(
        run_id=run_id_of(body.session_id, seq),
        base_model=body.base_model,
        rank=lora.rank,
        alpha=ALPHA,
        # A drawn seed is stored in the run's row, so that a replay makes the same adapter.
        seed=lora.seed if lora.seed is not None else secrets.randbelow(2**31),
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        optimizer=family_of(body.optimizer_config, "optimizer_config") or ADAMW,
    )
    await service.read(lambda session: check_session(session, who, body.session_id, spec.run_id))
    metadata = check_metadata(body.user_metadata)
    raw = body.model_dump_json(exclude_none=True).encode()
    return await create(service, who, body.session_id, seq, Create(spec, priority), metadata, raw)


@router.post("/get_info", **declare(scope=LOOKING, limit="call"))
async def get_info(request: Request, service: ServiceDep, who: PrincipalDep) -> GetInfoResponse:
    body = await read_json(request, GetInfoRequest)
    run = await service.read(lambda session: run_by_id(session, who, body.model_id))
    card = service.cards.get(run.base_model)
    arch = card.architecture if card else None
    return GetInfoResponse(
        type="get_info",
        model_data=ModelData(arch=arch, model_name=run.base_model, tokenizer_id=run.base_model),
        model_id=run.id,
        optimizer_config=CONFIGS[run.optimizer],
        is_lora=True,
        lora_rank=run.rank,
        model_name=run.base_model,
    )


@router.post("/optim_step", response_model_exclude_none=True, **declare(scope="train", limit="work"))
async def optim_step(request: Request, service: ServiceDep, who: PrincipalDep) -> UntypedAPIFuture:
    def check(body: OptimStepRequest, run: tables.Run) -> Checked:
        return Checked(Step(check_step(body, run.optimizer), body.heard_of))

    raw = await read_body(request)
    return await submit_json(service, who, OpKind.OPTIM_STEP, raw, OptimStepRequest, check, at_once=True)
