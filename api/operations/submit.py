"""Handing operations to the journal.

Operations of a run run strictly by sequence number, and a client goes on counting after one that was refused. So a
refusal consumes its number too: it is accepted as an operation that fails with what is wrong. Otherwise everything
behind it would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import UntypedAPIFuture
from weft.wire.base import Integer

from api.checks.runs import check_sequence
from api.errors import ApiError, Busy, CannotStore, Invalid, OverQuota, PaymentRequired, Unavailable
from api.http.bodies import INLINE_BYTES, parse, parse_json
from api.operations.lanes import own_run
from api.state.rates import check_in_flight, count_tokens
from api.state.service import Service
from api.who.lanes import Lane
from api.who.lookup import served_model, session_by_id
from api.who.principal import Principal, RateLimit
from billing.metering.quotas import QuotaReached
from billing.money.accounts import OutOfMoney
from scheduler.links.messages import OpKind
from scheduler.order.operations import Draining, NewOperation, QueueFull, RunClosed, SequenceReused
from scheduler.order.plans import BODY_ONLY, Plan
from store import tables
from store.blobs.room import NoRoom

M = TypeVar("M", bound=BaseModel)


class Address(BaseModel):
    """The part of every operation's body that names its run and number; it is read even if the rest is wrong."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model_id: str
    seq_id: Integer


@dataclass(frozen=True)
class Checked:
    """The result of checking an operation that may run."""

    plan: Plan = BODY_ONLY
    tokens: int = 0
    #: The body to store instead of the one sent: completed with what the server knows.
    body: bytes | None = None
    #: For a save: about how many bytes it will store.
    stores_bytes: int = 0


#: Checks a request to a run. Raises an ApiError to refuse it.
Check = Callable[[tables.Run], Checked]


@dataclass(frozen=True)
class Submitter:
    """The party for which an operation is submitted: the principal, the project of the operation's session, and the
    limits of both."""

    who: Principal
    project_id: str | None
    limits: tuple[RateLimit, ...]

    @classmethod
    def of(cls, session: Session, who: Principal, session_id: str) -> Submitter:
        project_id = session_by_id(session, who, session_id).project_id
        project = session.get(tables.Project, (who.org_id, project_id)) if project_id is not None else None
        return cls._in(who, project_id, RateLimit.of(project) if project is not None else None)

    @classmethod
    def to(cls, lane: Lane[Any], who: Principal) -> Submitter:
        return cls._in(who, lane.owner.project_id, lane.project)

    @classmethod
    def _in(cls, who: Principal, project_id: str | None, project: RateLimit | None) -> Submitter:
        """A submitter in a project. If the key is bound to the project, its limits include the project's already."""
        if who.project_id is not None or project is None:
            return cls(who, project_id, who.limits)
        return cls(who, project_id, (*who.limits, project))

    def sign(self, new: NewOperation) -> NewOperation:
        return replace(new, key_id=self.who.key_id, user_id=self.who.user_id, project_id=self.project_id)


async def accept(
    service: Service, submitter: Submitter, new: NewOperation, *rows: tables.Base, repeat: bool = False
) -> str:
    """`Journal.accept` within the limits of `submitter`; its refusals become ApiErrors. Repeats, and operations that
    only spend their number, are not counted."""
    new, in_flight = submitter.sign(new), service.journal.in_flight
    if not repeat and new.refused is None:
        await count_tokens(service.rates, submitter.limits, new.tokens)
        await check_in_flight(submitter.limits, in_flight, new)
    try:
        with in_flight.arriving(new):
            request_id = await service.journal.accept(new, *rows)
        service.liveness.asked(submitter.who, new.session_id)
        return request_id
    except QueueFull as error:
        raise Busy(str(error)) from None
    except OutOfMoney as error:
        raise PaymentRequired(error) from None
    except QuotaReached as error:
        raise OverQuota(error) from None
    except Draining as error:
        raise Unavailable(str(error)) from None
    except NoRoom as error:
        raise CannotStore(str(error)) from None
    except (SequenceReused, RunClosed) as error:
        raise Invalid(str(error)) from None


async def submit(
    service: Service,
    who: Principal,
    address: Address,
    kind: OpKind,
    body: bytes,
    check: Check,
    *,
    at_once: bool = False,
    reads: bool = False,
) -> tuple[UntypedAPIFuture, ApiError | None]:
    """Accept one operation of a run. Returns the future for the client, and the reason if the operation will fail. A
    check that reads nothing may run `at_once`, in the event loop; a check that `reads` much from blobs, which may be
    slow, does not take the turn of a large body.

    Raises NotFound for an unknown run, Forbidden for a colleague's, and Invalid for an impossible number: these do not
    use up the number.
    """
    seq = check_sequence(address.seq_id, "seq_id", least=1)
    lane = await own_run(service, who, address.model_id)
    run, submitter = lane.row, Submitter.to(lane, who)
    repeat = await service.journal.taken(run.id, seq)
    checked, refused = Checked(), None
    try:
        if not repeat:
            served_model(service.cards, run.base_model)
            checked = check(run) if at_once else await service.work(0 if reads else len(body), partial(check, run))
    except ApiError as error:
        refused = error

    def operation(checked: Checked, refused: ApiError | None) -> NewOperation:
        return NewOperation(
            org_id=who.org_id,
            session_id=run.session_id,
            lane=run.id,
            seq=seq,
            kind=kind,
            base_model=run.base_model,
            tokens=checked.tokens,
            body=body if checked.body is None else checked.body,
            sent=body,
            plan=checked.plan,
            stores_bytes=checked.stores_bytes,
            refused=refused.detail if refused is not None else None,
        )

    try:
        request_id = await accept(service, submitter, operation(checked, refused), repeat=repeat)
    except OverQuota as error:
        if not error.for_ever:
            raise
        refused = error
        request_id = await accept(service, submitter, operation(Checked(), refused))
    if refused is not None:
        refused.request_id = request_id
        why: str | None = refused.detail
    else:  # a repeat, such as after a lost answer, is told the first one's error
        why = await service.read(partial(_failure, request_id=request_id)) if repeat else None
    return UntypedAPIFuture(request_id=request_id, model_id=run.id, refused=why), refused


def _failure(session: Session, request_id: str) -> str | None:
    return session.scalar(select(tables.Operation.error).where(tables.Operation.id == request_id))


async def submit_json(
    service: Service,
    who: Principal,
    kind: OpKind,
    body: bytes,
    model: type[M],
    check: Callable[[M, tables.Run], Checked],
    *,
    at_once: bool = False,
) -> UntypedAPIFuture:
    """`submit` for an operation with a JSON body. A refusal is raised at once, and is also the operation's outcome."""
    address, small = await parse(service, body, Address), len(body) <= INLINE_BYTES

    def examine(run: tables.Run) -> Checked:
        return check(parse_json(body, model), run)

    future, refused = await submit(service, who, address, kind, body, examine, at_once=at_once and small)
    if refused is not None:
        await service.journal.tell_failure(who.org_id, future.request_id)
        raise refused
    return future
