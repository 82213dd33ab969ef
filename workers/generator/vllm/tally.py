"""The open and ended requests of a VllmEngine, shared by the thread that drives it and the event loop."""

from __future__ import annotations

import queue
import threading

from workers.generator.engine import Finished, GenerateRequest


class Tally:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}  # request -> sequences of it that have not ended
        self._beyond = set[str]()  # requests beyond the slots
        self._ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._counts = dict.fromkeys(("prefill_tokens", "cache_hit_tokens", "sampled_tokens"), 0)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def busy(self) -> bool:
        """True if a request is open, or has ended and was not taken yet."""
        with self._lock:
            return bool(self._open) or not self._ended.empty()

    @property
    def unfinished(self) -> int:
        """Sequences that have not ended."""
        with self._lock:
            return sum(self._open.values())

    @property
    def beyond(self) -> int:
        """Those of them that need no slot."""
        with self._lock:
            return sum(self._open[request_id] for request_id in self._beyond)

    @property
    def totals(self) -> dict[str, int]:
        """Token totals, by their names in EngineStats."""
        return dict(self._counts)

    def enter(self, request: GenerateRequest, *, beyond: bool) -> None:
        """`beyond`: its sequences need no slot."""
        with self._lock:
            self._open[request.id] = request.num_samples
            if beyond:
                self._beyond.add(request.id)

    def sequence_ended(self, request_id: str) -> None:
        with self._lock:
            self._open[request_id] -= 1

    def refuse(self, finished: Finished) -> None:
        """Note the end of a request that was never open."""
        self._ended.put(finished)

    def end(self, finished: Finished, *, taken: bool = False) -> None:
        """A request has ended; `taken`: its canceller has received the end already."""
        with self._lock:
            self._open.pop(finished.id, None)
            self._beyond.discard(finished.id)
            facts = finished.facts
            self._counts["prefill_tokens"] += facts.prefill
            self._counts["cache_hit_tokens"] += facts.cache_hit
            self._counts["sampled_tokens"] += facts.sample
            if not taken:
                self._ended.put(finished)

    def take(self, timeout_s: float) -> list[Finished]:
        """The requests that have ended; waits for the first."""
        found = []
        try:
            found.append(self._ended.get(timeout=timeout_s))
            while True:
                found.append(self._ended.get_nowait())
        except queue.Empty:
            return found
