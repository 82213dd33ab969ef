"""The adapters an engine has in memory: read on first use, kept for the next request, evicted least recently used.

One thread reads, in the order of the requests; the engine's own thread does everything else and, between two steps,
installs what has been read. So only requests that need an adapter wait for its disk. An adapter in use, or being read,
is never evicted; if those alone exceed the cap, the cap is exceeded until they are released.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from store.blobs.contract import Damaged, Weights, reading
from workers.model.adapters.adapter import Adapter, AdapterFileError

log = logging.getLogger(__name__)

GONE = "the sampler weights {name!r} are gone: save them again and make a new sampler"


class AdapterUnusable(Exception):
    """The weights of an adapter cannot be loaded. The message goes to the user: it names the adapter, not its
    folder."""


@dataclass(eq=False)
class HeldAdapter:
    """`adapter` may be replaced between steps (`AdapterCache.install`): look it up anew for each. It is not set before
    the first read has succeeded. `users` is the number of requests that hold it."""

    name: str
    adapter: Adapter = field(init=False, repr=False)
    size_bytes: int = 0
    version: int = 0
    #: A number that no other weights have; 0 before any are loaded.
    weights: int = 0
    users: int = 0
    #: Numbers of the newest read that was requested, and of the newest that has ended, successful or not.
    asked: int = 0
    ended: int = 0
    failed: bool = False  # whether the read `ended` failed, so that `weights` are older than requested

    @property
    def coming(self) -> bool:
        """Whether newer weights are being read."""
        return self.ended < self.asked


@dataclass(frozen=True)
class _Read:
    number: int
    held: HeldAdapter
    found: Future[tuple[Adapter, int]]


class AdapterCache:
    def __init__(self, load: Callable[[Path], tuple[Adapter, int]], max_bytes: int) -> None:
        """`load` reads the weights in a folder and their policy version, in the reading thread."""
        self._load = load
        self._max_bytes = max_bytes
        self._here: OrderedDict[str, HeldAdapter] = OrderedDict()
        self._reads: deque[_Read] = deque()  # that have not been installed, in order
        self._numbers = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-reader")

    def __len__(self) -> int:
        return sum(held.weights > 0 for held in self._here.values())

    @property
    def size_bytes(self) -> int:
        return sum(held.size_bytes for held in self._here.values())

    @property
    def reading(self) -> bool:
        """Whether there is, or will be, something to install."""
        return bool(self._reads)

    def acquire(self, name: str, folder: Weights | None) -> HeldAdapter:
        """The adapter called `name`, being read from `folder` if it is not in memory: it may be used once the read
        `asked` has `ended`. Pair each call with a `release`."""
        held = self._here.setdefault(name, HeldAdapter(name))
        if not held.coming and (held.failed or not held.weights):
            self._read(held, folder)
        held.users += 1
        self._here.move_to_end(name)
        return held

    def release(self, held: HeldAdapter) -> None:
        held.users -= 1
        self._evict()

    def swap(self, name: str, folder: Weights) -> None:
        """Begin to make `name` mean the weights in `folder`, also for requests that hold it. If they cannot be read,
        those keep the old weights, and the next `acquire` reads from its own folder."""
        self._read(self._here.setdefault(name, HeldAdapter(name)), folder)

    def wait(self, timeout_s: float) -> None:
        """Wait until the next read has ended."""
        if self._reads:
            wait([self._reads[0].found], timeout_s)

    def install(self) -> tuple[HeldAdapter, BaseException | None] | None:
        """Take in the oldest read if it has ended. Returns its adapter and its exception, if it failed: AdapterUnusable
        is a fault of the files."""
        if not self._reads or not self._reads[0].found.done():
            return None
        read = self._reads.popleft()
        held, error = read.held, read.found.exception()
        held.ended, held.failed = read.number, error is not None
        if error is None:
            held.adapter, held.version = read.found.result()
            held.size_bytes = held.adapter.flat.numel() * held.adapter.flat.element_size()
            held.weights = read.number
        elif not held.weights and not held.coming:
            del self._here[held.name]
        self._evict()
        return held, error

    def close(self) -> None:
        """End the thread; pending reads are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, held: HeldAdapter, folder: Weights | None) -> None:
        """Begin to read. An older read of this adapter that has not begun is cancelled."""
        for older in [read for read in self._reads if read.held is held and read.found.cancel()]:
            self._reads.remove(older)
        held.asked = next(self._numbers)
        found = self._thread.submit(self._from_disk, held.name, folder)
        self._reads.append(_Read(held.asked, held, found))

    def _from_disk(self, name: str, folder: Weights | None) -> tuple[Adapter, int]:
        """In the reading thread."""
        try:
            if folder is None:
                raise FileNotFoundError(name)
            with reading(folder) as here:
                return self._load(here)
        except FileNotFoundError as error:
            raise AdapterUnusable(GONE.format(name=name)) from error
        except (AdapterFileError, Damaged) as error:
            log.warning("sampler weights %r: %s", name, error)
            raise AdapterUnusable(f"the sampler weights {name!r} are damaged or of another base model") from error

    def _evict(self) -> None:
        excess = self.size_bytes - self._max_bytes
        for held in list(self._here.values()):
            if excess <= 0:
                return
            if held.users == 0 and not held.coming:
                del self._here[held.name]
                excess -= held.size_bytes
