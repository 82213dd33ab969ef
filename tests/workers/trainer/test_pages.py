"""The store of pages, in the host's memory and then in files: what is read is what was put there last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.trainer.runs.pages import PageError, PageStore


def page(value: float, *sizes: int) -> list[torch.Tensor]:
    return [torch.full((size,), float(value + i)) for i, size in enumerate(sizes)]


def read(store: PageStore, run_id: str, *sizes: int) -> list[float]:
    pieces = [torch.zeros(size) for size in sizes]
    store.get(run_id, pieces)
    assert all((piece == piece[0]).all() for piece in pieces)
    return [float(piece[0]) for piece in pieces]


@pytest.mark.parametrize("host_bytes", [0, 10_000], ids=["files", "memory"])
def test_what_was_put_last_is_read_any_number_of_times(tmp_path: Path, host_bytes: int) -> None:
    store = PageStore(tmp_path / "pages", host_bytes)
    store.put("a", page(1, 100, 30))
    assert read(store, "a", 100, 30) == read(store, "a", 100, 30) == [1, 2]
    store.put("a", page(5, 100))
    assert read(store, "a", 100) == [5]
    assert (tmp_path / "pages").exists() == (host_bytes == 0)


def test_the_least_recently_used_go_from_memory_to_files(tmp_path: Path) -> None:
    store = PageStore(tmp_path, host_bytes=800)
    store.put("a", page(1, 100))
    store.put("b", page(2, 100))
    read(store, "a", 100)
    store.put("c", page(3, 100))
    assert store.in_host_bytes == 800
    assert len(list(tmp_path.iterdir())) == 1
    assert [read(store, run_id, 100) for run_id in "abc"] == [[1], [2], [3]]
    store.put("b", page(4, 100))
    store.put("big", page(9, 1000))
    assert [read(store, run_id, 100) for run_id in "abc"] == [[1], [4], [3]]
    assert read(store, "big", 1000) == [9]
    store.clear()
    assert list(tmp_path.iterdir()) == []
    assert store.in_host_bytes == 0


def test_a_page_moves_to_a_file_as_it_grows_and_back(tmp_path: Path) -> None:
    store = PageStore(tmp_path, host_bytes=800)
    for value, size, in_host_bytes in ((1, 100, 400), (2, 1000, 0), (3, 900, 0), (4, 100, 400), (5, 200, 800)):
        store.put("a", page(value, size))
        assert read(store, "a", size) == [value]
        assert store.in_host_bytes == in_host_bytes
        assert len(list(tmp_path.iterdir())) == (in_host_bytes == 0)


def test_what_was_read_lately_stays_in_memory(tmp_path: Path) -> None:
    store = PageStore(tmp_path, host_bytes=800)
    store.put("a", page(1, 100))
    store.put("b", page(2, 100))
    read(store, "a", 100)
    store.put("c", page(3, 100))
    for file in tmp_path.iterdir():
        file.unlink()
    assert [read(store, run_id, 100) for run_id in "ac"] == [[1], [3]]
    with pytest.raises(PageError):
        read(store, "b", 100)
    store.drop("b")  # its file is gone already


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    store = PageStore(tmp_path)
    store.put("a", page(1, 100))
    with pytest.raises(PageError, match="run b cannot be read"):
        read(store, "b", 100)
    with pytest.raises(PageError, match="ends early"):
        read(store, "a", 101)
    store.drop("a")
    with pytest.raises(PageError):
        read(store, "a", 100)
