"""Blobs in a bucket (`store.blobs.bucket`), with the folders that were read of it in a bounded cache on this machine.

    files/REF                     a file, sealed as everywhere
    folders/REF                   the list of a folder, sealed: its files with sizes and SHA-256, and their GENERATION
    data/REF/GENERATION/NAME      a file of a folder
    unfinished/GENERATION         says that somebody is about to write a folder, and which

A folder is there once its list is, which is put last; a new one in its place has another generation, so a reader finds
the old one or the new. What a writer that died has left is known by its note in unfinished/.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path

from store.blobs.bucket import Bucket
from store.blobs.cache import FolderCache
from store.blobs.contract import SEAL_BYTES, SUMS_FILE, Damaged, check_ref, seal_of, unsealed, write_sums

#: How many requests of one process may be under way beside an event loop.
THREADS = 32


@dataclass(frozen=True)
class _List:
    """The contents of `folders/REF`; `key` is the folder's name in the cache."""

    key: str
    data: str
    files: dict[str, tuple[str, int]]


class ObjectBlobs:
    """`Blobs` in a bucket. `root` is a folder on this machine, for up to `cache_bytes` of copies."""

    threads: Executor | None

    def __init__(self, bucket: Bucket, root: Path, cache_bytes: int, *, links: bool = False) -> None:
        self.root = root
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="blobs")
        self._bucket, self._links = bucket, links
        self._cache = FolderCache(root, cache_bytes)

    def put(self, ref: str, data: bytes) -> None:
        self._bucket.put(_file(ref), data + seal_of(data))

    def get(self, ref: str, sha256: str = "") -> bytes:
        try:
            return unsealed(ref, self._bucket.get(_file(ref)), sha256)
        except Damaged:
            return unsealed(ref, self._bucket.get(_file(ref)), sha256)

    def exists(self, ref: str) -> bool:
        for key in (_file(ref), _folder(ref)):
            with suppress(FileNotFoundError):
                self._bucket.size_bytes(key)
                return True
        return False

    def touch(self, ref: str) -> None:
        try:
            self._bucket.put(_file(ref), self._bucket.get(_file(ref)))
        except FileNotFoundError:
            self._bucket.put(_folder(ref), self._bucket.get(_folder(ref)))

    def delete(self, ref: str) -> None:
        self._bucket.delete([_file(ref)])

    def delete_tree(self, ref: str) -> None:
        for key in (_folder(ref), _file(ref)):
            with suppress(FileNotFoundError):  # stores that use a file system may report a folder's name as a key
                self._bucket.size_bytes(key)
                self._bucket.delete([key])
        for tree in ("folders", "files", "data"):
            self._bucket.delete([found.key for found in self._bucket.listed(f"{tree}/{ref}")])

    def size_bytes(self, ref: str) -> int:
        try:
            return max(0, self._bucket.size_bytes(_file(ref)) - SEAL_BYTES)
        except FileNotFoundError:
            return sum(size for _, size in self._list(ref).files.values())

    @contextmanager
    def new_folder(self, ref: str) -> Iterator[Path]:
        check_ref(ref)
        folder = self._cache.new()
        try:
            yield folder
            self._cache.adopt(self._upload(ref, folder), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _upload(self, ref: str, folder: Path) -> str:
        """Put a complete folder into the bucket. Returns its name in the cache."""
        generation, sums = secrets.token_hex(8), write_sums(folder)
        data, note = f"data/{ref}/{generation}", f"unfinished/{generation}"
        files = {name: (digest, (folder / name).stat().st_size) for name, digest in sums.items()}
        written = json.dumps({"generation": generation, "files": files}).encode()
        try:
            before = self._list(ref).data
        except (FileNotFoundError, Damaged):
            before = ""
        self._bucket.put(note, ref.encode())
        for name in files:
            self._bucket.put(f"{data}/{name}", folder / name)
        self._bucket.put(_folder(ref), written + seal_of(written))
        with suppress(OSError):  # the folder is there; leftovers are found later
            self._bucket.delete([note])
            if before:
                self._bucket.delete([found.key for found in self._bucket.listed(before)])
        return _key(ref, written)

    def at(self, ref: str) -> _Far:
        check_ref(ref)
        return _Far(self, ref)

    @contextmanager
    def reading(self, ref: str) -> Iterator[Path]:
        found = self._list(ref)

        def fetch(folder: Path) -> None:
            try:
                self._fetch(found, folder)
            except FileNotFoundError:  # replaced or deleted meanwhile
                shutil.rmtree(folder)
                folder.mkdir()
                newer = self._list(ref)
                if newer == found:
                    raise Damaged(f"blob {ref} is damaged: a file of it is missing") from None
                self._fetch(newer, folder)

        with self._cache.reading(found.key, fetch) as folder:
            yield folder

    def _fetch(self, found: _List, folder: Path) -> None:
        for name in found.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._bucket.download(f"{found.data}/{name}", folder / name)
        sums = {name: digest for name, (digest, _) in found.files.items()}
        (folder / SUMS_FILE).write_text(json.dumps(sums))

    def check_folder(self, ref: str) -> None:
        found = self._list(ref)
        there = {stored.key: stored.size_bytes for stored in self._bucket.listed(found.data)}
        for name, (_, size) in found.files.items():
            if there.get(f"{found.data}/{name}") != size:
                raise Damaged(f"blob {ref} is damaged: {name} is not as it was written")

    def files(self, ref: str) -> list[str]:
        return sorted(self._list(ref).files)

    def listed(self, pattern: str) -> dict[str, float]:
        wanted = pattern.split("/")
        found: dict[str, float] = {}
        for tree in ("files", "folders"):
            for stored in self._bucket.listed(f"{tree}/{pattern.partition('*')[0].rstrip('/')}"):
                segments = stored.key.split("/")[1 : 1 + len(wanted)]
                if len(segments) == len(wanted) and all(map(fnmatchcase, segments, wanted)):
                    ref = "/".join(segments)
                    found[ref] = max(found.get(ref, 0.0), stored.written)
        return found

    def link(self, ref: str, name: str, lasts: timedelta) -> str:
        if not self._links:
            return ""
        found = self._list(ref)
        if name not in found.files:
            raise FileNotFoundError(f"no file {name} in {ref}")
        return self._bucket.link(f"{found.data}/{name}", lasts)

    def clear_unfinished(self, before: float | None = None) -> None:
        self._cache.clear_unfinished(before)
        for note in list(self._bucket.listed("unfinished")):
            if note.written < (math.inf if before is None else before):
                self._clear(note.key)

    def _clear(self, note: str) -> None:
        with suppress(FileNotFoundError):  # another process is clearing, too
            ref, generation = self._bucket.get(note).decode(), note.rpartition("/")[2]
            data = f"data/{ref}/{generation}"
            with suppress(FileNotFoundError):
                if self._list(ref).data == data:
                    data = ""
            if data:
                self._bucket.delete([found.key for found in self._bucket.listed(data)])
            self._bucket.delete([note])

    def _list(self, ref: str) -> _List:
        written = unsealed(ref, self._bucket.get(_folder(ref)))
        found = json.loads(written)
        files = {name: (digest, size) for name, (digest, size) in found["files"].items()}
        return _List(_key(ref, written), f"data/{ref}/{found['generation']}", files)


@dataclass(frozen=True)
class _Far:
    """A folder in the bucket."""

    blobs: ObjectBlobs
    ref: str

    def reading(self) -> AbstractContextManager[Path]:
        return self.blobs.reading(self.ref)


def _file(ref: str) -> str:
    return f"files/{check_ref(ref)}"


def _folder(ref: str) -> str:
    return f"folders/{check_ref(ref)}"


def _key(ref: str, written: bytes) -> str:
    return hashlib.sha256(ref.encode() + b"\n" + written).hexdigest()[:32]
