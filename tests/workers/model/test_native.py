"""The low-rank products in C: torch's sums, and for a group the same bits whatever else is in the batch."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.workers.model.gpu_kit import CONFIG, adapter
from workers.model.adapters.adapter import Adapter
from workers.model.lora.rows import LoraRows
from workers.model.native import build, launch
from workers.model.native.launch import NativeProducts
from workers.model.routing import Routing

NAME, EXPERTS = "layers.0.attn.q_B", "layers.0.mlp.gate_B"
WIDE, WIDE_EXPERT = CONFIG.q_size, CONFIG.moe_intermediate_size
RANKS = (4, 1, 9, 16, 3)
SIZES = (5, 1, 0, 70, 2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(groups: range = range(len(RANKS))) -> LoraRows:
    adapters = [adapter(CONFIG, RANKS[g], g) for g in groups]
    grads = [Adapter.zeros(a.shape) for a in adapters]  # the scale is the adapters'
    offsets = torch.tensor([0, *(SIZES[g] for g in groups)]).cumsum(0).tolist()
    return LoraRows(offsets, adapters, grads)


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def products(rows: LoraRows, on: NativeProducts, name: str, wide: int, count: int) -> dict[str, Tensor]:
    """The results of each kind of product, for numbers that depend only on the row."""
    u, y = numbers(count, 16, 1), numbers(count, wide, 2)
    shrunk, expanded = torch.zeros(count, 16), y.clone()
    on.shrink(y, shrunk, name, scaled=True)
    on.expand(expanded, u, name, scaled=True)
    on.outer(u, y, name, scaled=True)
    return {
        "shrink": shrunk,
        "expand": expanded,
        **{f"grad {g}": grad.flat.clone() for g, grad in enumerate(rows.grads) if grad},
    }


def dense(rows: LoraRows) -> dict[str, Tensor]:
    return products(rows, NativeProducts.dense(rows), NAME, WIDE, len(rows))


def of_experts(rows: LoraRows) -> dict[str, Tensor]:
    experts = torch.randint(CONFIG.num_experts, (len(rows), 2), generator=torch.Generator().manual_seed(3))
    on = NativeProducts.dense(rows).experts(Routing(experts, CONFIG.num_experts), rows)
    return products(rows, on, EXPERTS, WIDE_EXPERT, 2 * len(rows))


#: The least C that can be compiled.
LEAST = (build._HERE / "recur.c",)
KINDS = pytest.mark.parametrize("kind", [dense, of_experts])


def test_the_kernels_are_compiled_here() -> None:
    assert build.library() is not None, "install a C compiler"


@KINDS
def test_equals_torch(kind: Callable[[LoraRows], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    native = kind(batch())
    monkeypatch.setattr(launch, "library", lambda: None)
    for name, wanted in kind(batch()).items():
        torch.testing.assert_close(native[name], wanted, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert native["grad 3"].abs().max() > 0


@KINDS
def test_any_number_of_threads_gives_the_same_bits(kind: Callable[[LoraRows], dict[str, Tensor]]) -> None:
    alone = kind(batch())
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert all(torch.equal(found, alone[name]) for name, found in kind(batch()).items())


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_neighbours_and_addresses_change_no_bit(shift: int) -> None:
    rows, group = batch(), 3
    a, b = rows.offsets[group], rows.offsets[group + 1]
    y, u = numbers(len(rows), WIDE, 2), numbers(len(rows), 16, 1)
    crowded, on = torch.zeros(len(rows), 16), NativeProducts.dense(rows)
    on.shrink(y, crowded, NAME, scaled=True)
    on.outer(u, y, NAME, scaled=True)
    single = batch(range(group, group + 1))
    moved = torch.empty((b - a) * WIDE + shift)[shift:].view(b - a, WIDE).copy_(y[a:b])
    alone, on = torch.zeros(b - a, 16), NativeProducts.dense(single)
    on.shrink(moved, alone, NAME, scaled=True)
    on.outer(u[a:b].clone(), moved, NAME, scaled=True)
    assert torch.equal(alone, crowded[a:b])
    assert rows.grads[group] is not None
    assert torch.equal(single.grads[0].flat, rows.grads[group].flat)  # type: ignore[union-attr]


def test_groups_that_share_a_gradient_add_in_their_order() -> None:
    """With any number of threads."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        own = adapter(CONFIG, 4, 0)
        grad = Adapter.zeros(own.shape, own.scale)
        rows = LoraRows([0, 3, 10, 40], [own] * 3, [grad] * 3)
        for _ in range(20):
            NativeProducts.dense(rows).outer(numbers(40, 16, 1), numbers(40, WIDE, 2), NAME, scaled=True)
        found.append(grad.flat)
    assert torch.equal(*found)


def test_rows_that_are_not_contiguous_are_refused() -> None:
    rows = batch()
    on = NativeProducts.dense(rows)
    with pytest.raises(ValueError, match="contiguous"):
        on.shrink(numbers(WIDE, len(rows), 1).t(), torch.zeros(len(rows), 16), NAME, scaled=True)
    with pytest.raises(ValueError, match="float32"):
        on.shrink(numbers(len(rows), WIDE, 1).double(), torch.zeros(len(rows), 16), NAME, scaled=True)


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "no-such-compiler")
    build.library.cache_clear()
    try:
        assert build.library() is None
    finally:
        build.library.cache_clear()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that was compiled and kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home := tmp_path_factory.mktemp("compiled")))
        patch.setattr(build, "_TOGETHER", LEAST)
        build.library.cache_clear()
        try:
            assert isinstance(build.library(), ctypes.CDLL)
        finally:
            build.library.cache_clear()
    (kept,) = (home / "weft").iterdir()
    return kept


@pytest.fixture
def again(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it in the place where a new process looks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_TOGETHER", LEAST)
    shutil.copytree(compiled.parent, tmp_path / "weft")
    build.library.cache_clear()
    yield tmp_path / "weft" / compiled.name
    build.library.cache_clear()


def test_what_was_compiled_is_kept(again: Path) -> None:
    made = again.stat().st_mtime_ns
    assert isinstance(build.library(), ctypes.CDLL)
    assert [(each, each.stat().st_mtime_ns) for each in again.parent.iterdir()] == [(again, made)]


def test_an_images_own_library_is_used(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the image is run with another folder as the user's cache."""
    monkeypatch.setattr(build, "_AHEAD", again.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home := again.parents[1] / "empty"))
    assert isinstance(build.library(), ctypes.CDLL)
    assert not home.exists()


@pytest.mark.parametrize("homeless", ["read-only", "unknown", "others may write"])
def test_a_user_without_a_cache_folder_compiles_once(
    homeless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each process would leave a folder of its own behind, or end because its user has no home."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(build, "_TOGETHER", LEAST)
    home = Mock(return_value=Path("/proc"))
    if homeless == "unknown":
        home.side_effect = RuntimeError("Could not determine home directory.")
    elif homeless == "others may write":
        home.return_value = tmp_path / "home"
        (tmp_path / "home/.cache/weft").mkdir(parents=True)
        (tmp_path / "home/.cache/weft").chmod(0o777)
    monkeypatch.setattr(Path, "home", home)
    try:
        for _ in range(2):
            build.library.cache_clear()
            assert isinstance(build.library(), ctypes.CDLL)
        (folder,) = tmp_path.glob("weft-native-*")
        (kept,) = folder.iterdir()
        kept.unlink()
        folder.chmod(0o777)  # anybody may write to it: nothing is loaded from there
        build.library.cache_clear()
        assert isinstance(build.library(), ctypes.CDLL)
        assert not list(folder.iterdir())
    finally:
        build.library.cache_clear()


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros within", "not a library"])
def test_what_was_kept_and_is_damaged_is_compiled_anew(again: Path, damage: str) -> None:
    good = again.read_bytes()
    middle = next(at for at in range(len(good) // 2, len(good), 64) if any(good[at : at + 64]))
    broken = {"empty": b"", "cut": good[:middle], "not a library": b"x" * 9000}
    again.write_bytes(broken.get(damage, good[:middle] + bytes(64) + good[middle + 64 :]))
    assert not build._whole(again)
    assert isinstance(build.library(), ctypes.CDLL)
    assert list(again.parent.iterdir()) == [again]
    assert len(again.read_bytes()) == len(good)
    assert build._whole(again)
