from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.journal.rows import plan_of
from scheduler.order.plans import Sample
from tests.api.conftest import MODEL, World

PARAMS = {"max_tokens": 5, "temperature": 1.0}


def sampler(world: World, session: str, number: int = 0, **of: Any) -> str:
    body = {"session_id": session, "sampling_session_seq_id": number, "type": "create_sampling_session"}
    return str(world.post("create_sampling_session", body | (of or {"base_model": MODEL}))["sampling_session_id"])


def sample(sampler_id: str, seq: int = 0, **changes: Any) -> dict[str, Any]:
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": PARAMS,
        "num_samples": 2,
        "type": "sample",
    }
    return body | changes


class TestSamplers:
    def test_a_sampler_of_a_base_model(self, world: World) -> None:
        session = world.session()
        sampler_id = sampler(world, session)
        assert sampler_id == f"{session}:sample:0"
        assert sampler(world, session) == sampler_id
        assert world.get(f"samplers/{sampler_id}") == {
            "sampler_id": sampler_id,
            "base_model": MODEL,
            "model_path": None,
        }

    def test_a_sampler_of_saved_weights(self, world: World) -> None:
        session = world.session()
        path = world.checkpoint(world.run(session), 1, sampler=True)
        sampler_id = sampler(world, session, 1, model_path=path)
        assert world.get(f"samplers/{sampler_id}")["model_path"] == path

    @pytest.mark.parametrize(
        ("of", "status", "says"),
        [
            ({"base_model": "other"}, 400, MODEL),
            ({}, 400, "give one"),
            ({"model_path": "tinker://s:train:0/sampler_weights/none"}, 404, "no checkpoint"),
            ({"model_path": "tinker://s:train:0/weights/one"}, 400, "save_weights_for_sampler"),
            ({"model_path": "elsewhere"}, 400, "tinker://"),
        ],
    )
    def test_mistakes(self, world: World, of: dict[str, Any], status: int, says: str) -> None:
        body = {"session_id": world.session(), "sampling_session_seq_id": 0} | of
        assert says in world.post("create_sampling_session", body, status=status)["detail"]

    def test_a_number_names_one_sampler(self, world: World) -> None:
        session = world.session()
        path = world.checkpoint(world.run(session), 1, sampler=True)
        sampler(world, session, 0)
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        assert "next number" in world.post("create_sampling_session", body, status=400)["detail"]


class TestSamples:
    def test_a_sequence_id_for_each_sample_and_a_repeat_is_the_same(self, world: World) -> None:
        sampler_id = sampler(world, world.session())
        first = world.post("asample", sample(sampler_id, seq=10**18))
        assert len(set(first["sample_sequence_ids"])) == 2
        assert world.post("asample", sample(sampler_id, seq=10**18)) == first
        other = world.post("asample", sample(sampler_id, seq=10**18, num_samples=1), status=400)
        assert "already submitted" in other["detail"]

    def test_the_body_says_how_many_tokens_there_will_be(self, world: World) -> None:
        sampler_id = sampler(world, world.session())
        params = {"stop": [], "temperature": 0.5}
        request_id = world.post("asample", sample(sampler_id, sampling_params=params))["request_id"]
        op = world.operation(request_id)
        kept = json.loads(op.body or "")
        assert kept["sampling_params"]["max_tokens"] == 14
        assert kept["sampling_params"]["stop"] == []
        assert (op.kind, op.tokens, plan_of(op)) == ("sample", 3 + 2 * 14, Sample(2, 3, "interactive"))

    def test_a_streamed_sample_has_a_seed(self, world: World) -> None:
        """Another generator that is given the sample draws the same tokens; each sample has its own seed."""
        sampler_id, seeds = sampler(world, world.session()), set()
        for seq, fields in enumerate([{"stream": True}, {"stream": True}, {}]):
            op = world.operation(world.post("asample", sample(sampler_id, seq, **fields))["request_id"])
            seeds.add(json.loads(op.body or "")["sampling_params"].get("seed"))
        assert (len(seeds), None in seeds) == (3, True)
        given = sample(sampler_id, 3, sampling_params=PARAMS | {"seed": 5}, stream=True)
        op = world.operation(world.post("asample", given)["request_id"])
        assert json.loads(op.body or "")["sampling_params"]["seed"] == 5

    def test_a_prompt_too_large_for_the_event_loop(self, world: World) -> None:
        """It is parsed and checked in a thread, and refused all the same."""
        sampler_id = sampler(world, world.session())
        chunk = {"type": "encoded_text", "tokens": [1] * 5000}
        reply = world.post("asample", sample(sampler_id, prompt={"chunks": [chunk]}), status=400)
        assert "5000 tokens" in reply["detail"]

    @pytest.mark.parametrize(
        ("changes", "status", "says"),
        [
            ({"sampling_session_id": None}, 400, "sampling_session_id"),
            ({"sampling_session_id": "unknown"}, 404, "unknown"),
            ({"seq_id": None}, 400, "seq_id"),
            ({"seq_id": -1}, 422, "seq_id"),
            ({"sampling_params": {"temperature": -1}}, 422, "sampling_params.temperature"),
            (
                {"sampling_params": {"temperature": 1e-320}},
                400,
                "sampling_params.temperature: must be 0 (greedy) or at",
            ),
            ({"sampling_params": {"max_tokens": -1}}, 422, "sampling_params.max_tokens"),
            ({"sampling_params": {"top_p": 0}}, 422, "sampling_params.top_p"),
            ({"num_samples": 0}, 422, "num_samples"),
            ({"num_samples": 5}, 400, "got 5"),
            ({"prompt": {"chunks": [{"type": "image", "data": "aa", "format": "png"}]}}, 400, "image"),
            ({"prompt": {"chunks": [{"type": "video"}]}}, 422, "video"),
            ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, 422, "tokens.0"),
        ],
    )
    def test_mistakes(self, world: World, changes: dict[str, Any], status: int, says: str) -> None:
        body = sample(sampler(world, world.session())) | changes
        body = {name: value for name, value in body.items() if value is not None}
        assert says in world.post("asample", body, status=status)["detail"]

    def test_foreign_samplers_are_not_there(self, world: World) -> None:
        sampler_id = sampler(world, world.session())
        world.post("asample", sample(sampler_id), key=world.other_key, status=404)
        world.get(f"samplers/{sampler_id}", key=world.other_key, status=404)


class TestFutures:
    def test_pending_is_408_with_a_body(self, world: World) -> None:
        request_id = world.post("asample", sample(sampler(world, world.session())))["request_id"]
        reply = world.outcome(request_id)
        assert reply.status_code == 408
        assert (reply.json()["type"], reply.json()["request_id"]) == ("try_again", request_id)
        assert reply.json()["queue_state"] == "active"

    def test_a_result_is_protobuf(self, world: World) -> None:
        request_id = world.post("asample", sample(sampler(world, world.session())))["request_id"]
        world.finish(request_id, b"\x0a\x00", prefill=3, sample=4)
        reply = world.outcome(request_id)
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-protobuf")
        assert reply.content == b"\x0a\x00"
        assert world.outcome(request_id).content == b"\x0a\x00"

    @pytest.mark.parametrize("request_id", ["unknown", "", "\0", "x" * 1000])
    def test_unknown(self, world: World, request_id: str) -> None:
        assert world.outcome(request_id).status_code == 404
        world.post("cancel_future", {"request_id": request_id}, status=404)

    def test_foreign(self, world: World) -> None:
        request_id = world.post("asample", sample(sampler(world, world.session())))["request_id"]
        assert world.outcome(request_id, key=world.other_key).status_code == 404
        world.post("cancel_future", {"request_id": request_id}, key=world.other_key, status=404)

    def test_cancel(self, world: World) -> None:
        request_id = world.post("asample", sample(sampler(world, world.session())))["request_id"]
        assert world.post("cancel_future", {"request_id": request_id}) == {"cancelled": True}
        world.finish(request_id)
        assert world.post("cancel_future", {"request_id": request_id}) == {"cancelled": False}

    def test_a_stopping_server_answers_every_poll_at_once(self, world: World) -> None:
        request_id = world.post("asample", sample(sampler(world, world.session())))["request_id"]
        world.service.polls.release()
        reply = world.outcome(request_id)
        assert reply.status_code == 408
        assert "restarting" in reply.json()["queue_state_reason"]
