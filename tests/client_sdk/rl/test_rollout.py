"""Turns become data: which turns join, and which of their tokens are trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from weft.rl import losses
from weft.rl.rollout import Group, Rollout, Turn, data_of, join
from weft.wire.binary.sample_codec import PolicySpan
from weft.wire.inputs import PromptProvenanceSpan, SampledProvenanceSpan


def turn(prompt: list[int], tokens: list[int], agent: str = "", version: int = 0) -> Turn:
    spans = (PolicySpan(version, len(tokens)),)
    return Turn(tuple(prompt), tuple(tokens), tuple(-0.1 * t for t in tokens), spans, agent=agent)


def test_five_turns_with_a_break_make_two_data() -> None:
    """The golden example of prime-rl's documentation: the history is rewritten before the fourth turn."""
    one = turn([1, 2], [10, 11])
    two = turn([1, 2, 10, 11, 3], [12])
    three = turn([1, 2, 10, 11, 3, 12, 4], [13])
    four = turn([1, 2, 12, 4], [14])
    five = turn([1, 2, 12, 4, 14, 5], [15, 16])
    rollout = Rollout([one, two, three, four, five])
    first, second = data_of(rollout, 0.5)
    assert first.model_input.to_ints() == [1, 2, 10, 11, 3, 12, 4]
    assert first.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [2, 10, 11, 3, 12, 4, 13]
    assert first.loss_fn_inputs["mask"].to_numpy().tolist() == [0, 1, 1, 0, 1, 0, 1]
    assert first.loss_fn_inputs["advantages"].to_numpy().tolist() == [0, 0.5, 0.5, 0, 0.5, 0, 0.5]
    np.testing.assert_allclose(
        first.loss_fn_inputs["logprobs"].to_numpy(), [0, -1.0, -1.1, 0, -1.2, 0, -1.3], rtol=1e-6
    )
    assert second.model_input.to_ints() == [1, 2, 12, 4, 14, 5, 15]
    assert second.loss_fn_inputs["mask"].to_numpy().tolist() == [0, 0, 0, 1, 0, 1, 1]
    assert rollout.sampled == 7
    assert rollout.read == 4 + 5


def test_data_say_at_what_and_in_which_sequence_their_tokens_were_drawn() -> None:
    one = Turn((1, 2), (10, 11), (-1.0, -1.0), temperature=0.7, sequence_id="op:0")
    two = Turn((1, 2, 10, 11, 3), (12,), (-1.0,), temperature=1.3, sequence_id="op:1")
    (datum,) = data_of(Rollout([one, two]), 1.0)
    told = datum.loss_fn_inputs["sampling_temperature"].to_numpy()
    np.testing.assert_allclose(told, [1, 0.7, 0.7, 1, 1.3], rtol=1e-6)
    assert datum.model_input_spans == [
        PromptProvenanceSpan("op:0", 0, 2),
        SampledProvenanceSpan("op:0", 0, 2),
        PromptProvenanceSpan("op:1", 4, 1),
    ]
    assert datum.loss_fn_input_spans == [
        PromptProvenanceSpan("op:0", 1, 1),
        SampledProvenanceSpan("op:0", 0, 2),
        PromptProvenanceSpan("op:1", 4, 1),
        SampledProvenanceSpan("op:1", 0, 1),
    ]
    for loss in (losses.ppo(), losses.stable_reinforce()):
        sent = loss.datum(datum, 0.5)
        assert sent.loss_fn_inputs.keys() - {"weights"} == {
            *("target_tokens", "logprobs", "advantages", "sampling_temperature")
        }
        assert sent.loss_fn_input_spans == datum.loss_fn_input_spans
    assert "sampling_temperature" not in data_of(Rollout([turn([1], [2])]), 1.0)[0].loss_fn_inputs


def routes(first: int, count: int) -> Any:
    """Routes [tokens, 1 layer, 2 choices]: every token has experts of its own."""
    return np.arange(2 * first, 2 * (first + count), dtype=np.uint16).reshape(count, 1, 2)


def test_each_token_goes_where_it_went_when_it_was_drawn_or_first_read() -> None:
    """Of the tokens 10 and 11 the second turn was first to read 11: it was drawn last, so nothing had read it."""
    one = Turn((1, 2), (10, 11), (-1.0, -1.0), routed_experts=routes(0, 3))
    two = Turn((1, 2, 10, 11, 3), (12, 13), (-1.0, -1.0), routed_experts=routes(50, 6))
    [datum] = data_of(Rollout([one, two]), 1.0)
    told = datum.loss_fn_inputs["routed_experts"].to_numpy()
    assert told[:, 0, 0].tolist() == [0, 2, 4, 106, 108, 110]
    assert len(told) == datum.model_input.length
    for loss in (losses.ppo(), losses.icepop()):
        assert "routed_experts" in loss.datum(datum, 0.5).loss_fn_inputs
    for turns in ([one, Turn(two.prompt, two.tokens, two.logprobs)], [Turn(one.prompt, one.tokens, one.logprobs), two]):
        assert "routed_experts" not in data_of(Rollout(turns), 1.0)[0].loss_fn_inputs


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}], ids=str)
def test_what_was_drawn_after_a_cut_is_refused_by_name(cut: dict[str, Any]) -> None:
    (name,) = cut
    with pytest.raises(ValueError, match=f"drawn with {name}="):
        data_of(Rollout([Turn((1,), (2,), (-1.0,), **cut)]), 1.0)


def test_two_agents_that_take_turns_make_two_data() -> None:
    turns = [turn([1], [10], "a"), turn([2], [20], "b"), turn([1, 10, 3], [11], "a"), turn([2, 20, 4], [21], "b")]
    assert [joined.tokens for joined in join(turns)] == [[1, 10, 3, 11], [2, 20, 4, 21]]


def test_a_turn_joins_the_longest_that_it_extends() -> None:
    turns = [turn([1], [2]), turn([9], [9]), turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6]), turn([1, 7], [8])]
    assert [joined.tokens for joined in join(turns)] == [[1, 2, 3, 4, 5, 6], [9, 9], [1, 7, 8]]


def test_of_two_branches_the_one_that_was_gone_on_with_is_joined() -> None:
    turns = [turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3, 4], [5])]
    assert [joined.tokens for joined in join(turns)] == [[1, 2], [1, 2, 3, 4, 5]]


def test_the_same_prompt_twice_is_two_data() -> None:
    assert len(data_of(Rollout([turn([1], [2]), turn([1], [3])]), 1.0)) == 2


def test_a_turn_that_drew_no_token_is_no_datum() -> None:
    assert data_of(Rollout([turn([1, 2], [])]), 1.0) == []


def test_the_oldest_version_of_any_token() -> None:
    spans = (PolicySpan(4, 2), PolicySpan(5, 1))
    mixed = Turn((1,), (2, 3, 4), (-1.0, -1.0, -1.0), spans)
    assert Rollout([turn([1], [2], version=7), mixed]).oldest == 4
    assert Rollout([]).oldest is None
    rollouts = [Rollout([turn([1], [2], version=7)], 1.0), Rollout([mixed], 0.5), Rollout([])]
    group = Group("task", rollouts)
    assert (group.oldest, group.mean, group.sampled) == (4, 0.5, 4)
    assert Group("task", rollouts[2:]).oldest is None


def test_tokens_without_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens have 1"):
        Turn((1,), (2, 3), (-1.0,))
