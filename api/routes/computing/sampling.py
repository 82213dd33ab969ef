"""Samplers, and sampling from them."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from weft.wire import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    LimitsResponse,
    SampleRequest,
    UntypedAPIFuture,
)

from api.checks.priority import PriorityDep
from api.checks.runs import check_sequence
from api.checks.samples import check_sample, prompt_tokens
from api.errors import Invalid, quote
from api.http.access import LOOKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import INLINE_BYTES, parse, read_body, read_json
from api.operations.lanes import sampler_of
from api.operations.submit import Submitter, accept
from api.paths import parse_path
from api.state.service import Service, ServiceDep
from api.who.lookup import readable_checkpoint, row_of_anyone, run_of, sampler_by_id, sees, served_model
from api.who.may_change import active_session
from api.who.principal import Principal
from scheduler.links.messages import sequence_id
from scheduler.order.operations import SAMPLE, NewOperation
from scheduler.order.plans import Sample
from store import tables

router = APIRouter(prefix="/api/v1")

#: Clones of a sampling client number their requests in strides of 1e9.
MAX_SAMPLE_SEQUENCE = 2**63 - 1


@router.post("/create_sampling_session", **declare(scope="sample", limit="call"))
async def create_sampling_session(
    request: Request, service: ServiceDep, who: PrincipalDep
) -> CreateSamplingSessionResponse:
    """A sampler of a base model or of saved weights. Idempotent on (session, sampling_session_seq_id)."""
    body = await read_json(request, CreateSamplingSessionRequest)
    seq = check_sequence(body.sampling_session_seq_id, "sampling_session_seq_id")
    sampler_id = f"{body.session_id}:sample:{seq}"

    def write(session: Session) -> None:
        there = row_of_anyone(session, tables.Sampler, sampler_id)
        if there is not None:
            _check_same(sampler_by_id(session, who, there.id), body)
            return
        owner = active_session(session, who, body.session_id)
        session.add(new_sampler(service, session, who, owner, sampler_id, body))

    await service.database.write(write)
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


@router.get("/samplers/{sampler_id}", **declare(scope=LOOKING, limit="call"))
async def get_sampler(sampler_id: str, service: ServiceDep, who: PrincipalDep) -> GetSamplerResponse:
    row = await service.read(lambda session: sampler_by_id(session, who, sampler_id))
    return GetSamplerResponse(sampler_id=row.id, base_model=row.base_model, model_path=row.model_path)


@router.post(
    "/asample",
    response_model_exclude_none=True,
    **declare(scope="sample", limit="work", meters="sample", body="data"),
)
async def asample(request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep) -> UntypedAPIFuture:
    """Queue one request for `num_samples` sequences. Idempotent on (sampler, seq_id), in any order."""
    raw = await read_body(request)
    large = len(raw) > INLINE_BYTES
    body = await parse(service, raw, SampleRequest)
    if body.sampling_session_id is None:
        raise Invalid("sampling_session_id: required; create one with create_sampling_session")
    seq = check_sequence(body.seq_id, "seq_id", most=MAX_SAMPLE_SEQUENCE)
    lane = await sampler_of(service, who, body.sampling_session_id)
    sampler, submitter = lane.row, Submitter.to(lane, who)
    repeat = await service.journal.taken(sampler.id, seq)
    served_model(service.cards, sampler.base_model, "sampling_session_id")
    check = partial(checked_sample, service, body, sampler, seq, priority)
    new = await service.work(len(raw), check) if large else check()
    request_id = await accept(service, submitter, new, repeat=repeat)
    sequences = [sequence_id(request_id, sample) for sample in range(body.num_samples)]
    return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=sequences)


def checked_sample(
    service: Service,
    body: SampleRequest,
    sampler: tables.Sampler,
    seq: int,
    priority: str,
    limits: LimitsResponse | None = None,
) -> NewOperation:
    """The operation, its body with `max_tokens` as it will apply, and a seed where it is streamed. `limits` replaces
    the service's."""
    most = check_sample(body, limits or service.limits, sampler.base_model, of_run=sampler.run_id is not None)
    params = body.sampling_params.model_copy(update={"max_tokens": most} | _seed(service, body, sampler.id, seq))
    whole = body.model_copy(update={"sampling_params": params})
    prompt = int(prompt_tokens(body).size)
    tokens = prompt + body.num_samples * most
    return NewOperation(
        org_id=sampler.org_id,
        session_id=sampler.session_id,
        lane=sampler.id,
        seq=seq,
        kind=SAMPLE,
        base_model=sampler.base_model,
        tokens=tokens,
        body=whole.model_dump_json(exclude_none=True).encode(),
        plan=Sample(body.num_samples, prompt, priority),
    )


def _seed(service: Service, body: SampleRequest, sampler_id: str, seq: int) -> dict[str, int]:
    """The seed of a streamed sample that names none: nobody can guess it, and a repeat gets the same. If a generator
    dies, the next one thereby continues with the tokens that the client has been told."""
    if not body.stream or body.sampling_params.seed is not None:
        return {}
    digest = hmac.digest(service.secret, f"{sampler_id} {seq}".encode(), "sha256")
    return {"seed": int.from_bytes(digest[:8], "little", signed=True)}


def new_sampler(
    service: Service,
    session: Session,
    who: Principal,
    owner: tables.Session,
    sampler_id: str,
    body: CreateSamplingSessionRequest,
) -> tables.Sampler:
    """The row of a sampler: of the weights at `model_path` where given, else of the base model alone."""
    ref, run_id, base_model = "", None, body.base_model
    if body.model_path is not None:
        path = parse_path(body.model_path, "model_path")
        if path.kind != "sampler_weights":
            raise Invalid(f"model_path: {path} cannot be sampled; use save_weights_for_sampler and its path")
        checkpoint = readable_checkpoint(session, who, path, keep=True)
        run = run_of(session, checkpoint)
        if base_model is not None and base_model != run.base_model:
            raise Invalid(f"base_model: those weights are of {run.base_model}, not of {quote(base_model)}")
        # Somebody else's published weights are sampled, and paid for, outside of their run.
        run_id = run.id if sees(session, who, run) else None
        ref, base_model = checkpoint.ref, run.base_model
    if base_model is None:
        raise Invalid("base_model, model_path: give one of them")
    served_model(service.cards, base_model)
    return tables.Sampler(
        id=sampler_id,
        org_id=owner.org_id,
        session_id=owner.id,
        sampling_session_seq_id=body.sampling_session_seq_id,
        base_model=base_model,
        model_path=body.model_path,
        adapter_ref=ref,
        run_id=run_id,
        kind="base" if body.model_path is None else "snapshot",
        created_at=datetime.now(UTC),
    )


def _check_same(there: tables.Sampler, body: CreateSamplingSessionRequest) -> None:
    """Refuse a repeat that asks for something else: its number would be used twice."""
    same_model = body.base_model is None or body.base_model == there.base_model
    if body.model_path != there.model_path or not same_model:
        raise Invalid(
            f"sampling_session_seq_id: {body.sampling_session_seq_id} is already the sampler {there.id} of "
            f"{there.model_path or there.base_model}; use the next number"
        )
