"""Blobs are whole or absent, and never outside of their root."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from store.blobs import BadRef, Blobs


def test_put_get_replace_delete(blobs: Blobs) -> None:
    blobs.put("ops/a:1/body", b"one")
    blobs.put("ops/a:1/body", b"second")
    assert blobs.get("ops/a:1/body") == b"second"
    assert blobs.size_bytes("ops/a:1/body") == 6
    assert blobs.exists("ops/a:1/body")
    blobs.delete("ops/a:1/body")
    blobs.delete("ops/a:1/body")
    assert not blobs.exists("ops/a:1/body")
    with pytest.raises(FileNotFoundError):
        blobs.get("ops/a:1/body")


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
def test_refs_that_could_leave_the_root_are_refused(blobs: Blobs, ref: str) -> None:
    for call in (blobs.path, blobs.get, blobs.delete, blobs.folder, blobs.delete_tree, blobs.size_bytes):
        with pytest.raises(BadRef):
            call(ref)
    with pytest.raises(BadRef):
        blobs.put(ref, b"")


@pytest.mark.parametrize("ref", ["a", "a/b/c", "3f2a:train:0", "v1..2", "_x-y.z"])
def test_refs_that_are_fine(blobs: Blobs, ref: str) -> None:
    assert blobs.path(ref).is_relative_to(blobs.root)


def test_a_new_folder_appears_whole(blobs: Blobs) -> None:
    with blobs.new_folder("ckpt/1") as folder:
        (folder / "adapter").write_bytes(b"12345")
        (folder / "sub").mkdir()
        (folder / "sub" / "more").write_bytes(b"678")
        assert not blobs.exists("ckpt/1")
    assert blobs.size_bytes("ckpt/1") == 8
    with blobs.new_folder("ckpt/1") as folder:
        (folder / "adapter").write_bytes(b"1")
    assert blobs.size_bytes("ckpt/1") == 1
    blobs.delete_tree("ckpt/1")
    blobs.delete_tree("ckpt/1")
    assert not blobs.exists("ckpt/1")


def test_a_new_folder_that_fails_leaves_the_old_one(blobs: Blobs) -> None:
    with blobs.new_folder("ckpt") as folder:
        (folder / "x").write_bytes(b"old")

    def fail() -> None:
        with blobs.new_folder("ckpt") as folder:
            (folder / "x").write_bytes(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (blobs.path("ckpt") / "x").read_bytes() == b"old"
    assert list((blobs.root / ".unfinished").iterdir()) == []


def test_clear_unfinished_keeps_blobs(blobs: Blobs) -> None:
    blobs.put("a", b"1")
    (blobs.root / ".unfinished" / "left").write_bytes(b"half")
    blobs.clear_unfinished()
    blobs.put("b", b"2")
    assert sorted(path.name for path in blobs.root.rglob("*")) == [".unfinished", "a", "b"]


def test_readers_see_whole_blobs_while_writers_replace_them(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    versions = [bytes([n]) * 200_000 for n in range(4)]
    blobs.put("x/y", versions[0])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for version in versions:
                blobs.put("x/y", version)

    thread = threading.Thread(target=replace)
    thread.start()
    seen = {blobs.get("x/y") for _ in range(200)}
    stop.set()
    thread.join()
    assert seen <= set(versions)


def test_durable_writes_the_same(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path, durable=True)
    blobs.put("a/b", b"1")
    with blobs.new_folder("c") as folder:
        (folder / "x").write_bytes(b"2")
    assert blobs.get("a/b") + (blobs.path("c") / "x").read_bytes() == b"12"
