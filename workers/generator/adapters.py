"""The adapters an engine has in memory: read on first use, kept for the next request, evicted least recently used.

One in use is never evicted; if those in use alone exceed the cap, the cap is exceeded until they are released.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workers.model.adapter import Adapter, AdapterFileError

log = logging.getLogger(__name__)


class AdapterUnusable(Exception):
    """The weights of an adapter cannot be had. The message goes to the user: it names the adapter, not its folder."""


@dataclass
class HeldAdapter:
    """What `adapter` holds may be replaced between steps (`swap`): read it anew for each."""

    name: str
    adapter: Adapter
    size_bytes: int
    version: int
    #: Never 0, and never the same for other weights.
    weights: int
    users: int = 0


class AdapterCache:
    def __init__(self, load: Callable[[Path], tuple[Adapter, int]], max_bytes: int) -> None:
        """`load` reads the weights in a folder and their policy version."""
        self._load = load
        self._max_bytes = max_bytes
        self._loaded: OrderedDict[str, HeldAdapter] = OrderedDict()
        self._reads = itertools.count(1)

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def size_bytes(self) -> int:
        return sum(loaded.size_bytes for loaded in self._loaded.values())

    def acquire(self, name: str, folder: Path | None) -> HeldAdapter:
        """The adapter called `name`, read from `folder` unless it is here. Pair each call with a `release`."""
        loaded = self._loaded.get(name)
        if loaded is None:
            if folder is None or not folder.is_dir():
                raise AdapterUnusable(f"the sampler weights {name!r} are gone: save them again and make a new sampler")
            loaded = self._loaded[name] = self._read(name, folder)
        loaded.users += 1
        self._loaded.move_to_end(name)
        self._evict()
        return loaded

    def release(self, loaded: HeldAdapter) -> None:
        loaded.users -= 1
        self._evict()

    def swap(self, name: str, folder: Path) -> None:
        """Make `name` mean the weights in `folder`, for those who hold it too."""
        fresh = self._read(name, folder)
        loaded = self._loaded.setdefault(name, fresh)
        loaded.adapter, loaded.size_bytes = fresh.adapter, fresh.size_bytes
        loaded.version, loaded.weights = fresh.version, fresh.weights
        self._evict()

    def _read(self, name: str, folder: Path) -> HeldAdapter:
        try:
            adapter, version = self._load(folder)
        except AdapterFileError as error:
            log.warning("sampler weights %r: %s", name, error)
            raise AdapterUnusable(f"the sampler weights {name!r} are damaged or of another base model") from error
        size_bytes = adapter.flat.numel() * adapter.flat.element_size()
        return HeldAdapter(name, adapter, size_bytes, version, next(self._reads))

    def _evict(self) -> None:
        excess = self.size_bytes - self._max_bytes
        for loaded in list(self._loaded.values()):
            if excess <= 0:
                return
            if loaded.users == 0:
                del self._loaded[loaded.name]
                excess -= loaded.size_bytes
