"""The pause of one client that has one operation under way, on a service that has nothing else to do: what a death
costs by itself, without a queue behind it. Plain HTTP: the client asks again at once, so that none of it is its own
waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.chaos.service import Embedded

#: Goals in seconds, on an idle machine.
GOALS_S = {"trainer, kill -9": 3.0, "generator, kill -9": 1.0, "server, kill -9": 3.0, "server, SIGTERM": 5.0}
#: Seconds between two deaths: a worker that has worked long enough is started again at once.
SPACING_S = 6.0
TOKENS = list(range(40, 104))


@dataclass
class Pause:
    """The pauses of one kind of death. `listens_s`: the time until the address answered again, if it was gone."""

    name: str
    goal_s: float
    pauses_s: list[float] = field(default_factory=list)
    listens_s: list[float] = field(default_factory=list)


class Client:
    """One session with a run and a sampler of the base model."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
        self._seq = self._samples = 0
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        self._session = self._post("create_session", session).json()["session_id"]
        model = {"session_id": self._session, "model_seq_id": 0, "base_model": "weft/tiny-moe"}
        self.result(self._post("create_model", model | {"lora_config": {"rank": 8}}).json()["request_id"])
        sampler = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": "weft/tiny-moe"}
        self._sampler = self._post("create_sampling_session", sampler).json()["sampling_session_id"]

    def train(self) -> str:
        inputs = {"target_tokens": {"data": TOKENS, "dtype": "int64"}}
        inputs["weights"] = {"data": [1.0] * len(TOKENS), "dtype": "float32"}
        model_input = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
        data = [{"model_input": model_input, "loss_fn_inputs": inputs}]
        return self._operation("forward_backward", forward_backward_input={"data": data, "loss_fn": "cross_entropy"})

    def step(self) -> str:
        return self._operation("optim_step", adam_params={})

    def sample(self) -> str:
        self._samples += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [40, 43, 46]}]}
        body = {"sampling_session_id": self._sampler, "seq_id": self._samples, "prompt": prompt, "num_samples": 2}
        body["sampling_params"] = {"max_tokens": 100, "stop": []}
        return str(self._post("asample", body).json()["request_id"])

    def result(self, request_id: str) -> None:
        """Wait for the result. RuntimeError if it is an error."""
        while (answer := self._post("retrieve_future", {"request_id": request_id})).status_code == 408:
            pass
        if answer.status_code != 200 or answer.content.startswith(b'{"error"'):
            raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:500]}")

    def reached_s(self) -> float:
        """Seconds until the address answers."""
        began = time.monotonic()
        while True:
            try:
                self._http.get("/healthz")
                return time.monotonic() - began
            except httpx.HTTPError:
                time.sleep(0.01)

    def _operation(self, route: str, **fields: Any) -> str:
        self._seq += 1
        body = {"model_id": f"{self._session}:train:0", "seq_id": self._seq, **fields}
        return str(self._post(route, body).json()["request_id"])

    def _post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        while True:
            try:
                answer = self._http.post(f"/api/v1/{route}", json=body)
                if answer.status_code != 503:
                    return answer
            except httpx.HTTPError:
                pass
            time.sleep(0.02)


def idle_pauses(service: Embedded, kills: int, only: str) -> list[Pause]:
    client = Client(service.url(0), service.key("acme"))
    harms: dict[str, tuple[Callable[[], str], Callable[[], object], bool]] = {
        "trainer, kill -9": (client.train, lambda: service.worker("trainer").kill(), False),
        "generator, kill -9": (client.sample, lambda: service.worker("generator").kill(), False),
        "server, kill -9": (client.train, service.kill, True),
        "server, SIGTERM": (client.train, service.stop, True),
    }
    found = []
    for name, (ask, harm, starts) in harms.items():
        if only not in name:
            continue
        pause = Pause(name, GOALS_S[name])
        for _ in range(kills):
            for calm in (client.train, client.step, client.sample):
                client.result(calm())
            service.worker("trainer"), service.worker("generator")
            time.sleep(SPACING_S)
            _harm_once(service, client, ask, harm, starts, pause)
        found.append(pause)
    return found


def _harm_once(
    service: Embedded, client: Client, ask: Callable[[], str], harm: Callable[[], object], starts: bool, pause: Pause
) -> None:
    request_id = ask()
    began = time.monotonic()
    harm()
    starting = threading.Thread(target=service.start)
    if starts:
        starting.start()
        pause.listens_s.append(client.reached_s())
    client.result(request_id)
    pause.pauses_s.append(time.monotonic() - began)
    if starts:
        starting.join()
