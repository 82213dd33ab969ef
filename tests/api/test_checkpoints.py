"""Checkpoints over HTTP; the test puts a trainer's files where the trainer would."""

from __future__ import annotations

import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyrage
import pytest
from safetensors.numpy import load, save_file

from api.http.archives import make_archive
from scheduler.journal.rows import plan_of
from scheduler.order.plans import Save
from store import tables
from store.blobs.bucket import Bucket
from store.blobs.contract import StoreAway
from store.blobs.folder import FolderBlobs
from store.blobs.objects import ObjectBlobs
from tests.api.conftest import MODEL, World

AGE_KEY = str(pyrage.x25519.Identity.generate().to_public())
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice@rust"


def folders(world: World) -> FolderBlobs:
    assert isinstance(world.service.blobs, FolderBlobs)
    return world.service.blobs


def folder_of(world: World, path: str) -> Path:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    with world.database.read() as session:
        row = session.query(tables.Checkpoint).filter_by(run_id=run_id, kind=kind, name=name).one()
    folder = folders(world).path(row.ref)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def route(path: str) -> str:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run_id}/checkpoints/{kind}/{name}"


def exported(world: World, run: str, seq: int = 1, name: str = "out") -> str:
    request_id = world.post("save_weights_external", {"model_id": run, "seq_id": seq, "path": name})["request_id"]
    world.finish(request_id, size_bytes=9)
    outcome = world.outcome(request_id).json()
    assert outcome["size_bytes"] == 9
    folder = folder_of(world, outcome["path"])
    (folder / "peft").mkdir()
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "peft" / "adapter_model.safetensors").write_bytes(b"12345")
    return str(outcome["path"])


class TestExternalWeights:
    def test_a_link_for_each_file(self, world: World) -> None:
        path = exported(world, world.run())
        assert path.endswith("/external_weights/out")
        reply = world.get(f"{route(path)}/external_weights_urls")
        assert sorted(reply["urls"]) == ["adapter_config.json", "peft/adapter_model.safetensors"]
        expires = datetime.fromisoformat(reply["expires"])
        assert timedelta(minutes=59) < expires - datetime.now(UTC) <= timedelta(hours=1)
        fetched = world.http.get(reply["urls"]["peft/adapter_model.safetensors"])
        assert (fetched.content, fetched.headers["content-length"]) == (b"12345", "5")
        assert fetched.headers["x-content-type-options"] == "nosniff"  # of the console's origin, and no script of it

    def test_links_are_worth_nothing_changed_or_for_what_is_gone(self, world: World) -> None:
        path = exported(world, world.run())
        urls = world.get(f"{route(path)}/external_weights_urls")["urls"]
        url = urls["adapter_config.json"]
        other = urls["peft/adapter_model.safetensors"].split("?")[0] + "?" + url.split("?")[1]
        for changed in (url[:-1] + ("0" if url[-1] != "0" else "1"), url.split("?")[0], other, url + "&expires=9"):
            assert world.http.get(changed).status_code == 403
        world.call("DELETE", route(path))
        assert world.http.get(url).status_code == 404
        assert not folders(world).exists("weights") or not list(folders(world).path("weights").iterdir())

    def test_only_exports_have_links_and_only_for_their_owner(self, world: World) -> None:
        run = world.run()
        saved, path = world.checkpoint(run, 1), exported(world, run, 2)
        assert "external" in world.get(f"{route(saved)}/external_weights_urls", status=400)["detail"]
        world.post(f"{route(path)}/publish")
        world.get(f"{route(path)}/external_weights_urls", key=world.other_key, status=404)

    def test_what_is_planned(self, world: World) -> None:
        body = {"model_id": world.run(), "seq_id": 1, "path": "x", "age_encryption_recipients": [AGE_KEY, SSH_KEY]}
        op = world.operation(world.post("save_weights_external", body)["request_id"])
        assert (op.kind, plan_of(op)) == ("save_external", Save("external_weights", "x"))

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"age_encryption_recipients": [AGE_KEY, "age1nonsense"]}, "age_encryption_recipients[1]"),
            ({"age_encryption_recipients": ["ssh-rsa AAAA"]}, "age_encryption_recipients[0]"),
            ({"age_encryption_recipients": [AGE_KEY] * 11}, "age_encryption_recipients"),
            ({"path": "a/b"}, "path"),
            ({"path": "n" * 257}, "path"),
            ({"ttl_seconds": 5}, "ttl_seconds"),
        ],
    )
    def test_mistakes_spend_their_number(self, world: World, changes: dict[str, Any], says: str) -> None:
        run = world.run()
        reply = world.call("POST", "save_weights_external", json={"model_id": run, "seq_id": 1, "path": "x"} | changes)
        assert reply.status_code in (400, 422)
        assert says in reply.json()["detail"]
        following = world.post("save_weights", {"model_id": run, "seq_id": 2, "path": "n" * 256})["request_id"]
        assert "has not arrived" not in world.outcome(following).json()["queue_state_reason"]

    def test_a_run_goes_on_from_it_without_an_optimizer(self, world: World) -> None:
        session = world.session()
        path = exported(world, world.run(session))
        body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        told = world.post("load_weights", body, status=400)["detail"]
        assert "training state; load one that save_state has made" in told
        world.post("load_weights", body | {"optimizer": False})


class TestArchive:
    def test_older_clients_are_sent_to_a_tar_of_an_export(self, world: World) -> None:
        path = world.checkpoint(world.run(), 1)
        folder = folder_of(world, path)
        tensors = {"unembed_A": np.ones((4, 8), np.float32), "unembed_B": np.ones((100, 4), np.float32)}
        save_file(tensors, folder / "adapter.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"base_model": MODEL, "rank": 4, "alpha": 32.0}))
        for _ in range(2):  # the archive exists already
            reply = world.call("GET", f"{route(path)}/archive", follow_redirects=False)
            assert reply.status_code == 302
            assert reply.headers["expires"].endswith("GMT")
            fetched = world.http.get(reply.headers["location"])
            assert int(fetched.headers["content-length"]) == len(fetched.content)
        with tarfile.open(fileobj=io.BytesIO(fetched.content)) as tar:
            names = tar.getnames()
            root = tar.extractfile("adapter_model.safetensors")
            peft = tar.extractfile("peft/adapter_model.safetensors")
            assert root is not None
            assert peft is not None
            found, standard = load(root.read()), load(peft.read())
        assert {"adapter_config.json", "checkpoint_complete"} < set(names)
        assert found["base_model.model.model.unembed_tokens.lora_B.weight"].shape == (100, 4)
        assert standard["base_model.model.lm_head.lora_A.weight"].shape == (4, 8)

    def test_weights_that_replace_others_have_an_archive_of_their_own(self, world: World) -> None:
        run = world.run()
        found = []
        for seq in (1, 2):
            body = {"model_id": run, "seq_id": seq, "path": "one", "overwrite": True}
            request_id = world.post("save_weights", body)["request_id"]
            world.finish(request_id)
            path = world.outcome(request_id).json()["path"]
            (folder_of(world, path) / "which").write_text(str(seq))
            link = world.call("GET", f"{route(path)}/archive", follow_redirects=False).headers["location"]
            with tarfile.open(fileobj=io.BytesIO(world.http.get(link).content)) as tar:
                found.append(tar.extractfile("which").read())  # type: ignore[union-attr]
        assert found == [b"1", b"2"]

    def test_who_asks_while_it_is_uploaded_takes_nothing_of_it(
        self, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blobs = ObjectBlobs(bucket, tmp_path / "cache", 1 << 20)
        with blobs.new_folder("weights/one") as folder:
            (folder / "which").write_text("one")
        put, asked = bucket.put, list[str]()

        def another_asks_before_the_list(key: str, data: bytes | Path) -> None:
            if key == "folders/archives/one" and not asked:
                asked.append(key)
                make_archive(blobs, "weights/one")
            put(key, data)

        monkeypatch.setattr(bucket, "put", another_asks_before_the_list)
        make_archive(blobs, "weights/one")
        assert asked
        blobs.check_folder("archives/one")

    def test_not_for_others(self, world: World) -> None:
        path = world.checkpoint(world.run(), 1)
        world.post(f"{route(path)}/publish")
        world.get(f"{route(path)}/archive", key=world.other_key, status=404)


class TestPublishing:
    def test_others_may_load_copy_and_sample_it_and_nothing_else(self, world: World) -> None:
        run = world.run()
        path, sampler = world.checkpoint(run, 1), world.checkpoint(run, 2, sampler=True)
        key = world.other_key
        theirs = world.session(key)
        load = {"session_id": theirs, "model_seq_id": 0, "path": path, "optimizer": True}
        sample = {"session_id": theirs, "sampling_session_seq_id": 0, "model_path": sampler}
        for _ in range(2):
            world.post(f"{route(path)}/publish")
        world.post(f"{route(sampler)}/publish")
        assert [c["public"] for c in world.get("checkpoints")["checkpoints"]] == [True, True]
        world.post("load_weights", load, key=key)
        world.post("weights_info", {"tinker_path": path}, key=key)
        world.post("create_sampling_session", sample, key=key)
        copy = {"source_path": path, "session_id": theirs, "model_seq_id": 1}
        copied = world.post("copy_weights", copy, key=key)["tinker_path"]
        (folder_of(world, path) / "which").write_text("w")
        found = world.call("GET", f"{route(copied)}/archive", key=key, follow_redirects=False)
        assert found.status_code == 302  # a copy is theirs, and may be downloaded
        world.get(f"{route(path)}/archive", key=key, status=404)
        world.get(f"training_runs/{run}", key=key, status=404)
        world.get(f"training_runs/{run}/checkpoints", key=key, status=404)
        for method, end in (("DELETE", ""), ("PUT", "/ttl"), ("POST", "/publish"), ("DELETE", "/publish")):
            reply = world.call(method, route(path) + end, key=key, json={"ttl_seconds": None})
            assert reply.status_code == 404
        world.call("DELETE", f"{route(path)}/publish")
        world.post("load_weights", load | {"model_seq_id": 2}, key=key, status=404)

    def test_a_sample_of_published_weights_belongs_to_no_foreign_run(self, world: World) -> None:
        sampler = world.checkpoint(world.run(), 1, sampler=True)
        world.post(f"{route(sampler)}/publish")
        body = {"session_id": world.session(world.other_key), "sampling_session_seq_id": 0, "model_path": sampler}
        made = world.post("create_sampling_session", body, key=world.other_key)["sampling_session_id"]
        with world.database.read() as session:
            row = session.get_one(tables.Sampler, made)
        assert row.run_id is None
        assert row.adapter_ref

    @pytest.mark.parametrize("own", [True, False], ids=["own", "of another organisation"])
    def test_what_was_noted_with_a_checkpoint_stays_in_its_organisation(self, world: World, own: bool) -> None:
        """A loop of weft.rl notes its runs and their cost."""
        noted, key = {"customer": "acme"}, world.key if own else world.other_key
        body = {"model_id": world.run(), "seq_id": 1, "path": "one", "user_metadata": noted}
        saving = world.post("save_weights", body)["request_id"]
        world.finish(saving, size_bytes=7)
        path = world.outcome(saving).json()["path"]
        world.post(f"{route(path)}/publish")
        copy = {"source_path": path, "session_id": world.session(key), "model_seq_id": 1}
        copied = world.post("copy_weights", copy, key=key)["tinker_path"]
        listed = {one["tinker_path"]: one for one in world.get("checkpoints", key=key)["checkpoints"]}
        assert listed[copied]["user_metadata"] == (noted if own else {})

    def test_with_the_owners_key_no_publishing_is_needed(self, world: World) -> None:
        path = world.checkpoint(world.run(), 1)
        own = world.session(world.other_key)
        load = {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": False}
        world.post("load_weights", load | {"weights_access_token": world.key}, key=world.other_key)
        reply = world.post(
            "load_weights", load | {"model_seq_id": 1, "weights_access_token": "tml-x"}, key=world.other_key, status=400
        )
        assert "weights_access_token" in reply["detail"]
        headers = {"x-tinker-weights-access-token": world.key}
        body = {"source_path": path, "destination_project_id": "p"}
        copied = world.call("POST", "copy_weights", key=world.other_key, json=body, headers=headers)
        assert copied.status_code == 200


class TestCopying:
    def test_into_a_project(self, world: World) -> None:
        run = world.run()
        path = world.checkpoint(run, 1, sampler=True)
        world.call("PUT", f"{route(path)}/ttl", json={"ttl_seconds": 3600})
        headers = {"x-idempotency-key": "k"}
        body = {"source_path": path, "destination_project_id": "archive"}
        copied = [world.call("POST", "copy_weights", json=body, headers=headers).json()["tinker_path"] for _ in "ab"]
        assert copied[0] == copied[1] != path
        assert copied[0].endswith("/sampler_weights/one")
        own = copied[0].removeprefix("tinker://").split("/")[0]
        (saved,) = world.get(f"training_runs/{own}/checkpoints")["checkpoints"]
        assert (saved["size_bytes"], saved["expires_at"]) == (7, None)
        (listed,) = world.get("training_runs?project_id=archive")["training_runs"]
        assert (listed["training_run_id"], listed["user_metadata"]) == (own, {"copied_from": path})
        assert folder_of(world, path) == folder_of(world, copied[0])
        refused = world.post("optim_step", {"model_id": own, "seq_id": 1, "adam_params": {}}, status=400)
        assert "closed" in refused["detail"]

    def test_into_a_session_under_its_numbers(self, world: World) -> None:
        session = world.session()
        run = world.run(session)
        path, other = world.checkpoint(run, 1), world.checkpoint(run, 2, "two")
        body = {"source_path": path, "session_id": session, "model_seq_id": 1, "ttl_seconds": 3600}
        copied = world.post("copy_weights", body)
        assert copied["tinker_path"] == f"tinker://{session}:train:1/weights/one"
        assert world.post("copy_weights", body) == copied
        world.post("copy_weights", body | {"source_path": other}, status=400)
        world.post("copy_weights", body | {"model_seq_id": 0}, status=400)
        create = {"session_id": session, "model_seq_id": 1, "base_model": MODEL}
        assert "copy" in world.post("create_model", create, status=400)["detail"]
        info = world.post("weights_info", {"tinker_path": copied["tinker_path"]})
        assert info["lora_rank"] == 4
        world.post("load_weights", {"session_id": session, "model_seq_id": 2, "path": path, "optimizer": True})

    def test_the_files_stay_until_the_last_name_goes(self, world: World) -> None:
        session = world.session()
        path = world.checkpoint(world.run(session), 1)
        folder = folder_of(world, path)
        body = {"source_path": path, "session_id": session, "model_seq_id": 1}
        copied = world.post("copy_weights", body)["tinker_path"]
        world.call("DELETE", route(path))
        assert folder.is_dir()
        world.call("DELETE", route(copied))
        assert not folder.exists()

    def test_deleting_does_not_wait_for_a_disk(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def away(_ref: str) -> None:
            raise StoreAway("the server's object store does not answer (Unreachable)")

        path = world.checkpoint(world.run(), 1)
        monkeypatch.setattr(folders(world), "delete_tree", away)
        assert world.call("DELETE", route(path)).status_code == 200
        assert world.call("DELETE", route(path)).status_code == 404

    @pytest.mark.parametrize(
        ("changes", "status"),
        [
            ({"destination_project_id": None}, 400),
            ({"session_id": "s", "model_seq_id": 0}, 400),
            ({"source_path": "tinker://r/weights/none"}, 404),
            ({"ttl_seconds": 1}, 422),
            ({"x": 1}, 422),
        ],
    )
    def test_mistakes(self, world: World, changes: dict[str, Any], status: int) -> None:
        path = world.checkpoint(world.run(), 1)
        body = {"source_path": path, "destination_project_id": "p"} | changes
        reply = world.call("POST", "copy_weights", json=body)
        assert reply.status_code in (status, 400), reply.text


class TestListing:
    def test_pages(self, world: World) -> None:
        run = world.run()
        for seq in range(1, 4):
            world.checkpoint(run, seq, f"c{seq}")
        first = world.get("checkpoints?limit=2")
        assert [c["checkpoint_id"] for c in first["checkpoints"]] == ["weights/c3", "weights/c2"]
        assert first["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
        assert len(world.get("checkpoints?limit=2&offset=2")["checkpoints"]) == 1

    def test_owned_is_what_the_same_key_made(self, world: World) -> None:
        from tests.keys import create_key

        run = world.run()
        colleague = world.database.write_now(lambda session: create_key(session, "acme"))
        assert world.get("training_runs", key=colleague)["training_runs"] == []
        assert len(world.get("training_runs?access_scope=accessible", key=colleague)["training_runs"]) == 1
        world.get(f"training_runs/{run}", key=colleague, status=404)
        world.get(f"training_runs/{run}?access_scope=accessible", key=colleague)


def test_an_expired_name_is_free_again_and_overwriting_unpublishes(world: World) -> None:
    run = world.run()
    path = world.checkpoint(run, 1)
    world.post(f"{route(path)}/publish")
    with world.database.read() as session:
        checkpoint_id = session.query(tables.Checkpoint).one().id

    def expire(session: Any) -> None:
        session.get(tables.Checkpoint, checkpoint_id).expires_at = datetime.now(UTC) - timedelta(seconds=1)

    world.database.write_now(expire)
    assert world.get("checkpoints")["checkpoints"] == []
    assert world.checkpoint(run, 2) == path
    (saved,) = world.get("checkpoints")["checkpoints"]
    assert (saved["public"], saved["expires_at"]) == (False, None)
