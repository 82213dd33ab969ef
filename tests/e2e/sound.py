"""A request for every route that is answered with success, and near misses of it: what a server checks last is reached
only by a request that is otherwise right."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx

from api.http.client_wheel import WHEEL_NAME
from api.server.openapi import PREFIX
from tests.api.test_custom_loss import body as custom_loss
from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.raw import RawClient

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [40, 41]}]}
#: Routes that are not answered with success here, and why.
NEVER = {
    f"POST {PREFIX}/weft/billing/topups": "the server takes no payments; tests/e2e/test_payments.py",
    f"POST {PREFIX}/stripe/webhook": "the server takes no payments; tests/e2e/test_payments.py",
}


@dataclass(frozen=True)
class Sound:
    """What a request has beside its method and path; the key is an organisation's, by its name."""

    path: dict[str, str] = field(default_factory=dict)
    query: dict[str, Any] = field(default_factory=dict)
    body: Any = None
    organisation: str = "fuzz"


class Things:
    """What an organisation has on a server. What a request would end, or change for all others, is made for it."""

    def __init__(self, server: Weftd) -> None:
        self.server = server
        self.client = RawClient(server, "fuzz")
        self.session = self.client.session_id
        self.run = self.client.new_run()
        self.other = self.new_session()  # whose runs are made by requests: their numbers are nobody else's
        self._numbers = itertools.count(1)
        self._steps = itertools.count(1)
        self.missing = False
        self.stays = self.saved("stays")
        self.path = f"tinker://{self.run}/weights/stays"

    def number(self) -> int:
        return next(self._numbers)

    def saved(self, name: str, endpoint: str = "save_weights") -> dict[str, str]:
        """A new checkpoint, as paths of requests name it."""
        missing, self.missing = self.missing, False
        more = {"overwrite": True} if endpoint == "save_weights" else {}
        self.client.result(self.client.json(endpoint, **self.of_run(path=name), **more)["request_id"])
        self.missing = missing
        kind = {"save_weights": "weights", "save_weights_external": "external_weights"}[endpoint]
        return {"run_id": self.run, "kind": kind, "name": name}

    @cached_property
    def exported(self) -> dict[str, str]:
        return self.saved("exported", "save_weights_external")

    @cached_property
    def sampler(self) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": self.number(), "base_model": BASE_MODEL}
        return str(self.client.json("create_sampling_session", **body)["sampling_session_id"])

    def sample(self) -> dict[str, Any]:
        return {
            "sampling_session_id": self.sampler,
            "seq_id": self.number(),
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 2, "seed": 1, "temperature": 1.0, "stop": []},
            "num_samples": 1,
        }

    @cached_property
    def sampled(self) -> str:
        request_id = str(self.client.json("asample", **self.sample(), stream=True)["request_id"])
        self.client.result(request_id)
        return request_id

    def training(self, field: str) -> dict[str, Any]:
        inputs = {
            "target_tokens": {"data": [41, 42], "dtype": "int64", "shape": [2]},
            "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
        }
        data = [{"model_input": PROMPT, "loss_fn_inputs": inputs}]
        return self.of_run(**{field: {"data": data, "loss_fn": "cross_entropy"}})

    def of_run(self, **fields: Any) -> dict[str, Any]:
        """An operation of the run's; for a near miss that of a new run: a refused operation may have taken its number,
        and those after a missing number wait."""
        if self.missing:
            return {"model_id": self.client.new_run(), "seq_id": 1, **fields}
        return {"model_id": self.run, "seq_id": next(self._steps), **fields}

    def new_session(self) -> str:
        return str(self.client.json("create_session", sdk_version="1")["session_id"])

    def made(self, method: str, what: str, organisation: str = "fuzz", /, **body: Any) -> str:
        """The id of a new thing of the organisation's."""
        headers = {"X-API-Key": self.server.key(organisation)}
        reply = self.client.http.request(method, f"/weft/{what}", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return str(reply.json().get("id") or reply.json()["user_id"])

    def project(self) -> str:
        return self.made("POST", "projects", name=f"p{self.number()}")

    def key(self) -> str:
        return self.made("POST", "keys", scopes=["train"])

    def member(self) -> str:
        return self.made("POST", "members", email=f"m{self.number()}@example.com", role="viewer")

    def invitation(self) -> str:
        """For near misses always the same: they leave it, and few may be open."""
        return self._invited if self.missing else self._invite()

    @cached_property
    def _invited(self) -> str:
        return self._invite()

    def _invite(self) -> str:
        return self.made("POST", "invitations", "that invites", role="viewer", email="a@example.com")

    def link(self, asked: str, names: str, of: Callable[[httpx.Response], str]) -> Sound:
        """A signed link, whose path is `names` below /api/v1."""
        link = urlsplit(of(self.client.http.get(asked)))
        found = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", names), link.path.removeprefix(PREFIX))
        assert found, link
        return Sound(found.groupdict(), dict(parse_qsl(link.query)))

    def export(self, asked: str) -> str:
        """The path that names the export, below /api/v1."""
        return "/training_runs/{run_id}/checkpoints/{kind}/{name}".format(**self.exported) + asked

    def talk(self) -> str:
        """The name of a session with a turn."""
        body = {"model": BASE_MODEL, "prompt": [40], "max_tokens": 1}
        url = f"{self.server.url}/v1/completions"
        self.client.http.post(url, json=body, headers={"X-Session-ID": "talk"}).raise_for_status()
        return "talk"


def _path(**names: Any) -> Sound:
    return Sound(names)


def _body(**fields: Any) -> Sound:
    return Sound(body=fields)


_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_HOUR = {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-01T01:00:00Z"}
_CONFIG = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
_DRAW = {"model": BASE_MODEL, "max_tokens": 2, "temperature": 1.0, "n": 1, "stream": False}
_MESSAGES = [{"role": "user", "content": "1+1="}]
#: By method and path, that below /api/v1 without it. What is not here needs nothing.
SOUND: dict[str, Callable[[Things], Sound]] = {
    "POST /retrieve_future": lambda has: _body(request_id=has.sampled, allow_metadata_only=False),
    "POST /stream_future": lambda has: _body(request_id=has.sampled, timeout=0),
    "POST /cancel_future": lambda has: _body(request_id=has.sampled),
    "POST /retrieve_futures": lambda has: _body(
        target={"sampling_session_id": has.sampler, "cloned_sampler_id": 0}, prev_cursor=0, timeout=0
    ),
    "POST /create_model": lambda has: _body(
        session_id=has.other,
        model_seq_id=has.number(),
        base_model=BASE_MODEL,
        lora_config=_CONFIG,
        user_metadata={},
    ),
    "POST /get_info": lambda has: _body(model_id=has.run),
    "POST /optim_step": lambda has: Sound(body=has.of_run(adam_params={"learning_rate": 1e-4, "beta1": 0.9})),
    "POST /forward_backward": lambda has: Sound(body=has.training("forward_backward_input")),
    "POST /forward": lambda has: Sound(body=has.training("forward_input")),
    "POST /create_sampling_session": lambda has: _body(
        session_id=has.session, sampling_session_seq_id=has.number(), base_model=BASE_MODEL
    ),
    "GET /samplers/{sampler_id}": lambda has: _path(sampler_id=has.sampler),
    "POST /asample": lambda has: Sound(body=has.sample()),
    "POST /join_sampling_session": lambda has: _body(sampling_session_id=has.sampler),
    "POST /create_session": lambda has: _body(tags=["a"], user_metadata={"a": "b"}, sdk_version="1"),
    "POST /session_heartbeat": lambda has: _body(session_id=has.session),
    "POST /sessions/search": lambda has: _body(limit=2, owner={"type": "own"}, statuses=[{"type": "active"}]),
    "POST /sessions/{session_id}/finish": lambda has: Sound(
        {"session_id": has.new_session()}, body={"reason": {"type": "success"}, "detail": None}
    ),
    "PUT /sessions/{session_id}/project": lambda has: Sound(
        {"session_id": has.new_session()}, body={"project_id": has.project()}
    ),
    "GET /sessions/{session_id}": lambda has: _path(session_id=has.session),
    "GET /sessions/{session_id}/trace_export": lambda has: _path(session_id=has.session),
    "GET /sessions/{session_id}/trace.pftrace": lambda has: has.link(
        f"/sessions/{has.session}/trace_export",
        "/sessions/{session_id}/trace.pftrace",
        lambda reply: str(reply.json()["url"]),
    ),
    "POST /client/config": lambda has: _body(sdk_version="1"),
    "POST /client/dynamic_config": lambda has: _body(sdk_version="1"),
    "DELETE /auth/apikey/me": lambda has: Sound(organisation=f"that ends {has.number()}"),
    "POST /telemetry": lambda has: _body(
        events=[{}], platform="linux", sdk_version="1", session_id=has.session, process_uuid="1"
    ),
    "GET /billing/usage/events": lambda has: Sound(query=_HOUR),
    "POST /create_custom_loss": lambda has: Sound(body=custom_loss(has.new_session())),
    "POST /save_weights": lambda has: Sound(body=has.of_run(path=f"s{has.number()}", ttl_seconds=3600)),
    "POST /save_weights_for_sampler": lambda has: Sound(body=has.of_run(path=f"s{has.number()}", ttl_seconds=3600)),
    "POST /save_weights_external": lambda has: Sound(body=has.of_run(path=f"s{has.number()}", ttl_seconds=3600)),
    "POST /load_weights": lambda has: Sound(body=has.of_run(path=has.path, optimizer=True)),
    "POST /weights_info": lambda has: _body(tinker_path=has.path),
    "POST /copy_weights": lambda has: _body(
        source_path=has.path, session_id=has.other, model_seq_id=has.number(), ttl_seconds=3600
    ),
    "GET /training_runs/{run_id}": lambda has: _path(run_id=has.run),
    "GET /training_runs/{run_id}/checkpoints": lambda has: _path(run_id=has.run),
    f"POST {_ONE}/publish": lambda has: Sound(has.stays),
    f"DELETE {_ONE}/publish": lambda has: Sound(has.stays),
    f"PUT {_ONE}/ttl": lambda has: Sound(has.exported, body={"ttl_seconds": 3600}),
    f"DELETE {_ONE}": lambda has: Sound(has.saved("ends")),
    f"GET {_ONE}/external_weights_urls": lambda has: Sound(has.exported),
    f"GET {_ONE}/archive": lambda has: Sound(has.stays),
    "GET /downloads/{checkpoint_id}/files/{name}": lambda has: has.link(
        has.export("/external_weights_urls"),
        "/downloads/{checkpoint_id}/files/{name}",
        lambda reply: str(reply.json()["urls"]["adapter_config.json"]),
    ),
    "GET /downloads/{checkpoint_id}/checkpoint.tar": lambda has: has.link(
        has.export("/archive"), "/downloads/{checkpoint_id}/checkpoint.tar", lambda reply: reply.headers["location"]
    ),
    "GET /weft/prices": lambda has: Sound(query={"model": BASE_MODEL}),
    "GET /weft/models/{name}/tokenizer": lambda has: _path(name=BASE_MODEL),
    "GET /weft/models/{name}/tokenizer/{file}": lambda has: _path(name=BASE_MODEL, file="tokenizer.json"),
    "PUT /weft/budgets": lambda has: Sound(body={"scope": "org", "limit_nusd": 10**9}, organisation="that saves"),
    "DELETE /weft/budgets/{budget_id}": lambda has: Sound(
        {"budget_id": has.made("PUT", "budgets", "that saves", scope="org", limit_nusd=10**9)},
        organisation="that saves",
    ),
    "GET /weft/runs/{run_id}/health": lambda has: _path(run_id=has.run),
    "POST /weft/runs/{run_id}/metrics": lambda has: Sound(
        {"run_id": has.run}, body={"points": [{"step": has.number(), "name": "loss", "value": 1.0}]}
    ),
    "GET /weft/runs/{run_id}/metrics": lambda has: _path(run_id=has.run),
    "GET /weft/runs/{run_id}/notes": lambda has: _path(run_id=has.run),
    "PUT /weft/runs/{run_id}/notes": lambda has: Sound({"run_id": has.run}, body={"notes": "a"}),
    "POST /weft/keys": lambda has: _body(name="a", scopes=["train"], expires_at="2099-01-01T00:00:00Z"),
    "GET /weft/keys/{key_id}": lambda has: _path(key_id=has.key()),
    "DELETE /weft/keys/{key_id}": lambda has: _path(key_id=has.key()),
    "POST /weft/keys/{key_id}/rotate": lambda has: Sound({"key_id": has.key()}, body={"overlap_seconds": 1}),
    "POST /weft/members": lambda has: _body(email=f"m{has.number()}@example.com", role="viewer"),
    "PUT /weft/members/{user_id}": lambda has: Sound({"user_id": has.member()}, body={"role": "member"}),
    "DELETE /weft/members/{user_id}": lambda has: _path(user_id=has.member()),
    "POST /weft/invitations": lambda has: _body(role="viewer", days=1, email="a@example.com"),
    "DELETE /weft/invitations/{invitation_id}": lambda has: Sound(
        {"invitation_id": has.invitation()}, organisation="that invites"
    ),
    "POST /weft/projects": lambda has: _body(name=f"p{has.number()}"),
    "GET /weft/projects/{project_id}": lambda has: _path(project_id=has.project()),
    "PATCH /weft/projects/{project_id}": lambda has: Sound(
        {"project_id": has.project()},
        body={"name": f"q{has.number()}", "archived": True},
    ),
    "PUT /weft/rate_limits/{scope}/{id}": lambda has: Sound(
        {"scope": "key", "id": has.key()}, body={"requests_per_minute": 1, "max_in_flight": 1}
    ),
    "GET /weft/turns/{session}": lambda has: _path(session=has.talk()),
    "GET /v1/models/{name}": lambda has: _path(name=BASE_MODEL),
    "GET /sdk/{name}": lambda has: _path(name=WHEEL_NAME),
    "POST /v1/completions": lambda has: _body(**_DRAW, prompt=[40, 41]),
    "POST /v1/chat/completions": lambda has: _body(**_DRAW, messages=_MESSAGES),
    "POST /v1/chat/completions/tokens": lambda has: _body(**_DRAW, messages=_MESSAGES, tokens=[40, 41]),
    "POST /v1/responses": lambda has: _body(model=BASE_MODEL, input="1+1=", max_output_tokens=2, stream=False),
    "POST /inference/v1/generate": lambda has: _body(
        model=BASE_MODEL, token_ids=[40, 41], sampling_params={"max_tokens": 2, "n": 1, "seed": 1}
    ),
    **{
        f"POST {at}/{what}": lambda has, body=body: _body(model=BASE_MODEL, **body)  # type: ignore[misc]
        for at in ("", "/v1")
        for what, body in (("tokenize", {"prompt": "1+1="}), ("detokenize", {"tokens": [40, 41]}))
    },
}


_FILE = {"name": BASE_MODEL, "revision": "main"}
SOUND |= {
    "GET /hub/api/models/{name}": lambda has: _path(name=BASE_MODEL),
    "GET /hub/api/models/{name}/revision/{revision}": lambda has: Sound(_FILE),
    "GET /hub/api/models/{name}/tree/{revision}": lambda has: Sound(_FILE),
    "GET /hub/api/models/{name}/tree/{revision}/{folder}": lambda has: Sound(_FILE | {"folder": ""}),
    "GET /hub/{name}/resolve/{revision}/{file}": lambda has: Sound(_FILE | {"file": "tokenizer.json"}),
    "HEAD /hub/{name}/resolve/{revision}/{file}": lambda has: Sound(_FILE | {"file": "tokenizer.json"}),
}


def sound(has: Things, method: str, path: str) -> Sound:
    return SOUND.get(f"{method} {path.removeprefix(PREFIX)}", lambda _: Sound())(has)


#: What one part of a request becomes in a near miss; GONE takes it out.
GONE = object()
ODD: tuple[Any, ...] = (GONE, None, True, -1, 0, 0.5, 2**63, 1e308, "", "x", "\0", "../..", "é" * 300, [], {}, [None])


def near_miss(of: Sound, chance: random.Random) -> Sound | None:
    """The request with one part changed; waits stay as short as they are. None for a request without parts."""
    parts = [("path", (name,)) for name in of.path] + [("query", (name,)) for name in of.query]
    parts += [("body", at) for at in _places(of.body) if at[-1] != "timeout"]
    if not parts:
        return None
    where, at = chance.choice(parts)
    odd = chance.choice(ODD)
    given = copy.deepcopy(getattr(of, where))
    inner = given
    for step in at[:-1]:
        inner = inner[step]
    if odd is GONE and where != "path":
        del inner[at[-1]]
    else:
        inner[at[-1]] = odd if where == "body" else str(odd) or "x"
    return replace(of, **{where: given})


def _places(given: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
    for name, value in items:
        yield (*at, name)
        yield from _places(value, (*at, name))
