"""Listing, deleting, usage, tokenizers and the command line against a real HTTP stub."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import resource
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
import weft
from click.testing import CliRunner
from starlette.responses import Response
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer
from weft import ServiceClient
from weft.cli import main
from weft.money import usd

from tests.client_sdk.stub_server import Stub, status
from workers.model.tiny import TINY_PATH

RUN = "5e55:train:0"
PATH = f"tinker://{RUN}/weights/s1"
CHECKPOINT = {
    "checkpoint_id": "weights/s1",
    "checkpoint_type": "training",
    "time": "2026-11-21T08:00:00Z",
    "tinker_path": PATH,
    "size_bytes": 3 * 2**20,
}
USAGE = {
    "rows": [
        {
            "run_id": RUN,
            "kind": "train",
            "base_model": "org/tiny",
            "tokens": 12345,
            "amount_nusd": 4_938_000,
            "amount_usd": "0.004938",
        },
        {
            "run_id": RUN,
            "kind": "sample",
            "base_model": "org/tiny",
            "tokens": 5,
            "amount_nusd": 62_000,
            "amount_usd": "0.000062",
        },
    ],
    "total_nusd": 5_000_000,
    "total_usd": "0.005000",
    "price_version": "2026-11",
    "a_field_of_the_future": 1,
}


def test_checkpoints(service: ServiceClient, stub: Stub) -> None:
    rest = service.create_rest_client()
    stub.replies[f"GET /training_runs/{RUN}/checkpoints"] = {"checkpoints": [CHECKPOINT]}
    [found] = rest.list_checkpoints(RUN).result(10).checkpoints
    assert (found.tinker_path, found.expires_at, found.public) == (PATH, None, False)

    rest.delete_checkpoint(RUN, "weights/s1").result(10)
    rest.set_checkpoint_ttl_from_tinker_path(PATH, None).result(10)
    rest.publish_checkpoint_from_tinker_path(PATH).result(10)
    rest.unpublish_checkpoint_from_tinker_path(PATH).result(10)
    route = f"/training_runs/{RUN}/checkpoints/weights/s1"
    assert [(asked.method, asked.path) for asked in stub.asked[1:]] == [
        ("DELETE", route),
        ("PUT", f"{route}/ttl"),
        ("POST", f"{route}/publish"),
        ("DELETE", f"{route}/publish"),
    ]
    assert stub.asked[2].json == {"ttl_seconds": None}
    assert "/create_session" not in stub.paths()


@pytest.mark.parametrize("path", ["", "tinker://a/b", "tinker://a/weights/", "tinker://a/x/b", "http://a/weights/b"])
def test_a_wrong_path_is_refused_here(service: ServiceClient, path: str) -> None:
    with pytest.raises(ValueError, match="not a checkpoint path"):
        service.create_rest_client().delete_checkpoint_from_tinker_path(path)


def test_an_answer_that_cannot_be_read_is_told(service: ServiceClient, stub: Stub) -> None:
    stub.replies["GET /sessions"] = {"sessions": "none"}
    with pytest.raises(weft.APIResponseValidationError, match="sessions"):
        service.create_rest_client().list_sessions().result(10)
    stub.faults["/sessions"] = [status(404)]
    with pytest.raises(weft.NotFoundError):
        asyncio.run(service.create_rest_client().list_sessions_async())


PAGE = (
    "<html>\n<head><title>413 Request Entity Too Large</title></head>\n<body><hr><center>nginx</center></body></html>"
)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            Response(PAGE, 413, media_type="text/html"),
            "a proxy in between, or another server, says: 413 Request Entity",
        ),
        (Response(PAGE, 200, media_type="text/html"), "Invalid JSON.*; it begins with '<html>"),
        (Response('{"hits": [', 200), "Invalid JSON.*; it begins with '{\"hits\": \\['"),
        (
            Response("", 302, {"location": "https://login.example/x"}),
            "is redirected to https://login.example/x, where no",
        ),
    ],
)
def test_an_answer_of_another_server_is_told(service: ServiceClient, stub: Stub, fault: Response, says: str) -> None:
    stub.faults["/sessions"] = [fault]
    with pytest.raises(weft.APIError, match=says):
        service.create_rest_client().list_sessions().result(10)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_the_key_goes_to_nobody_whom_the_server_names(service: ServiceClient, stub: Stub, status: int) -> None:
    """On a redirect httpx removes only the header that it knows, which is not ours."""
    elsewhere = stub.base_url.replace("127.0.0.1", "localhost") + "/api/v1/sessions?elsewhere=1"
    stub.faults["/sessions"] = [Response("", status, {"location": elsewhere})]
    with pytest.raises(weft.APIStatusError, match="is redirected to"):
        service.create_rest_client().list_sessions().result(10)
    assert not [asked for asked in stub.asked if "elsewhere" in asked.query]


def test_usage_of_one_run_and_its_cost(service: ServiceClient, stub: Stub) -> None:
    stub.replies["GET /weft/usage"] = USAGE
    assert service.create_rest_client().get_usage().result(10).total_nusd == 5_000_000
    cost = service.create_lora_training_client("org/tiny").cost().result(10)
    assert cost.rows[0].tokens == 12345
    assert stub.asked[-1].query == {"run_id": "5e551011:train:0"}


def test_tokenizer_comes_from_the_server_and_is_cached(
    service: ServiceClient, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    content = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).to_str().encode()
    route = "GET /weft/models/org/tiny/tokenizer"
    stub.replies[route] = {"files": {"tokenizer.json": hashlib.sha256(content).hexdigest()}}
    stub.replies[f"{route}/tokenizer.json"] = Response(content)
    training = service.create_lora_training_client("org/tiny")

    assert training.get_tokenizer().convert_tokens_to_ids(["b"]) == [1]
    assert service.create_sampling_client(base_model="org/tiny").get_tokenizer() is training.get_tokenizer()
    assert stub.paths().count("/weft/models/org/tiny/tokenizer/tokenizer.json") == 1
    [kept] = tmp_path.rglob("tokenizer.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644  # a cache that colleagues share


def test_a_template_for_tools_comes_with_its_tokenizer(
    service: ServiceClient, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    theirs = AutoTokenizer.from_pretrained(TINY_PATH)
    theirs.chat_template = {"default": "plain", "tool_use": "{% for t in tools %}{{ t.function.name }}{% endfor %}"}
    theirs.save_pretrained(tmp_path / "model")
    listed: dict[str, dict[str, str]] = {"files": {}, "templates": {}}
    for file in (tmp_path / "model").rglob("*.*"):
        name, content = file.relative_to(tmp_path / "model"), file.read_bytes()
        listed["templates" if name.parts[1:] else "files"][name.name] = hashlib.sha256(content).hexdigest()
        stub.replies[f"GET /weft/models/m/tokenizer/{name}"] = Response(content)
    stub.replies["GET /weft/models/m/tokenizer"] = listed
    tokenizer = service.create_sampling_client(base_model="m").get_tokenizer()
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tools=[tool], tokenize=False) == "add"


def test_a_tokenizer_file_that_was_not_listed_is_refused(
    service: ServiceClient, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    sampler = service.create_sampling_client(base_model="m")
    stub.replies["GET /weft/models/m/tokenizer"] = {"files": {"tokenizer.json": "0" * 64}}
    stub.replies["GET /weft/models/m/tokenizer/tokenizer.json"] = Response(b"{}")
    with pytest.raises(weft.APIResponseValidationError, match="not the one"):
        sampler.get_tokenizer()
    stub.replies["GET /weft/models/m/tokenizer"] = {"files": {"../x": "0" * 64}}
    with pytest.raises(weft.APIResponseValidationError, match="plain file names"):
        sampler.get_tokenizer()


def test_a_tokenizer_that_the_disk_cannot_keep_is_told_and_leaves_nothing(
    service: ServiceClient, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    content = b"{}" * 1000
    stub.replies["GET /weft/models/m/tokenizer"] = {"files": {"tokenizer.json": hashlib.sha256(content).hexdigest()}}
    stub.replies["GET /weft/models/m/tokenizer/tokenizer.json"] = Response(content)
    sampler, soft_hard = service.create_sampling_client(base_model="m"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, soft_hard[1]))
    try:
        with pytest.raises(OSError, match=r"WEFT_CACHE_DIR names another folder\): .*tokenizer\.json'") as told:
            sampler.get_tokenizer()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    assert told.value.errno == errno.EFBIG
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_a_user_without_a_home_is_told_what_names_a_folder(
    service: ServiceClient, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    stub.replies["GET /weft/models/m/tokenizer"] = {"files": {"tokenizer.json": "0" * 64}}
    with pytest.raises(OSError, match="no home: name a folder for tokenizers in WEFT_CACHE_DIR"):
        service.create_sampling_client(base_model="m").get_tokenizer()


def cli(stub: Stub, *arguments: str) -> tuple[int, str]:
    options = ["--base-url", stub.base_url, "--api-key", "tml-test"]
    done = CliRunner().invoke(main, [*options, *arguments], env={"COLUMNS": "40"})
    return done.exit_code, done.output


def test_weft_usage(stub: Stub) -> None:
    stub.replies["GET /weft/usage"] = USAGE
    code, printed = cli(stub, "usage", "--run", RUN)
    assert code == 0
    assert stub.asked[-1].query == {"run_id": RUN}
    for cell in (RUN, "12,345", "0.004938", "0.000062", "total", "12,350", "0.005000", "2026-11"):
        assert cell in printed
    code, printed = cli(stub, "usage", "--json")
    assert json.loads(printed)["total_usd"] == "0.005000"


def test_weft_lists(stub: Stub) -> None:
    stub.replies["GET /checkpoints"] = {"checkpoints": [CHECKPOINT]}
    stub.replies["GET /get_server_capabilities"] = {
        "supported_models": [{"model_name": "org/tiny", "max_context_length": 2048, "trainable": True}]
    }
    stub.replies["GET /training_runs"] = {
        "training_runs": [
            {
                "training_run_id": RUN,
                "base_model": "org/tiny",
                "model_owner": "me",
                "is_lora": True,
                "last_request_time": "2026-11-21T08:00:00Z",
            }
        ],
        "cursor": {"offset": 0, "limit": 20, "total_count": 30},
    }
    stub.replies["GET /weft/stats"] = {"trainer": {"passes": 3, "slots": {"share": 0.25}}}
    for arguments, cells in (
        (("checkpoints",), (PATH, "3.0 MiB", "never")),
        (("models",), ("org/tiny", "2,048", "yes")),
        (("runs",), (RUN, "1 of 30")),
        (("stats",), ("trainer.passes", "trainer.slots.share", "0.25")),
    ):
        code, printed = cli(stub, *arguments)
        assert code == 0
        assert [cell for cell in cells if cell not in printed] == []


def test_errors_are_one_line(stub: Stub) -> None:
    stub.faults["/weft/usage"] = [status(401, "unknown API key")]
    code, printed = cli(stub, "usage")
    assert code == 3
    assert printed.count("\n") == 1
    assert "unknown API key" in printed


@pytest.mark.parametrize(
    ("amount_nusd", "text"),
    [(0, "0.000000000"), (1, "0.000000001"), (1_234_567_000, "1.234567000"), (-500, "-0.000000500")],
)
def test_dollars(amount_nusd: int, text: str) -> None:
    assert usd(amount_nusd) == text


def test_a_rest_client_that_is_closed_leaves_the_run_that_made_it_its_connections(
    service: ServiceClient, stub: Stub
) -> None:
    run = service.create_lora_training_client("org/tiny").result()
    sampler = run.save_weights_and_get_sampling_client().result()
    for maker in (service, run, sampler):
        with maker.create_rest_client() as rest:
            rest.delete_checkpoint("a:train:0", "weights/x").result(10)
    assert run.optim_step(weft.AdamParams()).result(10).metrics == {"norm": 1.0}
    alone = weft.RestClient(base_url=stub.base_url, api_key="tml-test")
    with alone as rest:
        rest.delete_checkpoint("a:train:0", "weights/x").result(10)
    with pytest.raises(RuntimeError, match="closed"):
        alone.delete_checkpoint("a:train:0", "weights/x").result(10)
