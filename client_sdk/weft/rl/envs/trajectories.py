"""Agents as they are: what any program has sampled through the OpenAI- or vLLM-compatible routes becomes a rollout to
train on."""

from __future__ import annotations

from weft.future import APIFuture
from weft.rl.rollout import Rollout, Turn
from weft.service_client import ServiceClient
from weft.wire.binary.sample_codec import PolicySpan
from weft.wire.turns import Turn as WireTurn


def trajectories(session: str, service: ServiceClient, reward: float = 0.0) -> Rollout:
    """All that was sampled under `X-Session-ID: session`, in order, with its exact tokens, logprobs and versions.
    `data_of(rollout, advantage)` makes data of it: turns that extend each other are one datum, a break begins the next,
    and several conversations at a time are told apart. Raises NotFoundError for a session that nothing is kept of."""
    return APIFuture.start(_fetch(session, service, reward)).result()


async def trajectories_async(session: str, service: ServiceClient, reward: float = 0.0) -> Rollout:
    """`trajectories`, awaited."""
    return await APIFuture.start(_fetch(session, service, reward))


async def _fetch(session: str, service: ServiceClient, reward: float) -> Rollout:
    rest, turns, after = service.create_rest_client(), list[Turn](), 0
    while True:
        answer = await rest.get_turns(session, after)
        turns += [_turn(turn) for turn in answer.turns]
        if answer.next is None:
            return Rollout(turns, reward)
        after = answer.next


def _turn(turn: WireTurn) -> Turn:
    spans = tuple(PolicySpan(version, length) for version, length in turn.versions)
    return Turn(
        tuple(turn.prompt),
        tuple(turn.tokens),
        tuple(turn.logprobs),
        spans,
        turn.stop_reason,
        turn.stale,
        temperature=turn.temperature,
        top_p=turn.top_p,
        top_k=turn.top_k,
        sequence_id=turn.sequence_id,
    )
