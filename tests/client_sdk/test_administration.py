"""Sessions, copies, downloads, audit, billing, prices, and the commands about them, against the HTTP stub."""

from __future__ import annotations

import io
import json
import resource
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import weft
import zstandard
from click.testing import CliRunner
from safetensors.numpy import save_file
from starlette.responses import JSONResponse, RedirectResponse, Response
from weft import Datum, ModelInput, ServiceClient
from weft.cli import main
from weft.exports.folder import made
from weft.exports.layout import fit_for_vllm
from weft.transport.download import _unpack
from weft.types import (
    AccessibleSearchOwner,
    ClientFinishedSessionStatusQuery,
    DimuonOptimizerConfig,
    DimuonParams,
    SessionSearchRequest,
)
from weft.wire.binary.train_codec import decode_train_request

from tests.client_sdk.stub_server import Asked, Stub, status

RUN = "5e55:train:0"
STATE, EXPORT = f"tinker://{RUN}/weights/s1", f"tinker://{RUN}/external_weights/e1"
NOW = "2026-11-21T08:00:00Z"


@pytest.fixture
def rest(service: ServiceClient) -> weft.RestClient:
    return service.create_rest_client()


def test_search_by_pages(rest: weft.RestClient, stub: Stub) -> None:
    cursor = {"last_created_at": NOW, "last_session_id": "s1"}
    summary = {"session_id": "s1", "created_at": NOW, "owner": "o", "project_id": "p", "checkpoints_count": 2}
    finished = {"type": "client_finished", "reason": {"type": "success"}}
    stub.replies["POST /sessions/search"] = {"sessions": [summary | {"status": finished}], "next_cursor": cursor}
    query = ClientFinishedSessionStatusQuery(reasons=["success"])
    request = SessionSearchRequest(display_name="nightly", owner=AccessibleSearchOwner(), statuses=[query])
    page = rest.search_sessions(request).result(10)
    assert page.sessions[0].status is not None
    assert page.sessions[0].status.type == "client_finished"
    rest.search_sessions(request.model_copy(update={"cursor": page.next_cursor})).result(10)
    first, second = stub.bodies("/sessions/search")
    assert first["owner"] == {"type": "accessible"}
    assert first["statuses"] == [{"type": "client_finished", "reasons": ["success"]}]
    assert "cursor" not in first
    assert second["cursor"] == cursor


def test_projects_and_copies(rest: weft.RestClient, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    rest.assign_session_project("s1", "p1").result(10)
    assert (stub.asked[-1].method, stub.asked[-1].json) == ("PUT", {"project_id": "p1"})
    stub.replies["POST /copy_weights"] = {"tinker_path": EXPORT}
    assert rest.copy_weights(STATE, "p1", ttl_seconds=3600, weights_access_token="tml-them").result(10) == EXPORT
    assert stub.asked[-1].json == {"source_path": STATE, "destination_project_id": "p1", "ttl_seconds": 3600}
    assert stub.asked[-1].headers["x-tinker-weights-access-token"] == "tml-them"
    with pytest.raises(ValueError, match="WEFT_PROJECT_ID"):
        rest.copy_weights(STATE)
    monkeypatch.setenv("WEFT_PROJECT_ID", "p2")
    ServiceClient(base_url=stub.base_url, api_key="tml-test").copy_weights(STATE).result(10)
    assert stub.asked[-1].json["destination_project_id"] == "p2"


def test_a_trace_is_waited_for(rest: weft.RestClient, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.rest_client.TRACE_POLL_S", 0.01)
    stub.faults["/sessions/s1/trace_export"] = [JSONResponse({"status": "pending"})]
    stub.replies["GET /sessions/s1/trace_export"] = {"status": "ready", "url": "http://x/t"}
    assert rest.export_session_trace("s1").result(10) == "http://x/t"
    stub.replies["GET /sessions/s1/trace_export"] = {"status": "failed", "error": "no room"}
    with pytest.raises(weft.RequestFailedError, match="no room"):
        rest.export_session_trace("s1").result(10)


def test_administration(stub: Stub) -> None:
    stub.replies["GET /audit"] = {
        "entries": [{"timestamp": NOW, "event": "checkpoint_read", "event_details": {"a": 1}}]
    }
    info = {"type": "sampling_prefill", "cached": True, "token_count": 9}
    stub.replies["GET /billing/usage/events"] = {"data": [{"bucket_start": NOW, "bucket_end": NOW, "event_info": info}]}
    item = {"checkpoint_count": 1, "size_bytes": 10, "size_gigabytes": 1e-8}
    stub.replies["GET /billing/usage/checkpoints/current"] = {"data": [item]}
    admin = weft.AdminClient(base_url=stub.base_url, api_key="tml-test")
    assert admin.get_audit_log("checkpoints", date(2026, 11, 21)).result(10).entries[0].event == "checkpoint_read"
    assert stub.asked[-1].query == {"event_type": "checkpoints", "day": "2026-11-21"}
    usage = admin.get_billing_usage(datetime(2026, 11, 21, tzinfo=UTC), "2026-11-21T08:00:00Z").result(10)
    assert usage.data[0].event_info.type == "sampling_prefill"
    assert stub.asked[-1].query == {"starting_on": "2026-11-21T00:00:00Z", "ending_before": NOW}
    assert admin.get_current_checkpoint_storage_usage("p1").result(10).data[0].size_bytes == 10
    with pytest.raises(ValueError, match="starting_on"):
        admin.get_billing_usage("yesterday", NOW)


@pytest.fixture
def files(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Files that the stub serves at /api/v1/files/<name>, to anybody who asks."""
    content = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 3000}
    monkeypatch.setattr(stub, "on_files_a", lambda asked: Response(content["adapter_config.json"]), raising=False)
    monkeypatch.setattr(stub, "on_files_b", lambda asked: Response(content["adapter_model.safetensors"]), raising=False)
    urls = {
        "adapter_config.json": f"{stub.base_url}/api/v1/files/a",
        "peft/adapter_model.safetensors": f"{stub.base_url}/api/v1/files/b",
    }
    route = f"GET /training_runs/{RUN}/checkpoints/external_weights/e1/external_weights_urls"
    stub.replies[route] = {"urls": urls, "expires": NOW}
    return content


def test_download_of_an_export(rest: weft.RestClient, stub: Stub, files: dict[str, bytes], tmp_path: Path) -> None:
    found = rest.download_checkpoint(EXPORT, tmp_path / "new", "tinker").result(10)
    assert [path.relative_to(tmp_path / "new").as_posix() for path in found] == [
        "adapter_config.json",
        "peft/adapter_model.safetensors",
    ]
    assert [path.read_bytes() for path in found] == list(files.values())
    assert [asked.headers.get("x-api-key") for asked in stub.asked if asked.path.startswith("/files/")] == [None, None]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\x", ""])
def test_no_file_lands_outside(rest: weft.RestClient, stub: Stub, tmp_path: Path, name: str) -> None:
    route = f"GET /training_runs/{RUN}/checkpoints/external_weights/e1/external_weights_urls"
    stub.replies[route] = {"urls": {name: "http://x/"}, "expires": NOW}
    with pytest.raises(weft.APIResponseValidationError, match="outside"):
        rest.download_checkpoint(EXPORT, tmp_path).result(10)


def test_a_refused_file_leaves_nothing(
    rest: weft.RestClient, stub: Stub, files: dict[str, bytes], tmp_path: Path
) -> None:
    stub.faults["/files/a"] = [status(403, "the link has expired")]
    with pytest.raises(weft.PermissionDeniedError, match="expired"):
        rest.download_checkpoint(EXPORT, tmp_path / "x", "tinker").result(10)
    assert [path for path in (tmp_path / "x").rglob("*config*") if path.is_file()] == []


@pytest.mark.parametrize(
    "at_first", [status(503, "SlowDown"), Response(b"no gzip", headers={"content-encoding": "gzip"})]
)
def test_a_file_that_cannot_be_had_for_a_moment_is_asked_for_again(
    rest: weft.RestClient, stub: Stub, files: dict[str, bytes], tmp_path: Path, at_first: Response
) -> None:
    """Such as a store that wants fewer requests, a server that restarts behind its proxy, or an answer garbled on its
    way."""
    stub.faults["/files/a"] = [at_first]
    found = rest.download_checkpoint(EXPORT, tmp_path, "tinker").result(10)
    assert [path.read_bytes() for path in found] == list(files.values())


@contextmanager
def smaller_files() -> Iterator[None]:
    """Files can only be small, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_here_is_not_the_server_s_absence(
    rest: weft.RestClient, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that tries again whenever `weft download` says that the server is away would try for ever."""
    stub.replies[f"GET /training_runs/{RUN}/checkpoints/weights/s1/archive"] = RedirectResponse("/api/v1/tar", 302)
    monkeypatch.setattr(stub, "on_tar", lambda asked: Response(b"n" * 100_000), raising=False)
    with smaller_files(), pytest.raises(OSError, match=r"File too large: .*archive\.tar"):
        rest.download_checkpoint(STATE, tmp_path / "x", "tinker").result(10)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_breaks_leaves_what_was_there(stub: Stub, service: ServiceClient, tmp_path: Path) -> None:
    """The disk fills up after the archive: here no file may become as large as its second one."""
    archive, folder = tmp_path / "scratch" / "archive.tar", tmp_path / "adapter"
    archive.parent.mkdir()
    folder.mkdir()
    for name, size in (("small", 1000), ("large", 100_000)):
        (tmp_path / name).write_bytes(b"n" * size)
        (folder / name).write_bytes(b"old")
    with tarfile.open(archive, "w") as tar:
        tar.add(tmp_path / "small", "small")
        tar.add(tmp_path / "large", "large")
    with smaller_files(), pytest.raises(OSError, match="File too large"):
        _unpack(archive, folder, lambda names: {name: name for name in names})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {"small": b"old", "large": b"old"}
    _unpack(archive, folder, lambda names: {name: name for name in names})
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == {"small": 1000, "large": 100_000}


def test_a_disk_that_fills_up_while_files_are_made_for_vllm_is_an_error_of_the_folder(tmp_path: Path) -> None:
    save_file({"layers.0.q_proj.lora_A.weight": np.zeros(10_000, np.float32)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"target_modules": ["q_proj"], "r": 8, "lora_alpha": 16}')
    with smaller_files(), pytest.raises(OSError, match="File too large") as raised, made(tmp_path):
        fit_for_vllm(tmp_path, leave_out_unembedding=False)
    assert raised.value.filename == str(tmp_path)


def test_a_disk_that_has_no_room_for_the_reference_has_a_whole_adapter_without_one(
    stub: Stub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.reference.fetch_reference", lambda *_: {"tokens": [1] * 10_000})
    with smaller_files():
        code, printed = cli(stub, "download", EXPORT, "--to", str(tmp_path))
    assert (code, "no reference.json" in printed, "File too large" in printed) == (0, True, True)
    assert {file.name for file in tmp_path.iterdir()} == {"adapter_model.safetensors", "README.md", "verify.py"}


def tar_of(names: list[str]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    return written.getvalue()


def test_download_of_a_state(rest: weft.RestClient, stub: Stub, tmp_path: Path, monkeypatch: Any) -> None:
    stub.replies[f"GET /training_runs/{RUN}/checkpoints/weights/s1/archive"] = RedirectResponse("/api/v1/tar", 302)
    monkeypatch.setattr(stub, "on_tar", lambda asked: Response(tar_of(["a/adapter_config.json"])), raising=False)
    [found] = rest.download_checkpoint(STATE, tmp_path, "tinker").result(10)
    assert found.read_bytes() == b"abc"
    assert stub.asked[-1].headers.get("x-api-key") is None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    monkeypatch.setattr(stub, "on_tar", lambda asked: Response(tar_of(["../evil"])), raising=False)
    with pytest.raises(weft.APIResponseValidationError, match="unpacked"):
        rest.download_checkpoint(STATE, tmp_path / "b").result(10)
    assert not (tmp_path / "evil").exists()


def test_other_optimizers_and_compressed_bodies(service: ServiceClient, stub: Stub, monkeypatch: Any) -> None:
    stub.config = {"proto_compress_fwdbwd": True}
    plain = stub.on_forward_backward

    def unpack(asked: Asked) -> Response:
        assert asked.headers["content-encoding"] == "zstd"
        asked.body = zstandard.decompress(asked.body)
        return plain(asked)

    monkeypatch.setattr(stub, "on_forward_backward", unpack)
    run = service.create_lora_training_client("org/tiny", rank=8, optimizer=DimuonOptimizerConfig())
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2], "weights": [1.0, 1.0]})
    assert run.forward_backward([datum], "cross_entropy").result(10).metrics["loss:sum"] == 3.0
    run.optim_step(DimuonParams(learning_rate=0.5)).result(10)
    assert stub.bodies("/create_model")[0]["optimizer_config"] == {"type": "dimuon", "version": 1}
    [step] = stub.bodies("/optim_step")
    assert step["optimizer_params"] == {"type": "dimuon", "learning_rate": 0.5, "grad_clip_norm": 0.0, "beta1": 0.9}
    assert "adam_params" not in step
    [sent] = [decode_train_request(asked.body) for asked in stub.asked if asked.path == "/forward_backward"]
    assert sent.data[0].tokens.tolist() == [1, 2]


def cli(stub: Stub, *arguments: str, **options: Any) -> tuple[int, str]:
    shared = ["--base-url", stub.base_url, "--api-key", "tml-test"]
    done = CliRunner().invoke(main, [*shared, *arguments], env={"COLUMNS": "200"}, **options)
    return done.exit_code, done.output


def test_commands_about_checkpoints(stub: Stub, files: dict[str, bytes], tmp_path: Path) -> None:
    route = f"/training_runs/{RUN}/checkpoints/weights/s1"
    for arguments, method, path, says in (
        (("publish", STATE), "POST", f"{route}/publish", "public"),
        (("unpublish", STATE), "DELETE", f"{route}/publish", "private"),
        (("set-ttl", STATE, "--seconds", "7200"), "PUT", f"{route}/ttl", "7,200 s"),
        (("set-ttl", STATE, "--never"), "PUT", f"{route}/ttl", "never"),
        (("delete", "-y", STATE), "DELETE", route, "deleted"),
    ):
        code, printed = cli(stub, *arguments)
        assert (code, stub.asked[-1].method, stub.asked[-1].path) == (0, method, path)
        assert says in printed
    asked = len(stub.asked)
    assert cli(stub, "delete", STATE, input="n\n")[0] == 1
    assert cli(stub, "delete", "-y", STATE, "nonsense")[0] == 2
    assert cli(stub, "set-ttl", STATE)[0] == 2
    assert len(stub.asked) == asked
    code, printed = cli(stub, "download", EXPORT, "--no-reference", "--to", str(tmp_path / "here"))
    assert code == 0
    assert "3,000 bytes" in printed
    assert (tmp_path / "here" / "adapter_model.safetensors").exists()


def test_commands_about_money_and_traces(stub: Stub, tmp_path: Path, monkeypatch: Any) -> None:
    stub.replies["GET /weft/balance"] = {"spent_nusd": 5, "spent_this_month_nusd": 3, "month": "2026-11"}
    rates = {"train": 400_000, "prefill": 130_000, "cached_prefill": 26_000, "sample": 1_400_000}
    stub.replies["GET /weft/prices"] = {"base_model": "m", "price_version": "v1", "rates_uusd_per_mtok": rates}
    stub.replies["GET /weft/usage"] = {"rows": [], "total_nusd": 0, "total_usd": "0", "price_version": "v1"}
    code, printed = cli(stub, "balance")
    assert code == 0
    assert all(cell in printed for cell in ("2026-11", "0.000000003", "0.000000005", "none kept"))
    assert json.loads(cli(stub, "balance", "--json")[1])["balance_nusd"] is None
    assert all(cell in cli(stub, "prices", "m")[1] for cell in ("1.400000", "0.026000", "v1"))
    cli(stub, "cost", RUN)
    assert stub.asked[-1].query == {"run_id": RUN}
    stub.replies["GET /sessions/s1/trace_export"] = {"status": "ready", "url": f"{stub.base_url}/api/v1/bytes"}
    monkeypatch.setattr(stub, "on_bytes", lambda asked: Response(b"trace"), raising=False)
    assert cli(stub, "trace", "s1", "--to", str(tmp_path / "t.pftrace"))[0] == 0
    assert (tmp_path / "t.pftrace").read_bytes() == b"trace"
