from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import CONTEXT, MODEL, World
from tests.api.data import batch
from workers.model.tiny import TINY_PATH


def test_start_up(world: World) -> None:
    """The first requests of every client, in its order."""
    assert world.http.get("/api/v1/healthz").json() == {"status": "ok"}
    config = world.post("client/config", {"sdk_version": "0.38.0"})
    assert config["custom_loss_server_side"] is True
    assert config["fwdbwd_max_chunk_len"] == 8
    assert world.post("client/dynamic_config", {"sdk_version": "0.38.0"})["sample_cancel_enabled"] is True
    (model,) = world.get("get_server_capabilities")["supported_models"]
    assert (model["model_name"], model["max_context_length"]) == (MODEL, CONTEXT)
    assert world.post("telemetry", {"events": []}) == {"status": "accepted"}


class TestListings:
    def test_runs_come_in_pages(self, world: World) -> None:
        session = world.session()
        runs = [world.run(session, number) for number in range(3)]
        page = world.get("training_runs?limit=2&offset=0")
        assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
        rest = world.get("training_runs?limit=2&offset=2")
        listed = [run["training_run_id"] for run in page["training_runs"] + rest["training_runs"]]
        assert listed == runs[::-1]

    def test_a_run_with_its_latest_checkpoints(self, world: World) -> None:
        run = world.run(user_metadata={"a": 1})
        world.checkpoint(run, 1, "early")
        world.checkpoint(run, 2, "late")
        world.checkpoint(run, 3, "s", sampler=True)
        found = world.get(f"training_runs/{run}")
        assert found["last_checkpoint"]["checkpoint_id"] == "weights/late"
        assert found["last_sampler_checkpoint"]["tinker_path"] == f"tinker://{run}/sampler_weights/s"
        assert (found["model_owner"], found["lora_rank"], found["user_metadata"]) == ("acme", 4, {"a": "1"})
        assert world.get("checkpoints?limit=2")["cursor"]["total_count"] == 3

    def test_project(self, world: World) -> None:
        session = world.post("create_session", {"tags": [], "sdk_version": "1", "project_id": "p"})["session_id"]
        run = world.run(session)
        world.run()
        assert [r["training_run_id"] for r in world.get("training_runs?project_id=p")["training_runs"]] == [run]

    @pytest.mark.parametrize("query", ["limit=0", "limit=1001", "offset=-1", "limit=x", "access_scope=all"])
    def test_mistakes(self, world: World, query: str) -> None:
        assert query.split("=")[0] in world.get(f"training_runs?{query}", status=422)["detail"]


class TestCheckpoints:
    def test_delete_takes_row_and_files(self, world: World) -> None:
        run = world.run()
        world.checkpoint(run, 1)
        with world.database.read() as session:
            from store.tables import Checkpoint

            ref = session.query(Checkpoint).one().ref
        world.service.blobs.put(f"{ref}/state.safetensors", b"x")
        route = f"training_runs/{run}/checkpoints/weights/one"
        assert world.call("DELETE", route).is_success
        assert not world.service.blobs.exists(ref)
        assert world.call("DELETE", route).status_code == 404

    def test_files_that_a_sampler_reads_stay(self, world: World) -> None:
        session = world.session()
        run = world.run(session)
        path = world.checkpoint(run, 1, sampler=True)
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        world.post("create_sampling_session", body)
        with world.database.read() as reading:
            from store.tables import Checkpoint

            ref = reading.query(Checkpoint).one().ref
        world.service.blobs.put(f"{ref}/adapter.safetensors", b"x")
        assert world.call("DELETE", f"training_runs/{run}/checkpoints/sampler_weights/one").is_success
        assert world.service.blobs.exists(ref)

    def test_lives(self, world: World) -> None:
        run = world.run()
        world.checkpoint(run, 1)
        route = f"training_runs/{run}/checkpoints/weights/one/ttl"
        assert world.call("PUT", route, json={"ttl_seconds": 7200}).json()["expires_at"] is not None
        assert world.call("PUT", route, json={"ttl_seconds": None}).json()["expires_at"] is None
        assert world.call("PUT", route, json={"ttl_seconds": 5}).status_code == 400
        assert world.call("PUT", route, json={}).status_code == 422
        assert world.call("PUT", route.replace("one", "none"), json={"ttl_seconds": None}).status_code == 404

    @pytest.mark.parametrize("kind", ["optimizer"])
    def test_unknown_kinds(self, world: World, kind: str) -> None:
        assert world.call("DELETE", f"training_runs/s:train:0/checkpoints/{kind}/one").status_code == 400


class TestWeft:
    def test_tokenizers_of_models_with_slashes_and_colons(self, world: World) -> None:
        files = world.get(f"weft/models/{MODEL}/tokenizer")["files"]
        content = (TINY_PATH / "tokenizer.json").read_bytes()
        assert files["tokenizer.json"] == hashlib.sha256(content).hexdigest()
        assert not any("safetensors" in name for name in files)
        assert world.call("GET", f"weft/models/{MODEL}/tokenizer/tokenizer.json").content == content

    def test_chat_templates_beside_the_models_own(self, world: World, tmp_path: Path) -> None:
        card = world.service.cards[MODEL]
        folder = shutil.copytree(card.path, tmp_path / "model") / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text("{{ tools }}")
        (folder / "x.py").write_text("")
        object.__setattr__(world.service, "cards", {MODEL: replace(card, path=folder.parent)})
        route = f"weft/models/{MODEL}/tokenizer"
        assert world.get(route)["templates"] == {"tool_use.jinja": hashlib.sha256(b"{{ tools }}").hexdigest()}
        assert world.call("GET", f"{route}/additional_chat_templates/tool_use.jinja").content == b"{{ tools }}"
        for name in ("additional_chat_templates/x.py", "tool_use.jinja", "additional_chat_templates/"):
            assert world.call("GET", f"{route}/{name}").status_code == 404

    @pytest.mark.parametrize(
        "route",
        [
            "other/model/tokenizer",
            "other/model/tokenizer/tokenizer.json",
            f"{MODEL}/tokenizer/model.safetensors",
            f"{MODEL}/tokenizer/..%2f..%2fconfig.json",
            f"{MODEL}/tokenizer/%2e%2e",
        ],
    )
    def test_nothing_else_of_the_folder_is_given_out(self, world: World, route: str) -> None:
        assert world.call("GET", f"weft/models/{route}").status_code == 404

    def test_usage(self, world: World) -> None:
        run = world.run()
        request_id = world.train(batch(run, 1))["request_id"]
        world.finish(request_id, b"x", tokens=3)
        for query in ("", f"?run_id={run}"):
            usage = world.get(f"weft/usage{query}")
            (row,) = usage["rows"]
            assert (row["run_id"], row["kind"], row["base_model"], row["tokens"]) == (run, "train", MODEL, 3)
            assert usage["total_nusd"] == row["amount_nusd"] == 1200
            assert usage["total_usd"] == row["amount_usd"] == "0.000001200"
            assert usage["price_version"]
        assert world.get("weft/usage", key=world.other_key)["rows"] == []


def test_statistics_say_nothing_about_faults_of_the_machines(world: World) -> None:
    """Every tenant reads them: a worker's death is for the operator, and would help whoever tries to cause it."""
    told: dict[str, Any] = {
        "trainer": {"passes": 3, "lost": 2},
        "generator": {"steps": 4, "lost": 1},
        "workers": [{"role": "trainer", "attached": True, "restarts": 2, "last_exit": "was killed by SIGSEGV"}],
    }
    world.http.app.state.service = replace(world.service, stats=lambda: told)  # type: ignore[attr-defined]
    queue = {"open": 0, "running": 0, "runs": 0}
    assert world.get("weft/stats") == {"queue": queue, "trainer": {"passes": 3}, "generator": {"steps": 4}}
    assert told["trainer"]["lost"] == 2
