"""A sampler as the server knows it: made, handed to other processes, taken up again."""

from __future__ import annotations

import base64
import binascii
import json
import random
from dataclasses import asdict, dataclass

from weft.errors import WeftError
from weft.runs.session import Session
from weft.transport.http import encode
from weft.wire.sampling import CreateSamplingSessionRequest, CreateSamplingSessionResponse
from weft.wire.service import JoinSamplingSessionRequest, JoinSamplingSessionResponse
from weft.wire.shown import arguments

#: Every client of one sampler numbers its requests in a range of its own.
CLONE_STRIDE = 1_000_000_000


@dataclass(frozen=True)
class Sampler:
    """A sampler that the server has made. Its base model is looked up when it is not known; `clone` is 0 for the client
    that had it made."""

    id: str
    base_model: str | None = None
    clone: int = 0

    def seq_of(self, number: int) -> int:
        """The number on the wire of this client's request `number`."""
        return self.clone * CLONE_STRIDE + number


@dataclass(frozen=True)
class SamplerHandle:
    """All that another process needs to draw from a sampler, but no credential."""

    base_url: str
    session_id: str
    sampler_id: str
    base_model: str | None = None
    record_stability_info: bool = False

    def encoded(self) -> str:
        """The handle as a string of plain characters."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self), separators=(",", ":")).encode()).decode()

    @classmethod
    def decoded(cls, handle: str) -> SamplerHandle:
        """The sampler that a handle names. Raises `WeftError` for a handle that is none of ours."""
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(handle)))
        except (binascii.Error, ValueError, TypeError):
            raise WeftError("this is not a sampler handle of weft (SamplingClient.get_sampler_handle)") from None


async def make_sampler(session: Session, model_path: str | None, base_model: str | None) -> Sampler:
    """Have the server make a sampler of saved weights (`tinker://...`) or of a base model."""
    session_id = await session.id()
    with arguments():
        request = CreateSamplingSessionRequest(
            session_id=session_id,
            sampling_session_seq_id=next(session.sampler_numbers),
            base_model=base_model,
            model_path=model_path,
        )
    made = await session.transport.ask(
        "POST", "/create_sampling_session", CreateSamplingSessionResponse, encode(request.body())
    )
    return Sampler(made.sampling_session_id, base_model)


async def join_sampler(session: Session, handle: SamplerHandle) -> Sampler:
    """Become another client of a sampler. The server numbers its clients if it can; else the number is drawn."""
    await session.id()
    clone = random.randrange(1, CLONE_STRIDE)
    if session.config.sample_join_sampling_session:
        body = encode(JoinSamplingSessionRequest(sampling_session_id=handle.sampler_id).body())
        joined = await session.transport.ask("POST", "/join_sampling_session", JoinSamplingSessionResponse, body)
        clone = joined.client_counter
    return Sampler(handle.sampler_id, handle.base_model, clone)
