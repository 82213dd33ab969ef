"""Whatever is sent to the API, the server answers that the request is wrong, and goes on serving."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from weft.wire.binary.train_codec import ArrayDatum

from api.server.app import front
from api.server.openapi import DOORS, PREFIX, document
from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.raw import Post, RawClient, train_post
from tests.search import examples

if TYPE_CHECKING:  # not imported by each process that collects tests: it takes two seconds
    import schemathesis

pytestmark = pytest.mark.server

#: Examples for each operation. All of them together take well below a minute.
EXAMPLES = 4
#: The operations of the API are shared out among so many tests. Each test makes its requests when it runs, not when it
#: is collected.
PARTS = 8
ME = f"{PREFIX}/auth/apikey/me"
#: Requests here are made with keys of other organisations, by their names: one deletes the key that calls it, the other
#: sets a budget, which may leave nothing to spend.
ENDING = {ME: "that ends", f"{PREFIX}/weft/budgets": "that saves"}
#: Checkpoints: requests that delete one, or let it expire, name the first; all others name the second.
ENDS, STAYS = "ends", "stays"
#: Statuses that say that the server is at fault; 503 too, since this server is not stopping.
FAULTS = range(500, 600)


@dataclass(frozen=True)
class Target:
    """A server, and the ids of things on it for requests to name."""

    client: RawClient
    known: dict[str, Any]
    turn: Iterator[int]
    session: requests.Session
    #: The keys for requests to ENDING, by path.
    keys: dict[str, str]

    def fill_in(self, given: Any, path: str = "") -> Any:
        """Every other time, put in ids that exist, so that requests get past the look-up; and keep waits short."""
        if not isinstance(given, dict) or next(self.turn) % 2:
            return given
        filled = {name: self.known.get(name, value) for name, value in given.items()}
        if path in DOORS:
            short = {"max_tokens": 2, "max_completion_tokens": 2, "n": 2}
            if path == "/v1/responses":
                short = {"max_output_tokens": 2}
            params = filled.get("sampling_params")
            filled |= {"sampling_params": {**params, **short}} if isinstance(params, dict) else short
        return filled


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    server = Weftd(tmp_path_factory.mktemp("fuzzed")).start()
    client = RawClient(server, "fuzz")
    run_id = client.new_run()
    sampler = client.json(
        "create_sampling_session", session_id=client.session_id, sampling_session_seq_id=0, base_model=BASE_MODEL
    )
    for number, name in enumerate((ENDS, STAYS), 1):
        saved = client.json("save_weights", model_id=run_id, path=name, seq_id=number, type="save_weights")
        client.result(saved["request_id"])
    path = f"tinker://{run_id}/weights/{STAYS}"
    known = {
        "session_id": client.session_id,
        "model_id": run_id,
        "run_id": run_id,
        "base_model": BASE_MODEL,
        "sampling_session_id": sampler["sampling_session_id"],
        "sampler_id": sampler["sampling_session_id"],
        "request_id": saved["request_id"],
        "path": path,
        "tinker_path": path,
        "source_path": path,
        "kind": "weights",
        "name": STAYS,
        "model": BASE_MODEL,
    }
    with requests.Session() as session:
        session.trust_env = False  # looking for proxies takes longer than the request
        yield Target(client, known, itertools.count(), session, {at: server.key(name) for at, name in ENDING.items()})
    me = httpx.get(f"{server.url}{ME}", headers={"X-API-Key": client.key})
    assert me.status_code == 200, "nothing was looked at any more: the requests had ended their own key"
    # And what they name is there to the end, and can be paid.
    client.json("weights_info", tinker_path=path)
    asked = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [40]}]}, "sampling_params": {"max_tokens": 100}}
    client.json("asample", sampling_session_id=known["sampling_session_id"], seq_id=10**6, num_samples=8, **asked)
    assert httpx.get(f"{server.url}{PREFIX}/healthz").json() == {"status": "ok"}
    assert server.stop() == 0
    assert "internal error" not in server.log()


@cache
def api() -> schemathesis.BaseSchema:
    """The API as its OpenAPI document describes it."""
    import schemathesis

    whole = document(front())
    paths = {path: found for path, found in whole["paths"].items() if path.startswith((PREFIX, *DOORS))}
    return schemathesis.openapi.from_dict(whole | {"paths": paths})


@pytest.mark.search
@pytest.mark.parametrize("part", range(PARTS))
def test_no_request_is_a_fault_of_the_server(part: int, target: Target, subtests: pytest.Subtests) -> None:
    from schemathesis.pytest.lazy import get_all_tests

    some = api().include(path=list(api())[part::PARTS])
    for found in get_all_tests(schema=some, test_func=is_no_fault, settings=None, given_kwargs={}):
        operation, attempt = found.ok()
        with subtests.test(operation.label):
            attempt(target=target)


@settings(
    max_examples=examples(EXAMPLES),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def is_no_fault(case: schemathesis.Case[Any], target: Target) -> None:
    case.body = target.fill_in(case.body, case.path)
    if not case.path.endswith("/finish"):
        case.path_parameters = target.fill_in(case.path_parameters)
        if (case.method == "DELETE" or case.path.endswith("/ttl")) and "name" in case.path_parameters:
            case.path_parameters |= {"name": ENDS}
    where, key = f"http://{target.client.address}", target.keys.get(case.path, target.client.key)
    reply = case.call(base_url=where, session=target.session, headers={"X-API-Key": key})
    assert reply.status_code not in FAULTS, f"{case.method} {case.formatted_path}: {reply.text}"
    operation = api().raw_schema["paths"][case.path].get(case.method.lower())  # also other methods are tried
    assert str(reply.status_code) in (operation["responses"] if operation else {"405"}), (
        f"{case.method} {case.formatted_path}: {reply.status_code} {reply.text}"
    )
    if reply.status_code == 400:
        assert reply.content, "the SDK takes a 400 without a body for a proxy's, and retries"


def test_broken_protobuf_is_no_fault_of_the_server(target: Target) -> None:
    """A valid forward_backward with bytes changed, taken out and put in: of some nothing can be read, of others all."""
    tokens, unread, tried = np.arange(40, 50, dtype=np.int32), 0, 0
    inputs = {"target_tokens": tokens.astype(np.int64), "weights": np.ones(10, dtype=np.float32)}

    @settings(max_examples=examples(50), deadline=None)
    @given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
    def attempt(seed: int, changes: int, as_long: bool) -> None:
        nonlocal unread, tried
        tried += 1
        seq = 10**6 + next(target.turn)  # one that was taken is looked at no further
        post = train_post(target.known["run_id"], seq, [ArrayDatum(tokens, inputs)], forward_only=True)
        body, chance = bytearray(post.body), random.Random(seed)
        for _ in range(1 if as_long else changes):
            at, count = chance.randrange(len(body)), 1 + chance.randrange(2)
            body[at : at + count] = chance.randbytes(count if as_long else chance.randrange(3))
        reply = target.client.post(Post(post.path, bytes(body), post.content_type))
        assert reply.status_code not in FAULTS, reply.text
        unread += "Error parsing message" in reply.text

    attempt()
    assert tried / 10 < unread < 0.9 * tried
