"""Blobs are whole or absent, and never outside of their root: in a folder, and in a bucket over HTTP."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.blobs.bucket import Bucket
from store.blobs.contract import BadRef, Blobs, Damaged
from store.blobs.folder import FolderBlobs
from store.blobs.objects import ObjectBlobs


@pytest.fixture(params=["folder", "bucket"])
def any_blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "folder":
        return FolderBlobs(tmp_path / "blobs")
    return ObjectBlobs(request.getfixturevalue("bucket"), tmp_path / "cache", 1 << 20, links=True)


def files(blobs: Blobs, ref: str) -> dict[str, bytes]:
    with blobs.reading(ref) as folder:
        return {name: (folder / name).read_bytes() for name in blobs.files(ref)}


def test_put_get_replace_delete(any_blobs: Blobs) -> None:
    blobs = any_blobs
    blobs.put("ops/a:1/body", b"one")
    blobs.put("ops/a:1/body", b"second")
    assert blobs.get("ops/a:1/body") == b"second"
    assert blobs.size_bytes("ops/a:1/body") == 6
    blobs.put("ops/a:1/large", bytes(100))
    assert blobs.size_bytes("ops/a:1/large") == 100
    assert blobs.exists("ops/a:1/body")
    with pytest.raises(Damaged):
        blobs.get("ops/a:1/body", "00")
    blobs.delete("ops/a:1/body")
    blobs.delete("ops/a:1/body")
    assert not blobs.exists("ops/a:1/body")
    for call in (blobs.get, blobs.size_bytes, blobs.touch, blobs.check_folder):
        with pytest.raises(FileNotFoundError):
            call("ops/a:1/body")


@pytest.mark.parametrize("times", [1, 2])
def test_a_blob_that_was_read_short_is_read_once_more(
    any_blobs: Blobs, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    any_blobs.put("a", b"12345")
    source, name = (Path, "read_bytes") if isinstance(any_blobs, FolderBlobs) else (Bucket, "get")
    whole, short = getattr(source, name), iter(range(times))

    def read(*asked: Any) -> bytes:
        found: bytes = whole(*asked)
        return found[:-1] if next(short, None) is not None else found

    monkeypatch.setattr(source, name, read)
    with pytest.raises(Damaged) if times > 1 else nullcontext():
        assert any_blobs.get("a") == b"12345"


@pytest.mark.parametrize(
    "ref",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../b",
        "a/..",
        "a//b",
        "a/",
        "./a",
        "a/.hidden",
        "a\\b",
        "a b",
        "a\0",
        "a\n",
        "ä",
        "~",
    ],
)
def test_refs_that_could_leave_the_root_are_refused(any_blobs: Blobs, ref: str) -> None:
    blobs = any_blobs
    for call in (blobs.at, blobs.get, blobs.delete, blobs.exists, blobs.delete_tree, blobs.size_bytes, blobs.files):
        with pytest.raises(BadRef):
            call(ref)
    with pytest.raises(BadRef):
        blobs.put(ref, b"")
    with pytest.raises(BadRef), blobs.new_folder(ref):
        pass


@pytest.mark.parametrize("ref", ["a", "a/b/c", "3f2a:train:0", "v1..2", "_x-y.z"])
def test_refs_that_are_fine(any_blobs: Blobs, ref: str) -> None:
    any_blobs.put(ref, b"x")
    assert any_blobs.get(ref) == b"x"


def test_a_new_folder_appears_whole(any_blobs: Blobs) -> None:
    blobs = any_blobs
    with blobs.new_folder("ckpt/1") as folder:
        (folder / "adapter").write_bytes(b"12345")
        (folder / "sub").mkdir()
        (folder / "sub" / "more").write_bytes(b"678")
        (folder / "empty").write_bytes(b"")
        assert not blobs.exists("ckpt/1")
    assert blobs.size_bytes("ckpt/1") == 8
    blobs.check_folder("ckpt/1")
    assert files(blobs, "ckpt/1") == {"adapter": b"12345", "empty": b"", "sub/more": b"678"}
    with blobs.new_folder("ckpt/1") as folder:
        (folder / "adapter").write_bytes(b"1")
    assert (blobs.size_bytes("ckpt/1"), files(blobs, "ckpt/1")) == (1, {"adapter": b"1"})
    with blobs.new_folder("ckpt/2") as folder:
        (folder / "adapter").write_bytes(b"2")
    assert blobs.listed("ckpt/*").keys() == {"ckpt/1", "ckpt/2"}
    blobs.delete_tree("ckpt/1")
    blobs.delete_tree("ckpt/1")
    assert not blobs.exists("ckpt/1")
    blobs.put("ckpt/3", b"3")
    blobs.delete_tree("ckpt/3")
    assert blobs.listed("ckpt/*").keys() == {"ckpt/2"}
    blobs.delete_tree("ckpt")
    assert blobs.listed("ckpt/*") == {}
    assert list((blobs.root / ".unfinished").iterdir()) == []


def test_a_new_folder_that_fails_leaves_the_old_one(any_blobs: Blobs) -> None:
    blobs = any_blobs
    with blobs.new_folder("ckpt") as folder:
        (folder / "x").write_bytes(b"old")

    def fail() -> None:
        with blobs.new_folder("ckpt") as folder:
            (folder / "x").write_bytes(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files(blobs, "ckpt") == {"x": b"old"}
    assert list((blobs.root / ".unfinished").iterdir()) == []


def test_what_is_listed_has_its_age(any_blobs: Blobs) -> None:
    began = time.time()
    for ref in ("ops/aa/1", "ops/bb/2", "ops/3", "other/aa/1"):
        any_blobs.put(ref, b"x")
    found = any_blobs.listed("ops/*/*")
    assert found.keys() == {"ops/aa/1", "ops/bb/2"}
    assert all(began - 2 < written < time.time() + 2 for written in found.values())
    time.sleep(1.1)  # stores tell times in whole seconds
    any_blobs.touch("ops/aa/1")
    again = any_blobs.listed("ops/*/*")
    assert again["ops/aa/1"] > found["ops/aa/1"]
    assert again["ops/bb/2"] == found["ops/bb/2"]
    assert any_blobs.get("ops/aa/1") == b"x"


def test_clear_unfinished_keeps_blobs(blobs: FolderBlobs) -> None:
    blobs.put("a", b"1")
    old, young, folder = (blobs.root / ".unfinished" / name for name in ("old", "young", "folder"))
    young.write_bytes(b"half")
    old.write_bytes(b"half")
    folder.mkdir()
    (folder / "half").write_bytes(b"")
    for left in (old, folder):
        os.utime(left, (0, 0))
    blobs.clear_unfinished(time.time() - 3600)
    assert (young.exists(), old.exists(), folder.exists()) == (True, False, False)
    blobs.clear_unfinished()
    blobs.put("b", b"2")
    assert sorted(path.name for path in blobs.root.rglob("*")) == [".unfinished", "a", "b"]


def test_readers_see_whole_blobs_while_writers_replace_them(any_blobs: Blobs) -> None:
    blobs = any_blobs
    versions = [bytes([n]) * 200_000 for n in range(4)]
    blobs.put("x/y", versions[0])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for version in versions:
                blobs.put("x/y", version)

    thread = threading.Thread(target=replace)
    thread.start()
    seen = {blobs.get("x/y") for _ in range(100)}
    stop.set()
    thread.join()
    assert seen <= set(versions)


def test_a_durable_blob_and_every_folder_that_names_it_are_flushed_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After fsync(2): a power cut loses a file whose entry in its folder was not flushed, and likewise a folder whose
    entry in the one above it was not."""
    flushed, fsync = list[str](), os.fsync

    def recorded(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if not path.is_relative_to(tmp_path / ".unfinished"):
            flushed.append(path.relative_to(tmp_path).as_posix())
        else:
            flushed.append(f"new {path.read_bytes()[:1]!r}" if path.is_file() else "new folder")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    blobs = FolderBlobs(tmp_path, durable=True)
    blobs.put("a/b/c", b"1")
    assert flushed == ["new b'1'", "a/b", "a", "."]
    flushed.clear()
    blobs.put("a/b/d", b"2")
    assert flushed == ["new b'2'", "a/b"]
    flushed.clear()
    with blobs.new_folder("w/1") as folder:
        (folder / "x").write_bytes(b"3")
    assert sorted(flushed[:2]) == ["new b'3'", "new b'{'"]
    assert flushed[2:] == ["new folder", "w", "."]
    FolderBlobs(tmp_path).put("a/e", b"4")
    assert len(flushed) == 5


@pytest.mark.parametrize("at", ["a", "a/b"])
def test_a_blob_that_cannot_be_put_leaves_nothing(blobs: FolderBlobs, at: str) -> None:
    with blobs.new_folder("a") as folder:
        (folder / "b").write_bytes(b"1")
    with pytest.raises(OSError, match="a directory"):
        blobs.put("a" if at == "a" else "a/b/c", b"2")
    assert list((blobs.root / ".unfinished").iterdir()) == []
    assert files(blobs, "a") == {"b": b"1"}


def test_a_folder_that_cannot_be_replaced_stays_and_one_that_is_replaced_leaves_nothing(
    blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(text: bytes) -> None:
        with blobs.new_folder("w") as folder:
            (folder / "x").write_bytes(text)

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(b"1")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            write(b"2")
    assert files(blobs, "w") == {"x": b"1"}
    write(b"3")
    assert files(blobs, "w") == {"x": b"3"}
    assert list((blobs.root / ".unfinished").iterdir()) == []


@pytest.mark.parametrize(("name", "written"), [("x", b"12346"), ("y", None), (".sha256.json", b"{")])
def test_a_folder_that_is_not_as_it_was_written_is_damaged(
    blobs: FolderBlobs, name: str, written: bytes | None
) -> None:
    with blobs.new_folder("w") as folder:
        (folder / "x").write_bytes(b"12345")
        (folder / "y").write_bytes(b"")
    blobs.check_folder("w")
    (blobs.path("w") / name).unlink()
    if written is not None:
        (blobs.path("w") / name).write_bytes(written)
    with pytest.raises(Damaged):
        blobs.check_folder("w")
    with pytest.raises(Damaged), blobs.reading("w"):
        pass


@pytest.mark.parametrize(("name", "written"), [("x", b"1234"), ("x", b"123456"), ("y", None)])
def test_a_folder_in_a_bucket_that_is_not_as_it_was_written_is_damaged(
    bucket: Bucket, tmp_path: Path, name: str, written: bytes | None
) -> None:
    here, there = (ObjectBlobs(bucket, tmp_path / place, 1 << 20) for place in ("here", "there"))
    with here.new_folder("w") as folder:
        (folder / "x").write_bytes(b"12345")
        (folder / "y").write_bytes(b"")
    there.check_folder("w")
    (key,) = (found.key for found in bucket.listed("data") if found.key.endswith(f"/{name}"))
    bucket.delete([key])
    if written is not None:
        bucket.put(key, written)
    with pytest.raises(Damaged):
        there.check_folder("w")
    with pytest.raises(Damaged), there.reading("w"):
        pass


def test_a_folder_that_is_replaced_or_deleted_while_it_is_fetched(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader gets the new folder, or hears that there is none: neither is reported as damage."""
    here, there = (ObjectBlobs(bucket, tmp_path / place, 1 << 20) for place in ("here", "there"))
    download = Bucket.download

    def write(text: bytes) -> None:
        with here.new_folder("w") as folder:
            (folder / "x").write_bytes(text)

    def first(change: Callable[[], None]) -> None:
        """Make the change before the next file of the folder is fetched."""

        def changed(self: Bucket, key: str, target: Path) -> None:
            monkeypatch.setattr(Bucket, "download", download)
            change()
            download(self, key, target)

        monkeypatch.setattr(Bucket, "download", changed)

    write(b"old")
    first(lambda: write(b"new"))
    assert files(there, "w") == {"x": b"new"}
    write(b"newer")
    first(lambda: here.delete_tree("w"))
    with pytest.raises(FileNotFoundError), there.reading("w"):
        pass


def test_durable_writes_the_same(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path, durable=True)
    blobs.put("a/b", b"1")
    with blobs.new_folder("c") as folder:
        (folder / "x").write_bytes(b"2")
    assert blobs.get("a/b") + (blobs.path("c") / "x").read_bytes() == b"12"


def test_large_files_travel_in_parts(bucket: Bucket, tmp_path: Path) -> None:
    data = bytes(range(256)) * (1 << 17)  # 32 MiB: two parts
    here, there = (ObjectBlobs(bucket, tmp_path / name, 1 << 30) for name in ("here", "there"))
    here.put("body", data)
    assert there.get("body") == data
    with here.new_folder("w") as folder:
        (folder / "x").write_bytes(data)
    assert files(there, "w") == {"x": data}


def test_a_link_needs_no_key_and_ends(bucket: Bucket, tmp_path: Path) -> None:
    blobs = ObjectBlobs(bucket, tmp_path / "cache", 1 << 20, links=True)
    with blobs.new_folder("w") as folder:
        (folder / "x").write_bytes(b"12345")
    link, short = (blobs.link("w", "x", timedelta(seconds=lasts)) for lasts in (300, 1))
    assert httpx.get(link).content == b"12345"
    assert httpx.get(link.partition("?")[0]).status_code in (400, 403)
    with pytest.raises(FileNotFoundError):
        blobs.link("w", "y", timedelta(seconds=1))
    time.sleep(2.1)
    assert httpx.get(short).status_code in (400, 403)
    assert ObjectBlobs(bucket, tmp_path / "cache", 1 << 20).link("w", "x", timedelta(seconds=1)) == ""


def test_leftovers_of_a_dead_writer_are_cleared_and_blobs_are_kept(bucket: Bucket, tmp_path: Path) -> None:
    blobs = ObjectBlobs(bucket, tmp_path / "cache", 1 << 20)
    with blobs.new_folder("w") as folder:
        (folder / "x").write_bytes(b"12345")
    (kept,) = bucket.listed("data")
    bucket.put("data/w/dead/x", b"half")
    for generation in (
        "dead",
        kept.key.split("/")[2],
    ):  # the second died after it wrote the list, before it deleted its note
        bucket.put(f"unfinished/{generation}", b"w")
    blobs.clear_unfinished(time.time() - 3600)
    assert len(list(bucket.listed("data"))) == 2
    blobs.clear_unfinished()
    assert [found.key for found in bucket.listed("data")] == [kept.key]
    assert list(bucket.listed("unfinished")) == []
    assert files(blobs, "w") == {"x": b"12345"}
