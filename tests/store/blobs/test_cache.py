"""A worker's copies of folders in a bucket: checked at each read, bounded in size, and never deleted while read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from store.blobs import cache as cache_module
from store.blobs.cache import FolderCache
from store.blobs.contract import Damaged, StoreAway, write_sums


class Source:
    """Folders of 1,000 bytes, and how often each was fetched."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def __call__(self, name: str) -> Callable[[Path], None]:
        def fetch(folder: Path) -> None:
            self.fetched.append(name)
            (folder / "x").write_bytes(name.encode() * 1000)
            write_sums(folder)

        return fetch


def read(cache: FolderCache, source: Source, name: str) -> bytes:
    with cache.reading(name, source(name)) as folder:
        return (folder / "x").read_bytes()


@pytest.fixture(autouse=True)
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes free on the disk: the last number of the list."""
    free = [cache_module.LEFT_FREE_BYTES]
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=free[-1]))
    return free


def here(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {".unfinished"}


def test_the_one_read_longest_ago_makes_room_and_one_in_use_stays(tmp_path: Path) -> None:
    source, cache = Source(), FolderCache(tmp_path, 3500)  # room for three folders and their lists
    other = FolderCache(tmp_path, 3500)  # as another process has it
    with ExitStack() as held:
        first = held.enter_context(cache.reading("a", source("a")))
        for name in "bcd":
            assert read(other, source, name) == name.encode() * 1000
        assert here(tmp_path) == {"a", "c", "d"}  # a is the oldest, and is being read
        assert (first / "x").read_bytes() == b"a" * 1000
    assert read(cache, source, "c") == b"c" * 1000
    assert read(cache, source, "e") == b"e" * 1000
    assert here(tmp_path) == {"c", "d", "e"} or here(tmp_path) == {"a", "c", "e"}
    assert source.fetched == ["a", "b", "c", "d", "e"]


def test_copies_make_room_where_the_disk_has_little(tmp_path: Path, free_bytes: list[int]) -> None:
    source, cache = Source(), FolderCache(tmp_path, 1 << 30)
    for name in "abcd":
        read(cache, source, name)
    assert here(tmp_path) == {"a", "b", "c", "d"}
    free_bytes.append(cache_module.LEFT_FREE_BYTES - 2500)  # three folders and their lists must go
    read(cache, source, "e")
    assert here(tmp_path) == {"d", "e"}
    free_bytes.append(0)
    with cache.reading("f", source("f")) as folder:
        assert (folder / "x").read_bytes() == b"f" * 1000  # kept only while it is read
        assert here(tmp_path) == {"f"}


def test_what_was_read_again_stays_longer_whatever_its_name(tmp_path: Path) -> None:
    source, cache = Source(), FolderCache(tmp_path, 2500)  # room for two folders and their lists
    for name in "abac":
        read(cache, source, name)
    assert here(tmp_path) == {"a", "c"}
    assert source.fetched == ["a", "b", "c"]


def test_what_was_written_here_is_not_fetched(tmp_path: Path) -> None:
    source, cache = Source(), FolderCache(tmp_path / "new" / "cache", 2500)
    for name in "abc":
        source(name)(folder := cache.new())
        cache.adopt(name, folder)
    source.fetched.clear()
    assert here(tmp_path / "new" / "cache") == {"b", "c"}
    assert read(cache, source, "c") == b"c" * 1000
    assert source.fetched == []


def test_leftovers_of_dead_readers_are_cleared_when_old_enough(tmp_path: Path) -> None:
    source, cache = Source(), FolderCache(tmp_path, 1 << 20)
    read(cache, source, "a")
    old, young = cache.new(), cache.new()
    (old / "x").write_bytes(b"half")
    os.utime(old, (1000, 1000))
    cache.clear_unfinished(2000)
    assert not old.exists()
    assert young.exists()
    cache.clear_unfinished(None)
    assert not young.exists()
    assert here(tmp_path) == {"a"}


def test_a_damaged_copy_is_fetched_again_and_a_damaged_fetch_is_given_to_nobody(tmp_path: Path) -> None:
    source, cache = Source(), FolderCache(tmp_path, 1 << 20)
    read(cache, source, "a")
    (tmp_path / "a" / "x").write_bytes(b"b" * 1000)
    assert read(cache, source, "a") == b"a" * 1000
    assert source.fetched == ["a", "a"]

    def wrong(folder: Path) -> None:
        source("w")(folder)
        (folder / "x").write_bytes(b"v" * 1000)

    for _ in range(2):
        with pytest.raises(Damaged), cache.reading("w", wrong):
            pass


def test_damage_is_fetched_again_while_somebody_still_reads_it(tmp_path: Path) -> None:
    source, cache = Source(), FolderCache(tmp_path, 1 << 20)
    with cache.reading("a", source("a")) as first:
        (tmp_path / "a" / "x").write_bytes(b"b" * 1000)
        assert read(cache, source, "a") == b"a" * 1000
        assert (first / "x").is_file()
    assert read(cache, source, "a") == b"a" * 1000
    assert source.fetched == ["a", "a"]
    assert list((tmp_path / ".unfinished").iterdir()) == []


def test_a_folder_damaged_on_its_way_is_fetched_once_more(tmp_path: Path) -> None:
    source, cache = Source(), FolderCache(tmp_path, 1 << 20)

    def once_wrong(folder: Path) -> None:
        source("a")(folder)
        if source.fetched == ["a"]:
            (folder / "x").write_bytes(b"b" * 1000)

    with cache.reading("a", once_wrong) as folder:
        assert (folder / "x").read_bytes() == b"a" * 1000
    assert source.fetched == ["a", "a"]


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, 1 << 20)

    def away(folder: Path) -> None:
        (folder / "x").write_bytes(b"half")
        raise StoreAway("gone")

    with pytest.raises(StoreAway), cache.reading("a", away):
        pass
    assert here(tmp_path) == set()
    assert list((tmp_path / ".unfinished").iterdir()) == []
