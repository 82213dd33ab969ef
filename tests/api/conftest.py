"""The API over a real journal and database, without workers: tests play the worker by finishing operations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from weft.wire.binary.train_codec import TrainBatch, encode_train_request

from api.server.app import front
from api.state.service import Service
from billing.prices import load_prices
from scheduler.journal.journal import Journal
from scheduler.links.messages import Done
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.settings import FrontSettings, GeneratorSettings, Limits, Settings, TrainerSettings
from store.tables import Operation
from tests.api.listening import Listening
from tests.keys import create_key
from workers.model.card import ModelCard, read_card
from workers.model.tiny import TINY_PATH

MODEL = "test/model:peft:64"
VOCAB, CONTEXT = 100, 16
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture
def card() -> ModelCard:
    """The folder of the built-in model, with a vocabulary of 100 tokens and a context of 16."""
    card = read_card(MODEL, TINY_PATH)
    return replace(card, config=replace(card.config, vocab_size=VOCAB, context_length=CONTEXT))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path,
        long_poll_s=0.2,
        trainer=TrainerSettings(slice_tokens=10),
        generator=GeneratorSettings(slots=4),
        limits=Limits(max_body_bytes=20_000, max_data=8, max_num_samples=4, max_rank=16, max_queued_ops_per_org=50),
    )


class World:
    """A client for each organisation, and methods that play the worker."""

    def __init__(self, http: TestClient, database: Database, service: Service) -> None:
        self.http = http
        self.database = database
        self.service = service
        self.key = database.write_now(lambda session: create_key(session, "acme"))
        self.other_key = database.write_now(lambda session: create_key(session, "rival"))

    @property
    def journal(self) -> Journal:
        """The journal of the one process."""
        assert isinstance(self.service.journal, Journal)
        return self.service.journal

    @property
    def state(self) -> Any:
        """The application's state."""
        assert isinstance(self.http.app, FastAPI)
        return self.http.app.state

    def call(self, method: str, path: str, *, key: str | None = None, **options: Any) -> Any:
        headers = {"x-api-key": key or self.key, **options.pop("headers", {})}
        return self.http.request(method, f"/api/v1/{path}", headers=headers, **options)

    def post(self, path: str, body: Any = None, *, key: str | None = None, status: int = 200) -> Any:
        reply = self.call("POST", path, key=key, json={} if body is None else body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def get(self, path: str, *, key: str | None = None, status: int = 200) -> Any:
        reply = self.call("GET", path, key=key)
        assert reply.status_code == status, reply.text
        return reply.json()

    def session(self, key: str | None = None) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        return str(self.post("create_session", body, key=key)["session_id"])

    def run(self, session: str | None = None, number: int = 0, key: str | None = None, **changes: Any) -> str:
        body = {
            "session_id": session or self.session(key),
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
            "type": "create_model",
        }
        return str(self.post("create_model", body | changes, key=key)["model_id"])

    def train(self, batch: TrainBatch, status: int = 200, key: str | None = None) -> Any:
        body = encode_train_request(batch)
        reply = self.call("POST", "forward_backward", key=key, content=body, headers=PROTOBUF)
        assert reply.status_code == status, reply.text
        return reply.json()

    def finish(self, request_id: str, payload: bytes = b"", **facts: int) -> None:
        """Finish an operation as a worker would."""
        done = Done(request_id, payload, facts)

        async def settle() -> None:
            self.journal.finish(done)
            await self.journal.flush()

        self.http.portal.call(settle)  # type: ignore[union-attr]

    def outcome(self, request_id: str, key: str | None = None) -> Any:
        return self.call("POST", "retrieve_future", key=key, json={"request_id": request_id})

    def error(self, request_id: str) -> str:
        """The reason why an operation failed, which must be the user's mistake."""
        reply = self.outcome(request_id)
        assert reply.status_code == 200
        assert reply.json()["category"] == "user"
        return str(reply.json()["error"])

    def operation(self, request_id: str) -> Operation:
        with self.database.read() as session:
            return session.get_one(Operation, request_id)

    def checkpoint(self, run: str, seq: int, name: str = "one", sampler: bool = False) -> str:
        """Save a checkpoint; returns its path."""
        path = "save_weights_for_sampler" if sampler else "save_weights"
        request_id = self.post(path, {"model_id": run, "seq_id": seq, "path": name})["request_id"]
        self.finish(request_id, size_bytes=7)
        return str(json.loads(self.outcome(request_id).content)["path"])


@contextmanager
def open_world(settings: Settings, card: ModelCard, database: Database, blobs: FolderBlobs) -> Iterator[World]:
    made: list[Service] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        prices = load_prices()
        journal = Journal(database, blobs, prices, settings.limits.max_queued_ops_per_org)
        service = Service(settings, {MODEL: card}, database, blobs, prices, journal, dict)
        app.state.service = service
        made.append(service)
        yield
        await journal.flush()

    with TestClient(front(lifespan)) as http:
        yield World(http, database, made[0])


@pytest.fixture
def world(settings: Settings, card: ModelCard, database: Database, blobs: FolderBlobs) -> Iterator[World]:
    with open_world(settings, card, database, blobs) as world:
        yield world


@pytest.fixture
def listening() -> Iterator[Callable[..., Listening]]:
    with ExitStack() as stack:

        def start(**settings: Any) -> Listening:
            found = Listening(FrontSettings(**settings))
            stack.callback(found.stop)
            return found

        yield start
