from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
import zstandard
from pydantic import BaseModel, ValidationError
from sqlalchemy import select
from sqlalchemy.exc import OperationalError, TimeoutError as PoolTimeout
from starlette.types import Message, Receive, Scope, Send
from weft.wire.binary.train_codec import encode_train_request
from weft.wire.training import LoraConfig

from api.errors import Invalid, TooLarge, explain, quote
from api.http.bodies import unpack_zstd
from api.http.refusing import LastResort
from store.tables import Operation
from tests.api.conftest import MODEL, PROTOBUF, World
from tests.api.data import batch


def test_a_validators_own_words_are_told_alone() -> None:
    with pytest.raises(ValidationError) as caught:
        LoraConfig(rank=8, train_mlp=False, train_attn=False, train_unembed=False)
    assert explain(caught.value) == "body: at least one of train_unembed, train_mlp and train_attn must be true"


def test_quoted_values_stay_on_one_short_line() -> None:
    assert quote("a\nb") == "'a\\nb'"
    assert len(quote("x" * 1000)) == 80


def test_validation_errors_name_field_and_value() -> None:
    class Inner(BaseModel):
        rank: int

    class Outer(BaseModel):
        lora: Inner
        name: str

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"lora": {"rank": "many"}})
    text = explain(caught.value)
    assert "lora.rank:" in text
    assert "'many'" in text
    assert "name: Field required" in text


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "nowhere"), ("POST", "oai/api/v1/models")],
)
def test_what_is_not_here_says_so(world: World, method: str, path: str) -> None:
    reply = world.call(method, path)
    assert reply.status_code == 404
    assert reply.json()["code"] == "not_supported"
    assert path in reply.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("GET", "/api/v1/get_server_capability", "did you mean /api/v1/get_server_capabilities?"),
        ("GET", "/v1/fine_tuning/jobs", "/docs lists what there is"),
        ("GET", "/" + "x" * 1000, "/docs lists what there is"),
    ],
)
def test_a_path_that_is_not_here_tells_which_may_be_meant(world: World, method: str, path: str, meant: str) -> None:
    """In OpenAI's form too, as its clients show nothing else."""
    reply = world.http.request(method, path)
    assert reply.status_code == 404
    assert reply.json()["detail"].endswith(meant)
    assert reply.json()["error"]["message"] == reply.json()["detail"]


@pytest.mark.parametrize(
    ("path", "too_much"),
    [
        ("/v1/api/v1/create_session", "/v1"),
        ("/api/v1/api/v1/client/config", "/api/v1"),
        ("/v1/v1/chat/completions", "/v1"),
        ("/weft/v1/responses", "/weft"),
        ("/console/api/v1/client/config", "/console"),
    ],
)
def test_an_address_with_too_much_at_its_end_is_what_is_told(world: World, path: str, too_much: str) -> None:
    reply = world.http.post(path)
    assert reply.status_code == 404
    says = f"leave {too_much} out at the end of the server's address (base_url, WEFT_BASE_URL, TINKER_BASE_URL)"
    assert reply.json()["detail"] == f"this server has no POST {path}; {says}"


def test_a_wrong_method_has_a_body(world: World) -> None:
    reply = world.call("GET", "create_model")
    assert reply.status_code == 405
    assert reply.json()["detail"] == "/api/v1/create_model does not take GET; send POST"
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "fault", "error"),
    [
        ("GET", None, openai.APIStatusError),
        ("POST", RuntimeError("secret"), openai.InternalServerError),
        ("POST", OperationalError("SELECT", {}, Exception("locked")), openai.InternalServerError),
        ("POST", OSError(28, "no space"), openai.InternalServerError),
    ],
    ids=["405", "500", "database", "disk"],
)
def test_what_any_path_may_have_openais_client_can_read(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, fault: Exception | None, error: type[Exception]
) -> None:
    def broken(*_: Any) -> None:
        raise fault or AssertionError

    monkeypatch.setattr("api.routes.openai.chat.target_of", broken)
    client = openai.OpenAI(base_url="http://testserver/v1", api_key=world.key, http_client=world.http, max_retries=0)
    ask: Any = client.post if method == "POST" else client.get
    body = {"body": {"model": "m", "messages": [{"role": "user", "content": "x"}]}} if method == "POST" else {}
    with pytest.raises(error) as caught:
        ask("/chat/completions", cast_to=object, **body)
    told: Any = caught.value
    assert told.body["message"]
    assert told.code in ("method_not_allowed", "internal", "cannot_store")
    assert "secret" not in str(told)


@pytest.mark.parametrize(
    ("fault", "status"), [(OperationalError("SELECT", {}, Exception("gone")), 503), (RuntimeError(), 500)], ids=repr
)
def test_who_asks_again_at_once_after_a_failure_is_slowed_down(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int
) -> None:
    """The official client asks for a result again as soon as it has a 500 or 503."""

    async def broken(*_: Any) -> None:
        raise fault

    monkeypatch.setattr("api.routes.computing.futures.read_json", broken)
    monkeypatch.setattr("api.http.refusing.HELD_S", 0.3)
    began = time.monotonic()
    reply = world.call("POST", "retrieve_future", json={"request_id": "x"})
    assert (reply.status_code, "connection" in reply.headers) == (status, status == 503)  # another replica may know
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(
    "fault", [OperationalError("SELECT", {}, Exception("gone")), PoolTimeout(), OSError(5, "io")], ids=repr
)
def test_a_stream_that_has_begun_tells_that_the_store_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """The status has been sent by then, and clients cannot make anything of an answer that breaks off."""

    async def broken(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(type(world.journal), "outcome", broken)
    client = openai.OpenAI(base_url="http://testserver/v1", api_key=world.key, http_client=world.http, max_retries=0)
    stream = client.completions.create(model=MODEL, prompt=[1, 2], max_tokens=2, stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "cannot_store"
    (row,) = world.database.write_now(lambda session: session.scalars(select(Operation.id)).all())
    told = world.call("POST", "stream_future", json={"request_id": row})
    assert told.text.startswith("event: open")  # our client asks again


def test_an_unexpected_error_shows_an_id_and_nothing_inside(world: World, monkeypatch: Any, caplog: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(type(world.service), "read", broken)
    reply = world.call("GET", "sessions")
    assert reply.status_code == 500
    assert "secret inside" not in reply.text
    assert reply.json()["request_id"] in caplog.text
    assert world.key not in caplog.text


@pytest.mark.parametrize(
    "path", ["create_model", "asample", "optim_step", "retrieve_future", "load_weights", "telemetry"]
)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"a":' * 3000])
def test_what_is_no_json_object_is_422(world: World, path: str, body: bytes) -> None:
    reply = world.call("POST", path, content=body)
    assert reply.status_code == 422
    assert reply.json()["detail"]


def test_a_misspelt_field_is_refused(world: World) -> None:
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "m", "lora": {}}
    assert "lora:" in world.post("create_model", body, status=422)["detail"]


class TestBodies:
    def test_a_large_body_is_413_whether_declared_or_not(self, world: World) -> None:
        large = b"x" * 20_001
        for content in (large, iter([large[:10_000], large[10_000:]])):
            reply = world.call("POST", "telemetry", content=content)
            assert reply.status_code == 413
            assert "20000 bytes" in reply.json()["detail"]

    def test_a_body_at_the_limit_passes(self, world: World) -> None:
        content = b'{"events": []}'.ljust(20_000)
        assert world.call("POST", "telemetry", content=content).json() == {"status": "accepted"}

    def test_zstd(self) -> None:
        packed = zstandard.compress(b"a" * 1000)
        assert unpack_zstd(packed, 1000) == b"a" * 1000
        with pytest.raises(TooLarge, match="999 bytes"):
            unpack_zstd(packed, 999)

    def test_a_zstd_bomb_is_stopped_early(self) -> None:
        bomb = zstandard.compress(bytes(100_000_000))
        assert len(bomb) < 20_000
        with pytest.raises(TooLarge):
            unpack_zstd(bomb, 20_000)

    @pytest.mark.parametrize("body", [b"no zstd", zstandard.compress(b"a" * 1000)[:-5]])
    def test_broken_zstd(self, body: bytes) -> None:
        with pytest.raises(Invalid, match="zstd"):
            unpack_zstd(body, 1000)

    def test_compressed_batches_are_taken_and_gzip_is_not(self, world: World) -> None:
        run = world.run()
        body = encode_train_request(batch(run, 1))
        packed = PROTOBUF | {"content-encoding": "zstd"}
        assert world.call("POST", "forward_backward", content=zstandard.compress(body), headers=packed).is_success
        reply = world.call("POST", "forward_backward", content=body, headers=PROTOBUF | {"content-encoding": "gzip"})
        assert reply.status_code == 415


def test_a_request_that_the_end_of_the_server_cuts_off_is_asked_to_come_again() -> None:
    """Uvicorn cancels what is not answered when its time to stop is over."""
    sent = list[Message]()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def stopped() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        request = asyncio.create_task(LastResort(waits)(scope, receive, send))
        await asyncio.sleep(0)
        request.cancel()
        await request

    asyncio.run(stopped())
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    assert json.loads(sent[1]["body"])["code"] == "draining"
