"""The requests that an engine has, the state of each, and how it ends.

A request is queued until its prompt is computed, then it runs; while some of its sequences have no token yet, for lack
of memory, it is also starting. However it ends, everything it holds is released here, and its `Finished` waits in
`finished` for the engine's next step to return.
"""

from __future__ import annotations

from workers.generator.adapters import AdapterCache, HeldAdapter
from workers.generator.engine import Finished
from workers.generator.requests.prefill_queue import PrefillQueue
from workers.generator.requests.progress import RequestProgress, SequenceProgress
from workers.generator.requests.refusals import failed
from workers.generator.requests.seating import Seating


class OpenRequests:
    def __init__(self, queue: PrefillQueue, seating: Seating, adapters: AdapterCache) -> None:
        self.here: dict[str, RequestProgress] = {}  # requests that have not ended, by id
        self.queue = queue
        self.running: dict[str, RequestProgress] = {}  # prefilled requests that have not ended
        self.starting: dict[str, RequestProgress] = {}  # running requests with a sequence that has no token yet
        self.finished: list[Finished] = []
        self._seating = seating
        self._adapters = adapters

    @property
    def waiting(self) -> int:
        """Sequences that have not started."""
        queued = sum(progress.unstarted for progress in self.queue)
        return queued + sum(progress.unstarted for progress in self.running.values())

    @property
    def stuck(self) -> bool:
        """True if no request can go on before an adapter has been read."""
        return not (self.running or self.finished or self.queue.ready)

    def enter(self, progress: RequestProgress) -> None:
        self.here[progress.request.id] = progress
        self.queue.add(progress)

    def run(self, progress: RequestProgress) -> None:
        """Move a request whose prompt is computed from the queue to the running ones."""
        self.queue.discard(progress)
        self.running[progress.request.id] = progress
        if progress.unstarted:
            self.starting[progress.request.id] = progress

    def score_only(self, progress: RequestProgress) -> None:
        """End a request whose prompt is computed and that wants no tokens."""
        for sequence in progress.sequences:
            sequence.stop_reason = "length"
        self._end(progress)

    def retire(self, sequence: SequenceProgress) -> None:
        """A sequence has ended. A waiting sibling takes over its pages, which contain the prompt; otherwise they are
        freed."""
        progress = sequence.owner
        if not self._keeps_routes(progress, [sequence]):
            return
        if progress.unstarted:
            self._seating.hand_over(sequence, progress.sequences[progress.started])
            progress.started += 1
            return
        self._seating.leave(sequence)
        if progress.done:
            self._end(progress)

    def stop_stale(self, progress: RequestProgress) -> None:
        """End sequences that are too old. If a request's prompt is not computed and newer weights are being read, it
        waits for these instead."""
        stale, adapter = [] if progress.awaits else progress.too_old(), progress.adapter
        if stale and progress.prompt_version is None and adapter is not None and adapter.coming:
            progress.awaits = adapter.asked
            return
        if not self._keeps_routes(progress, stale):
            return
        for sequence in stale:
            sequence.stop_reason, sequence.stale = "length", True
            self._seating.leave(sequence)
            progress.given_up = True
        if stale and progress.done:
            self._end(progress)

    def adapter_read(self, held: HeldAdapter, error: BaseException | None) -> None:
        """A read has ended: requests that waited for it continue, or fail with it."""
        for progress in [p for p in self.here.values() if p.adapter is held and 0 < p.awaits <= held.ended]:
            progress.awaits = 0
            if error is None:
                self.stop_stale(progress)
            else:
                self.fail(progress, error)

    def fail(self, progress: RequestProgress, error: BaseException) -> None:
        """End a request that failed. Its pages are wiped, because they may not be finite."""
        for sequence in progress.sequences[: progress.started]:
            self._seating.clear(sequence)
        self._forget(progress)
        self.finished.append(failed(progress.request.id, error, progress.facts))

    def cancel(self, request_id: str) -> Finished | None:
        """End a request with the tokens it has; None if there is no such request."""
        progress = self.here.get(request_id)
        if progress is None:
            return None
        started = progress.sequences[: progress.started]
        if not self._keeps_routes(progress, [each for each in started if each.stop_reason is None]):
            return self.finished.pop()
        result = progress.finished()
        self._forget(progress)
        return result

    def _end(self, progress: RequestProgress) -> None:
        self.finished.append(progress.finished())
        self._forget(progress)

    def _forget(self, progress: RequestProgress) -> None:
        """Release everything a request holds."""
        del self.here[progress.request.id]
        self.starting.pop(progress.request.id, None)
        if self.running.pop(progress.request.id, None) is None:
            self.queue.discard(progress)
        for sequence in progress.sequences[: progress.started]:
            self._seating.leave(sequence)
        if progress.adapter is not None:
            self._adapters.release(progress.adapter)

    def _keeps_routes(self, progress: RequestProgress, ending: list[SequenceProgress]) -> bool:
        """Keep the routes of sequences, if requested, before their pages are reused. Returns False if that raised: the
        request has then failed."""
        try:
            for sequence in ending if progress.request.return_routed_experts else ():
                sequence.routes = self._seating.routes(sequence) if sequence.tokens else None
        except Exception as error:
            self.fail(progress, error)
            return False
        return True
