from __future__ import annotations

import shutil
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

import pytest
from weft.wire.base import SEEDS
from weft.wire.binary.train_codec import decode_train_request, encode_train_request

from api.http import structure
from scheduler.journal.rows import plan_of
from scheduler.order.plans import SENT_AGAIN, Create, ForwardBackward, Slice
from tests.api.conftest import MODEL, PROTOBUF, World
from tests.api.data import batch, datum

ADAM = {"learning_rate": 1e-3}


class TestCreate:
    def test_the_id_is_the_one_that_clients_predict(self, world: World) -> None:
        session = world.session()
        body = {"session_id": session, "model_seq_id": 3, "base_model": MODEL, "lora_config": {"rank": 4, "seed": 9}}
        reply = world.post("create_model", body)
        assert reply["model_id"] == f"{session}:train:3"
        op = world.operation(reply["request_id"])
        plan = plan_of(op)
        assert isinstance(plan, Create)
        assert (op.kind, op.seq, plan.spec.seed, plan.spec.alpha) == ("create", 0, 9, 32.0)
        world.finish(reply["request_id"])
        assert world.outcome(reply["request_id"]).json() == {"model_id": reply["model_id"], "type": "create_model"}

    def test_a_repeat_is_the_same_run_even_without_a_seed(self, world: World) -> None:
        body = {"session_id": world.session(), "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        first = world.post("create_model", body)
        assert world.post("create_model", body) == first
        world.post(f"sessions/{body['session_id']}/finish", {"reason": {"type": "success"}, "detail": None})
        assert world.post("create_model", body) == first
        other = body | {"lora_config": {"rank": 8}}
        assert "next sequence number" in world.post("create_model", other, status=400)["detail"]

    @pytest.mark.parametrize(
        ("changes", "status", "says"),
        [
            ({"base_model": "nobody/nothing"}, 400, f"'nobody/nothing' is not served here; this server has {MODEL}"),
            ({"lora_config": {"rank": 17}}, 400, "1 to 16, got 17"),
            ({"lora_config": {"rank": 0}}, 422, "lora_config.rank"),
            (
                {"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}},
                422,
                "at least one",
            ),
            ({"lora_config": {"rank": 4, "seed": 2**63}}, 422, f"lora_config.seed: {SEEDS} (got {2**63})"),
            ({"optimizer_config": {"type": "sgd", "version": 1}}, 400, "'sgd'"),
            ({"model_seq_id": 2**31}, 400, "model_seq_id"),
            ({"session_id": "nowhere"}, 404, "no session 'nowhere'"),
            ({"session_id": "\0"}, 404, "no session"),
            ({"user_metadata": {"a": "x" * 17_000}}, 400, "user_metadata"),
        ],
    )
    def test_mistakes(self, world: World, changes: dict[str, Any], status: int, says: str) -> None:
        body = {"session_id": world.session(), "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        assert says in world.post("create_model", body | changes, status=status)["detail"]

    def test_info(self, world: World) -> None:
        run = world.run()
        info = world.post("get_info", {"model_id": run, "type": "get_info"})
        assert info["model_data"] == {"arch": "Qwen3MoeForCausalLM", "model_name": MODEL, "tokenizer_id": MODEL}
        assert (info["model_id"], info["is_lora"], info["lora_rank"]) == (run, True, 4)


class TestBatches:
    def test_the_body_is_kept_and_sliced_by_its_own_data(self, world: World) -> None:
        run = world.run()
        sent = batch(run, 1, [datum([1] * 6), datum([2] * 4), datum([3] * 5)])
        before = datetime.now(UTC)
        op = world.operation(world.train(sent)["request_id"])
        assert (op.kind, op.tokens) == ("forward_backward", 15)
        plan = plan_of(op)
        assert isinstance(plan, ForwardBackward)
        assert plan == ForwardBackward((Slice(0, 2, 10), Slice(2, 3, 5)), came_at=plan.came_at)
        assert plan.came_at is not None
        assert before <= plan.came_at <= op.accepted_at
        kept = decode_train_request(world.service.blobs.get(op.body_ref))
        assert [d.tokens.tolist() for d in kept.data] == [[1] * 6, [2] * 4, [3] * 5]

    def test_a_batch_that_was_sent_again_has_no_known_arrival_time(self, world: World) -> None:
        headers = {**PROTOBUF, "x-stainless-retry-count": "1"}  # in the words of Tinker's client
        body = encode_train_request(batch(world.run(), 1))
        op = world.operation(world.call("POST", "forward_backward", content=body, headers=headers).json()["request_id"])
        plan = plan_of(op)
        assert isinstance(plan, ForwardBackward)
        assert plan.came_at == SENT_AGAIN

    def test_forward_only_is_another_kind(self, world: World) -> None:
        reply = world.train(batch(world.run(), 1, forward_only=True))
        assert world.operation(reply["request_id"]).kind == "forward"

    def test_chunks_are_taken_in_any_order_and_repeats_are_the_same(self, world: World) -> None:
        run = world.run()
        ids = {seq: world.train(batch(run, seq))["request_id"] for seq in (2, 3, 1)}
        assert len(set(ids.values())) == 3
        assert world.train(batch(run, 2))["request_id"] == ids[2]
        other = world.train(batch(run, 2, [datum([9])]), status=400)
        assert "next sequence number" in other["detail"]

    def test_bad_data_fail_through_the_future_and_spend_their_number(self, world: World) -> None:
        run = world.run()
        bad = batch(run, 1, [datum([1]), datum([1, 100])])
        told = world.train(bad)
        assert "datum 1: model_input holds token 100" in told["refused"]
        assert world.error(told["request_id"]) == told["refused"]
        assert world.train(bad) == told  # also after an answer that was lost
        step = world.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": ADAM})
        reason = world.outcome(step["request_id"]).json()["queue_state_reason"]
        assert "has not arrived" not in reason
        good = world.train(batch(run, 3))
        assert world.train(batch(run, 3)) == good  # which is not told what failed before

    def test_what_is_too_large_fails_through_the_future_and_spends_its_number(self, world: World) -> None:
        """Tinker's client has counted the number, and all that it sends next would wait for it."""
        run = world.run()
        large = batch(run, 1, [datum([9] * 2_000), datum([9] * 2_000)])
        request_id = world.train(large)["request_id"]
        assert "larger than the limit of 20000 bytes" in world.error(request_id)
        assert world.train(large)["request_id"] == request_id
        many = encode_train_request(batch(run, 2)) + b"\x32\x00" * 100  # as many fields as a larger limit allows
        with patch.multiple(structure, HARMLESS_BYTES=100, MAX_FIELDS=50):
            reply = world.call("POST", "forward_backward", content=many, headers=PROTOBUF)
        assert "50 fields of protobuf" in world.error(reply.json()["request_id"])
        step = world.post("optim_step", {"model_id": run, "seq_id": 3, "adam_params": ADAM})
        reason = world.outcome(step["request_id"]).json()["queue_state_reason"]
        assert "has not arrived" not in reason

    def test_what_is_too_large_and_nobodys_is_refused_at_once(self, world: World) -> None:
        large = [datum([9] * 2_000), datum([9] * 2_000)]
        assert world.train(batch("nobody:train:0", 1, large), status=404)["detail"]
        reply = world.call("POST", "forward_backward", content=b"\x1a" + bytes(30_000), headers=PROTOBUF)
        assert reply.status_code == 413

    @pytest.mark.parametrize(
        ("content", "headers", "status"),
        [
            (b"{}", {"content-type": "application/json"}, 422),
            (b"{}", {"content-type": "text/plain"}, 415),
            (b"\x0a\xff\xff", PROTOBUF, 400),
            (b"", PROTOBUF, 400),
        ],
    )
    def test_what_is_no_batch(self, world: World, content: bytes, headers: dict[str, str], status: int) -> None:
        reply = world.call("POST", "forward_backward", content=content, headers=headers)
        assert reply.status_code == status
        assert reply.json()["detail"]

    def test_number_zero_is_out_of_range(self, world: World) -> None:
        assert "seq_id" in world.train(batch(world.run(), 0), status=400)["detail"]

    def test_sparse_claims_are_bounded_before_they_are_unfolded(self, world: World) -> None:
        from weft.wire.binary import weft_wire_pb2 as pb

        run = world.run()
        message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
        for _ in range(4):
            tensor = message.data.add().loss_fn_inputs["weights"]
            tensor.sparse_csr.values = b""
            tensor.dtype = pb.DTYPE_FLOAT32
            tensor.shape.extend([1, 2**25])
        content = message.SerializeToString()
        reply = world.call("POST", "forward_backward", content=content, headers=PROTOBUF)
        assert "unfold" in world.error(reply.json()["request_id"])


class TestSteps:
    @pytest.mark.parametrize(
        ("changes", "status", "says"),
        [
            ({"adam_params": None, "optimizer_params": {"type": "dimuon", "learning_rate": 1}}, 400, "is adamw"),
            ({"adam_params": None}, 422, "adam_params"),
            ({"adam_params": {"learning_rate": -1}}, 422, "adam_params.learning_rate"),
            ({"adam_params": {"learning_rate": "NaN"}}, 422, "adam_params.learning_rate"),
            ({"adam_params": {"beta1": 1.0}}, 422, "adam_params.beta1"),
            ({"adam_params": {"eps": 0}}, 400, "adam_params.eps"),
            ({"adam_params": {"eps": 1e-24}}, 400, "adam_params.eps"),
            ({"adam_params": {"grad_clip_norm": -1}}, 422, "adam_params.grad_clip_norm"),
            ({"adam_params": {"learning_rate": 1e30}}, 400, "adam_params.learning_rate: must be at most 1e+18"),
            ({"adam_params": {"weight_decay": 1e30}}, 400, "adam_params.weight_decay: must be at most 1e+18"),
            (
                {"adam_params": {"learning_rate": 1.0, "weight_decay": 2.1}},
                400,
                "weight_decay: must be at most 2 / learning_rate",
            ),
            ({"adam_params": {"lr": 1}}, 422, "adam_params.lr"),
        ],
    )
    def test_mistakes_are_told_at_once_and_spend_their_number(
        self, world: World, changes: dict[str, Any], status: int, says: str
    ) -> None:
        run = world.run()
        body = {"model_id": run, "seq_id": 1, "adam_params": ADAM, "type": "optim_step"} | changes
        body = {name: value for name, value in body.items() if value is not None}
        refused = world.post("optim_step", body, status=status)
        assert says in refused["detail"]
        assert says in world.error(refused["request_id"])
        fine = world.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": ADAM})
        assert "has not arrived" not in world.outcome(fine["request_id"]).json()["queue_state_reason"]

    @pytest.mark.parametrize("changes", [{"seq_id": None}, {"model_id": None}, {"seq_id": "soon"}])
    def test_without_an_address_there_is_no_number_to_spend(self, world: World, changes: dict[str, Any]) -> None:
        body = {"model_id": world.run(), "seq_id": 1, "adam_params": ADAM} | changes
        world.post("optim_step", {k: v for k, v in body.items() if v is not None}, status=422)

    def test_a_run_whose_session_has_ended_takes_no_more(self, world: World) -> None:
        session = world.session()
        run = world.run(session)
        world.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        reply = world.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": ADAM}, status=400)
        assert "ended" in reply["detail"]

    @pytest.mark.parametrize("route", ["optim_step", "save_weights", "save_weights_for_sampler"])
    def test_a_run_whose_model_is_not_served_any_more_is_told_so(self, world: World, route: str) -> None:
        """The server was started again with other models, so no trainer will ever take the run's work."""
        run = world.run()
        body = {"model_id": run, "seq_id": 1, **({"adam_params": ADAM} if route == "optim_step" else {"path": "x"})}
        with patch.dict(world.service.cards, {"other": world.service.cards[MODEL]}, clear=True):
            refused = world.post(route, body, status=400)
        assert f"{MODEL!r} is not served here; this server has other" in refused["detail"]
        assert world.error(refused["request_id"]) == refused["detail"]

    def test_a_full_queue_is_429(self, world: World) -> None:
        run = world.run()
        for seq in range(1, 50):
            world.post("optim_step", {"model_id": run, "seq_id": seq, "adam_params": ADAM})
        full = world.call("POST", "optim_step", json={"model_id": run, "seq_id": 50, "adam_params": ADAM})
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert "limit is 50" in full.json()["detail"]

    def test_a_stopping_server_is_503(self, world: World) -> None:
        run = world.run()
        world.service.journal.draining = True
        world.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": ADAM}, status=503)

    def test_a_full_disk_is_503_until_there_is_room(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        step = {"model_id": world.run(), "seq_id": 1, "adam_params": ADAM}
        monkeypatch.setattr("store.blobs.room.LOOK_EVERY_S", 0.0)
        with monkeypatch.context() as full:
            usage = shutil.disk_usage("/")
            full.setattr("shutil.disk_usage", lambda _path: usage._replace(free=1 << 20))
            refused = world.post("optim_step", step, status=503)
        assert refused["code"] == "cannot_store"
        assert "disk is nearly full (1 MiB free" in refused["detail"]
        world.post("optim_step", step)
