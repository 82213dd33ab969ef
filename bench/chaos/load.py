"""Clients of the official SDK that repeat the same work, and record every answer with its time.

What a client asks for repeats in cycles, and every cycle has the same answers to the bit: a trainer begins each with
the state that it saved right after it was created, and every sample has a seed. So a calm cycle tells what all answers
of the shaken ones must be.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

# Before the official SDK is imported: nothing is fetched, nothing is reported.
os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0", TINKER_API_KEY="tml-unset")

import tinker
from tinker import types

from bench.chaos.pauses import Answer
from bench.parts.data import datum

warnings.filterwarnings("ignore", category=FutureWarning)
logging.getLogger("tinker").setLevel(logging.CRITICAL)

BASE_MODEL = "weft/tiny-moe"
#: A call that takes longer than this counts as failed, in seconds.
PATIENCE_S = 180.0
#: Steps of a trainer's cycle, and samples of a sampler's.
STEPS, SAMPLES = 12, 24
ADAM = types.AdamParams(learning_rate=2e-3)


class Client(threading.Thread, ABC):
    """Works until `stop`, or for `cycles` cycles. A client whose call fails notes it and begins anew, as a person
    would: with another session and another run."""

    def __init__(self, name: str, url: str, key: str, *, cycles: int | None = None, think_s: float = 0.0) -> None:
        super().__init__(name=name, daemon=True)
        self.url, self.key, self.cycles, self.think_s = url, key, cycles, think_s
        self.answers: list[Answer] = []
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._done():
            try:
                self.work(tinker.ServiceClient(base_url=self.url, api_key=self.key))
            except Exception as error:
                self._note(-1, f"{type(error).__name__}: {str(error)[:300]}", failed=True)
                self._stopped.wait(0.2)

    @abstractmethod
    def work(self, service: Any) -> None:
        """Prepare, then repeat cycles."""

    @abstractmethod
    def cycle(self, *prepared: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        """The operations of a cycle: each one's future, and the part of its result to compare."""

    def go(self, depth: int, *prepared: Any) -> None:
        """Run cycles, with `depth` operations under way at a time."""
        waiting: deque[tuple[int, Any, Callable[[Any], Any]]] = deque()
        while not self._done():
            for place, (future, seen) in enumerate(self.cycle(*prepared)):
                waiting.append((place, future, seen))
                while len(waiting) > depth:
                    self._take(*waiting.popleft())
            if self.cycles is not None:
                self.cycles -= 1
        while waiting:
            self._take(*waiting.popleft())

    def _take(self, place: int, future: Any, seen: Callable[[Any], Any]) -> None:
        found = seen(future.result(timeout=PATIENCE_S))
        self._note(place, hashlib.sha256(repr(found).encode()).hexdigest())

    def _note(self, place: int, value: str, *, failed: bool = False) -> None:
        self.answers.append(Answer(time.monotonic(), place, value, failed))

    def _done(self) -> bool:
        return self._stopped.is_set() or self.cycles == 0


class Trainer(Client):
    """Submits two forward_backwards and a step at a time without waiting, up to two steps ahead."""

    def __init__(self, name: str, url: str, key: str, seed: int, **options: Any) -> None:
        super().__init__(name, url, key, **options)
        self.seed = seed

    def work(self, service: Any) -> None:
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=self.seed).result(timeout=PATIENCE_S)
        start = run.save_state("start").result(timeout=PATIENCE_S).path
        self.go(6, run, start)

    def cycle(self, run: Any, start: str) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        yield run.load_state_with_optimizer(start), lambda loaded: "loaded"
        for step in range(STEPS):
            for part in range(2):
                yield run.forward_backward(supervised(100 * self.seed + 2 * step + part), "cross_entropy"), trained
            yield run.optim_step(ADAM), lambda stepped: sorted(stepped.metrics.items())
            time.sleep(self.think_s)


class Sampler(Client):
    """Samples with seeds, three at a time: from the base model; or, with `adapter`, from a run that has made a step."""

    def __init__(self, name: str, url: str, key: str, seed: int, *, adapter: bool, **options: Any) -> None:
        super().__init__(name, url, key, **options)
        self.seed, self.adapter = seed, adapter

    def work(self, service: Any) -> None:
        if self.adapter:
            run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=self.seed).result(timeout=PATIENCE_S)
            run.forward_backward(supervised(self.seed), "cross_entropy").result(timeout=PATIENCE_S)
            run.optim_step(ADAM).result(timeout=PATIENCE_S)
            sampler = run.save_weights_and_get_sampling_client().result(timeout=PATIENCE_S)
        else:
            sampler = service.create_sampling_client(base_model=BASE_MODEL).result(timeout=PATIENCE_S)
        self.go(3, sampler)

    def cycle(self, sampler: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        for place in range(SAMPLES):
            prompt = types.ModelInput.from_ints([40 + 3 * i + place for i in range(8)])
            params = types.SamplingParams(max_tokens=24, seed=100 * self.seed + place, stop=[])
            yield sampler.sample(prompt, 2, params), sampled
            time.sleep(self.think_s)


def supervised(seed: int, sequences: int = 2, length: int = 12) -> list[types.Datum]:
    """Token ids that differ for each seed."""
    data = []
    for i in range(sequences):
        tokens = [(seed * 31 + 7 * i + 5 * j) % 300 + 30 for j in range(length + 1)]
        data.append(datum(tokens))
    return data


def trained(result: Any) -> object:
    return sorted(result.metrics.items()), [output["logprobs"].data for output in result.loss_fn_outputs]


def sampled(result: Any) -> object:
    return [(sequence.tokens, sequence.logprobs, sequence.stop_reason) for sequence in result.sequences]
