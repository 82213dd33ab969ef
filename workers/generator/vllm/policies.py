"""Which adapters vLLM has, under which names, and which version of a policy a token was drawn from.

vLLM sees an adapter as `name@version`, in a folder of its own, and never the same name with other weights: otherwise
its prefix cache and its adapters in memory would be wrong. When a policy moves, new requests use the new name. Requests
in flight keep the old name, and its weights are replaced; its folder then links to the new ones, should vLLM read it
again.

vLLM labels tokens with one number for the whole server. Here that is the `epoch`, which every replacement increments;
each pushed adapter has the epochs from which on each of its versions was in use. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.wire.binary.sample_codec import PolicySpan

from store.blobs.contract import Weights
from workers.generator.adapters import AdapterUnusable
from workers.generator.vllm.adapters import LoraLimits, convert
from workers.generator.vllm.client import VllmClient, VllmRefused
from workers.model.config import DecoderConfig

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Pushed:
    """An adapter that vLLM knows by `name` and, inside its engine, by `number`. `folder`, which vLLM was given, is a
    link to `weights`. `users` is the number of requests that hold it."""

    name: str
    folder: Path
    weights: Path
    versions: list[tuple[int, int]]  # (from this epoch on, version)
    number: int = 0
    users: int = 0

    @property
    def salt(self) -> str:
        """The cache salt of prompts computed with these weights."""
        return f"{self.name}:{self.versions[-1][0]}"

    @property
    def version(self) -> int:
        return self.versions[-1][1]

    def version_at(self, epoch: int) -> int:
        return next((version for since, version in reversed(self.versions) if since <= epoch), self.versions[0][1])


@dataclass
class Policies:
    client: VllmClient
    config: DecoderConfig
    limits: LoraLimits
    folder: Path
    epoch: int = 0
    _current: OrderedDict[str, Pushed] = field(default_factory=OrderedDict)
    _retired: list[Pushed] = field(default_factory=list)  # names that only requests in flight still use
    _life: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _counter: itertools.count[int] = field(default_factory=itertools.count)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __len__(self) -> int:
        return len(self._current) + len(self._retired)

    async def acquire(self, name: str, source: Weights | None) -> Pushed:
        """The adapter called `name`, pushed from `source` unless it is there. Raises AdapterUnusable. Pair each call
        with a `release`; who is cancelled meanwhile holds none, but what has begun is brought to its end."""
        await self._lock.acquire()
        acquiring = asyncio.ensure_future(self._acquire(name, source))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(_unwanted)
            raise

    async def _acquire(self, name: str, source: Weights | None) -> Pushed:
        """`acquire`, called with the lock held, which is released at the end."""
        try:
            pushed = self._current.get(name) or await self._push(name, source)
            self._current.move_to_end(name)
            pushed.users += 1
            await self._evict()
            return pushed
        finally:
            self._lock.release()

    async def release(self, pushed: Pushed) -> None:
        pushed.users -= 1
        async with self._lock:
            await self._evict()

    async def swap(self, name: str, source: Weights, *, in_place: bool = True) -> None:
        """From now on `name` means the weights in `source`; with `in_place`, for requests in flight too. Raises
        AdapterUnusable: then requests in flight keep the old weights, and the next one brings a folder."""
        async with self._lock:
            if name in self._current:
                self._retired.append(self._current.pop(name))
            fresh = await self._push(name, source)
            moved = [old for old in self._retired if old.users and _stem(old) == _stem(fresh)]
            if moved and in_place:
                self.epoch += 1
                for old in moved:
                    _lead(old.folder, fresh.weights)
                await self.client.swap([(old.name, old.number, str(old.folder)) for old in moved], self.epoch)
                for old in moved:
                    old.versions.append((self.epoch, fresh.version))
            await self._evict()

    def forget(self) -> None:
        """Forget all adapters: vLLM was restarted and has none of them."""
        for pushed in [*self._current.values(), *self._retired]:
            _remove(pushed)
        self._current.clear()
        self._retired.clear()
        self.epoch = 0

    async def _push(self, name: str, source: Weights | None) -> Pushed:
        """Have vLLM load the adapter in `source`, and make it the current one of this name."""
        key = f"{self._life}-{next(self._counter)}"
        weights = self.folder / f"{key}.weights"
        pushed: Pushed | None = None
        try:
            version = await asyncio.to_thread(convert, name, source, weights, self.config, self.limits)
            pushed = Pushed(f"{_key(name)}@{version}-{key}", self.folder / key, weights, [(self.epoch, version)])
            _lead(pushed.folder, weights)
            pushed.number = await self.client.load_adapter(pushed.name, str(pushed.folder))
        except Exception as error:
            self._retired += [pushed] if pushed is not None else []
            await self._evict()
            if not isinstance(error, VllmRefused):
                raise
            log.warning("sampler weights %r: vLLM does not load them: %s", name, error)
            raise AdapterUnusable(f"the sampler weights {name!r} could not be loaded by vLLM") from error
        self._current[name] = pushed
        return pushed

    async def _evict(self) -> None:
        """Keep as many idle adapters as vLLM does, and unload those used longest ago. Names that are no longer current
        are unloaded as soon as no request uses them."""
        excess = len(self._current) - 2 * self.limits.max_adapters
        for name, pushed in list(self._current.items()):
            if excess > 0 and not pushed.users:
                self._retired.append(self._current.pop(name))
                excess -= 1
        for old in [old for old in self._retired if not old.users]:
            try:
                await self.client.unload_adapter(old.name)
            except VllmRefused as error:
                log.warning("an adapter that nobody uses could not be unloaded: %s", error)
            self._retired.remove(old)
            _remove(old, [*self._current.values(), *self._retired])


def _unwanted(acquiring: asyncio.Task[Pushed]) -> None:
    """Let go of an adapter that was pushed when nobody waited for it any more."""
    if not acquiring.cancelled() and acquiring.exception() is None:
        acquiring.result().users -= 1


def spans(pushed: Pushed | None, labels: list[dict[str, Any]] | None, length: int) -> tuple[PolicySpan, ...]:
    """The versions that the `length` tokens of a sequence were drawn from, by vLLM's own labels."""
    found: list[PolicySpan] = []
    for label in labels or [{"version": "0", "start": 0, "end": length}]:
        epoch = int(label["version"]) if str(label["version"]).isdigit() else 0
        version = pushed.version_at(epoch) if pushed else 0
        count = min(int(label["end"]), length) - int(label["start"])
        if found and found[-1].version == version:
            count += found.pop().length
        if count > 0:
            found.append(PolicySpan(version, count))
    return tuple(found)


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _stem(pushed: Pushed) -> str:
    return pushed.name.partition("@")[0]


def _lead(link: Path, weights: Path) -> None:
    """Make `link` point to `weights`, atomically for readers."""
    fresh = link.with_name(f"{link.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(weights.name)
    os.replace(fresh, link)


def _remove(pushed: Pushed, others: Sequence[Pushed] = ()) -> None:
    """Delete its folder, and its old and new weights unless another folder links to them."""
    weights = {pushed.weights.resolve(), pushed.folder.resolve()} - {other.folder.resolve() for other in others}
    with suppress(OSError):
        pushed.folder.unlink(missing_ok=True)
    for folder in weights:
        shutil.rmtree(folder, ignore_errors=True)
