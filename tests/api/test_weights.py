from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from scheduler.journal.rows import plan_of
from scheduler.order.plans import Create, Load, Source
from tests.api.conftest import MODEL, World


class TestSaving:
    def test_a_named_save(self, world: World) -> None:
        run = world.run()
        body = {"model_id": run, "seq_id": 1, "path": "one", "ttl_seconds": 3600, "user_metadata": {"a": "b"}}
        request_id = world.post("save_weights", body)["request_id"]
        world.finish(request_id, size_bytes=7)
        assert world.outcome(request_id).json()["path"] == f"tinker://{run}/weights/one"
        (saved,) = world.get(f"training_runs/{run}/checkpoints")["checkpoints"]
        assert (saved["checkpoint_id"], saved["checkpoint_type"], saved["size_bytes"]) == ("weights/one", "training", 7)
        assert saved["user_metadata"] == {"a": "b"}
        assert saved["expires_at"] is not None

    def test_without_a_name_it_gets_one(self, world: World) -> None:
        run = world.run()
        request_id = world.post("save_weights", {"model_id": run, "seq_id": 1})["request_id"]
        world.finish(request_id)
        assert world.outcome(request_id).json()["path"] == f"tinker://{run}/weights/auto-1"

    def test_a_name_taken_is_final_and_not_retried(self, world: World) -> None:
        run = world.run()
        world.checkpoint(run, 1, "one")
        request_id = world.post("save_weights", {"model_id": run, "seq_id": 2, "path": "one"})["request_id"]
        world.finish(request_id)
        assert "exists already" in world.error(request_id)
        request_id = world.post("save_weights", {"model_id": run, "seq_id": 3, "path": "one", "overwrite": True})[
            "request_id"
        ]
        world.finish(request_id)
        assert "path" in world.outcome(request_id).json()

    def test_an_unnamed_sampler(self, world: World) -> None:
        session = world.session()
        run = world.run(session)
        body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
        first = world.post("save_weights_for_sampler", body)
        world.finish(first["request_id"])
        outcome = world.outcome(first["request_id"]).json()
        assert outcome["sampling_session_id"] == f"{session}:sample:0"
        assert "path" not in outcome
        assert world.post("save_weights_for_sampler", body) == first
        taken = world.post("save_weights_for_sampler", body | {"seq_id": 2}, status=400)
        assert "0 is taken" in taken["detail"]

    def test_a_number_that_is_being_saved_is_taken_too(self, world: World) -> None:
        run = world.run()
        body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 5}
        world.post("save_weights_for_sampler", body)
        world.post("save_weights_for_sampler", body | {"seq_id": 2}, status=400)

    @pytest.mark.parametrize("path", ["save_weights", "save_weights_for_sampler"])
    @pytest.mark.parametrize(
        "changes",
        [{"path": "a/b"}, {"path": ".."}, {"path": ""}, {"ttl_seconds": 60}, {"user_metadata": {"a": 1}}, {"x": 1}],
    )
    def test_mistakes(self, world: World, path: str, changes: dict[str, Any]) -> None:
        body = {"model_id": world.run(), "seq_id": 1, "path": "one"} | changes
        reply = world.call("POST", path, json=body)
        assert reply.status_code in (400, 422)
        assert next(iter(changes)) in reply.json()["detail"]

    def test_a_named_sampler_is_a_snapshot(self, world: World) -> None:
        body = {"model_id": world.run(), "seq_id": 1, "path": "one", "kind": "inflight"}
        assert "snapshot" in world.post("save_weights_for_sampler", body, status=400)["detail"]


class TestLoading:
    def test_into_a_new_run_with_the_shape_of_the_old_one(self, world: World) -> None:
        session = world.session()
        path = world.checkpoint(world.run(session, lora_config={"rank": 6, "train_mlp": False}), 1)
        body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True, "type": "load_weights"}
        reply = world.post("load_weights", body)
        run = f"{session}:train:1"
        assert reply["model_id"] == run
        op = world.operation(reply["request_id"])
        plan = plan_of(op)
        assert isinstance(plan, Create)
        assert (op.kind, op.seq, plan.source) == ("create", 0, Source(ANY, path, with_optimizer=True))
        assert (plan.spec.rank, plan.spec.train_mlp) == (6, False)
        world.finish(reply["request_id"])
        assert world.outcome(reply["request_id"]).json() == {"path": path, "model_id": run, "type": "load_weights"}
        assert world.post("get_info", {"model_id": run})["lora_rank"] == 6
        world.call(
            "DELETE", f"training_runs/{path.removeprefix('tinker://').replace('/weights', '/checkpoints/weights')}"
        )
        assert world.post("load_weights", body) == reply

    def test_in_place(self, world: World) -> None:
        run = world.run()
        path = world.checkpoint(run, 1)
        reply = world.post("load_weights", {"model_id": run, "seq_id": 2, "path": path, "optimizer": False})
        op = world.operation(reply["request_id"])
        assert (op.kind, plan_of(op)) == ("load_state", Load(Source(ANY, path, with_optimizer=False)))

    def test_in_place_needs_the_same_shape(self, world: World) -> None:
        path = world.checkpoint(world.run(), 1)
        other = world.run(lora_config={"rank": 8})
        reply = world.post(
            "load_weights", {"model_id": other, "seq_id": 1, "path": path, "optimizer": False}, status=400
        )
        assert "rank 4, this model has 8" in reply["detail"]

    @pytest.mark.parametrize(
        ("changes", "status", "says"),
        [
            ({"path": "tinker://s:train:0/weights/none"}, 404, "no checkpoint"),
            ({"path": "tinker://s:train:0/sampler_weights/one"}, 400, "save_state"),
            ({"path": "weights/one"}, 400, "tinker://"),
            ({"base_model": "other"}, 400, MODEL),
            ({"optimizer_config": {"type": "sgd"}}, 400, "sgd"),
            ({"optimizer_config": {"type": "dimuon"}, "optimizer": True}, 400, "state of adamw, the model uses dimuon"),
            ({"model_seq_id": None}, 422, "model_seq_id"),
        ],
    )
    def test_mistakes(self, world: World, changes: dict[str, Any], status: int, says: str) -> None:
        session = world.session()
        path = world.checkpoint(world.run(session), 1)
        body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False} | changes
        body = {name: value for name, value in body.items() if value is not None}
        assert says in world.post("load_weights", body, status=status)["detail"]

    def test_weights_info(self, world: World) -> None:
        path = world.checkpoint(world.run(), 1)
        info = world.post("weights_info", {"tinker_path": path})
        assert (info["base_model"], info["is_lora"], info["lora_rank"], info["train_attn"]) == (MODEL, True, 4, True)


def test_nothing_of_another_organisation_is_there(world: World) -> None:
    """A foreign id gets exactly the answer that an unknown one gets."""
    session = world.session()
    run = world.run(session)
    path, sampler_path = world.checkpoint(run, 1), world.checkpoint(run, 2, sampler=True)
    own = world.session(world.other_key)
    asked: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "get_info", {"model_id": run}),
        ("POST", "optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}}),
        ("POST", "save_weights", {"model_id": run, "seq_id": 3}),
        ("POST", "load_weights", {"model_id": run, "seq_id": 3, "path": path, "optimizer": False}),
        ("POST", "load_weights", {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": False}),
        ("POST", "create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL}),
        ("POST", "weights_info", {"tinker_path": path}),
        (
            "POST",
            "create_sampling_session",
            {"session_id": own, "sampling_session_seq_id": 0, "model_path": sampler_path},
        ),
        ("POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}),
        ("POST", "session_heartbeat", {"session_id": session}),
        ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}),
        ("GET", f"sessions/{session}", None),
        ("GET", f"training_runs/{run}", None),
        ("GET", f"training_runs/{run}/checkpoints", None),
        ("DELETE", f"training_runs/{run}/checkpoints/weights/one", None),
        ("PUT", f"training_runs/{run}/checkpoints/weights/one/ttl", {"ttl_seconds": None}),
        ("GET", f"weft/usage?run_id={run}", None),
    ]
    for method, route, body in asked:
        foreign = world.call(method, route, key=world.other_key, json=body)
        assert foreign.status_code == 404, (method, route, foreign.text)
        assert foreign.json()["code"] == "not_found"
    assert world.get("training_runs", key=world.other_key)["training_runs"] == []
    assert world.get("checkpoints", key=world.other_key)["checkpoints"] == []
    assert world.get("sessions", key=world.other_key)["sessions"] == [own]
    assert world.get(f"training_runs/{run}/checkpoints")["checkpoints"]
