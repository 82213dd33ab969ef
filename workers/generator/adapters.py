"""The adapters an engine has in memory: read on first use, kept for the next request, evicted least recently used.

One thread reads, one adapter at a time; the engine's own thread does everything else and, between two steps, installs
what has been read. So only requests that need an adapter wait for its disk. Which adapters may be in memory, and which
is read next, is decided by `requests.admission`.

Adapters in memory, with the one being read, take at most `max_bytes`; or there is a single larger one. Newer weights of
an adapter in memory come on top of that while they are read.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
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
    """An adapter that requests hold. `adapter` may be replaced between steps (`AdapterCache.install`), so look it up
    for each step; it exists only while `weights` is not 0. `users` is the number of requests that hold it."""

    name: str
    adapter: Adapter = field(init=False, repr=False)
    size_bytes: int = 0
    version: int = 0
    #: The number of the weights in memory, unique to them; 0 while there are none.
    weights: int = 0
    source: Weights | None = None  # where the weights in memory were read from
    users: int = 0
    #: Numbers of the newest read that was requested, of the newest that has begun, and of the newest that has ended,
    #: successful or not.
    asked: int = 0
    begun: int = 0
    ended: int = 0
    folder: Weights | None = None  # what the read `asked` is to read
    next_bytes: int | None = None  # how much memory that will take; None: not known before it is tried
    failed: bool = False  # whether the read `ended` failed, so that `weights` are older than requested

    @property
    def coming(self) -> bool:
        """True if newer weights of the adapter are being read, or are to be."""
        return self.ended < self.asked

    @property
    def waits(self) -> bool:
        """True if the newest read that was asked for has not begun."""
        return self.begun < self.asked

    @property
    def needs_bytes(self) -> int | None:
        """How much memory the adapter takes while it is used; None if that is not known yet."""
        return self.size_bytes if self.weights else self.next_bytes


@dataclass(frozen=True)
class Flight:
    """A read under way, of at most `size_bytes`. Its result is the adapter and its version; or, if it needs more, how
    many bytes it would take."""

    number: int
    held: HeldAdapter
    folder: Weights | None
    size_bytes: int
    found: Future[tuple[Adapter, int] | int]


class AdapterCache:
    def __init__(
        self, load: Callable[[Path], tuple[Adapter, int]], size: Callable[[Path], int], max_bytes: int
    ) -> None:
        """`load` reads the weights in a folder and their policy version, `size` the bytes that they will take; both in
        the reading thread."""
        self.max_bytes = max_bytes
        #: The read under way, or done and not installed yet.
        self.flight: Flight | None = None
        self._load, self._size = load, size
        self._here: OrderedDict[str, HeldAdapter] = OrderedDict()
        self._numbers = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-reader")
        # start the thread now: a process that may have no more threads fails here and not while it serves
        self._thread.submit(int)

    def __len__(self) -> int:
        return sum(held.weights > 0 for held in self._here.values())

    @property
    def size_bytes(self) -> int:
        return sum(held.size_bytes for held in self._here.values())

    @property
    def reading(self) -> bool:
        """True if a read is under way, whose adapter can then be installed."""
        return self.flight is not None

    def acquire(self, name: str, folder: Weights | None) -> HeldAdapter:
        """The adapter called `name`, to be read from `folder` if it is not in memory: it may be used once the read
        `asked` has `ended`. Pair each call with a `release`."""
        held = self._here.setdefault(name, HeldAdapter(name))
        if not held.coming and (held.failed or not held.weights):
            self._ask(held, folder)
        held.users += 1
        self._here.move_to_end(name)
        return held

    def release(self, held: HeldAdapter) -> None:
        held.users -= 1
        self._forget(held)
        self._shrink()

    def swap(self, name: str, folder: Weights) -> None:
        """Make `name` mean the weights in `folder`, also for requests that hold it. If they cannot be read, those keep
        the old weights, and the next `acquire` reads from its own folder. Weights that nobody holds are read when
        somebody does."""
        self._ask(self._here.setdefault(name, HeldAdapter(name)), folder)

    def begin(self, held: HeldAdapter, keep: Container[HeldAdapter]) -> None:
        """Begin to read the latest requested weights, which fit beside the adapters to `keep` (or beside its own older
        weights). Other adapters make room."""
        size = held.needs_bytes or 0
        self._shrink(size, keep)
        self._read(held, size, None)

    def try_to_read(self, held: HeldAdapter) -> None:
        """Begin to read weights of unknown size. If they do not fit into the free memory, `needs_bytes` is known after
        `install`."""
        free = max(0, self.max_bytes - self.size_bytes)
        self._read(held, free, free)

    def wait(self, timeout_s: float) -> None:
        """Wait until the read has ended."""
        if self.flight is not None:
            wait([self.flight.found], timeout_s)

    def install(self) -> tuple[HeldAdapter, BaseException | None] | None:
        """Install an adapter whose read has ended. Returns the adapter, and the exception if the read failed:
        AdapterUnusable if the files are at fault."""
        flight = self.flight
        if flight is None or not flight.found.done():
            return None
        self.flight, held, error = None, flight.held, flight.found.exception()
        found = flight.found.result() if error is None else None
        if isinstance(found, int):  # there was no room; the size is known now
            if not held.waits:
                held.begun, held.next_bytes = held.ended, found
        else:
            held.ended, held.failed = flight.number, found is None
        if isinstance(found, tuple):
            held.adapter, held.version = found
            held.size_bytes = found[0].flat.numel() * found[0].flat.element_size()
            held.weights, held.source = flight.number, flight.folder
        self._forget(held)
        self._shrink()
        return held, error

    def close(self) -> None:
        """End the thread; pending reads are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _ask(self, held: HeldAdapter, folder: Weights | None, size_bytes: int | None = None) -> None:
        """Request a read of its weights. An older request that has not begun is dropped."""
        if not held.users:
            self._drop(held)
        held.asked, held.folder, held.next_bytes = next(self._numbers), folder, size_bytes

    def _read(self, held: HeldAdapter, size_bytes: int, most: int | None) -> None:
        found = self._thread.submit(self._from_disk, held.name, held.folder, most)
        held.begun = held.asked
        self.flight = Flight(held.asked, held, held.folder, size_bytes, found)

    def _from_disk(self, name: str, folder: Weights | None, most: int | None) -> tuple[Adapter, int] | int:
        """Read the weights, in the reading thread. If they take more than `most`, returns their size instead."""
        try:
            if folder is None:
                raise FileNotFoundError(name)
            if isinstance(folder, Path) and (size := self._too_large(folder, most)):
                return size  # before all of it is read and checked
            with reading(folder) as here:
                size = 0 if most is None else self._size(here)
                return size if most is not None and size > most else self._load(here)
        except FileNotFoundError as error:
            raise AdapterUnusable(GONE.format(name=name)) from error
        except (AdapterFileError, Damaged) as error:
            log.warning("sampler weights %r: %s", name, error)
            raise AdapterUnusable(f"the sampler weights {name!r} are damaged or of another base model") from error

    def _too_large(self, folder: Path, most: int | None) -> int:
        """The adapter's size if it is known to be more than `most`, else 0. Faults of the files are found when they are
        read."""
        if most is not None:
            with suppress(ValueError, OSError):
                return size if (size := self._size(folder)) > most else 0
        return 0

    def _forget(self, held: HeldAdapter) -> None:
        """Forget an adapter that nobody holds and that is not in memory."""
        reading = self.flight is not None and self.flight.held is held
        if not (held.users or held.weights or reading) and self._here.get(held.name) is held:
            del self._here[held.name]

    def _drop(self, held: HeldAdapter) -> None:
        if held.weights:
            del held.adapter
            held.weights, held.size_bytes = 0, 0

    def _shrink(self, size_bytes: int = 0, keep: Container[HeldAdapter] | None = None) -> None:
        """Evict adapters that nobody holds and, unless `keep` is None, others that are not to be kept, until
        `size_bytes` more fit."""
        excess = self.size_bytes + size_bytes - self.max_bytes
        for held in list(self._here.values()):
            if excess <= 0:
                return
            if held.weights and (not held.users or (keep is not None and held not in keep)):
                excess -= held.size_bytes
                if held.users and not held.coming:  # requests that hold it wait until it is read again
                    self._ask(held, held.source, held.size_bytes)
                self._drop(held)
                self._forget(held)
