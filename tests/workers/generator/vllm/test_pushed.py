"""The adapters that vLLM is given: none stays behind, whatever becomes of who asked, of vLLM or of the disk."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from workers.generator.adapters import AdapterUnusable
from workers.generator.vllm import client
from workers.generator.vllm.policies import Policies

from .test_parts import CONFIG, LIMITS, saved


class Vllm:
    """What `Policies` asks of a vLLM."""

    def __init__(self) -> None:
        self.has: set[str] = set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.refuses: set[str] = set()

    async def load_adapter(self, name: str, folder: str) -> int:
        self.has.add(name)
        await self.answers.wait()
        if "load" in self.refuses:
            raise client.VllmRefused(400, "no")
        return len(self.has)

    async def unload_adapter(self, name: str) -> None:
        self.has.discard(name)
        if "unload" in self.refuses:
            raise client.VllmRefused(404, "not here")

    async def swap(self, adapters: list[tuple[str, int, str]], epoch: int) -> None: ...


def behind(policies: Policies) -> Vllm:
    assert isinstance(policies.client, Vllm)
    return policies.client


def files(folder: Path) -> int:
    return len(list(folder.iterdir()))


@pytest.fixture
def policies(tmp_path: Path) -> Policies:
    (folder := tmp_path / "pushed").mkdir()
    saved(tmp_path / "a")
    return Policies(Vllm(), CONFIG, replace(LIMITS, max_adapters=1), folder)  # type: ignore[arg-type]


def test_who_leaves_while_an_adapter_is_loaded_leaves_it_to_the_next(policies: Policies, tmp_path: Path) -> None:
    """It is neither lost with its folder, nor held for ever."""

    async def main() -> None:
        behind(policies).answers.clear()
        for name, after_s in (("x", 0.2), ("y", 0.01)):  # which waits for x
            leaving = asyncio.create_task(policies.acquire(name, tmp_path / "a"))
            await asyncio.wait({leaving}, timeout=after_s)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        behind(policies).answers.set()
        for name in ("x", "y", "z"):
            await policies.release(await policies.acquire(name, tmp_path / "a"))
            assert files(policies.folder) == 2 * len(policies)
        assert len(policies) == len(behind(policies).has) == 2

    asyncio.run(main())


def test_an_adapter_that_vllm_refuses_leaves_nothing(policies: Policies, tmp_path: Path) -> None:
    async def main() -> None:
        behind(policies).refuses.add("load")
        with pytest.raises(AdapterUnusable, match="could not be loaded"):
            await policies.acquire("x", tmp_path / "a")
        with pytest.raises(AdapterUnusable, match="could not be loaded"):
            await policies.swap("x", tmp_path / "a")
        assert (files(policies.folder), behind(policies).has) == (0, set())

    asyncio.run(main())


def test_an_adapter_that_vllm_does_not_unload_is_no_fault_of_the_next(policies: Policies, tmp_path: Path) -> None:
    async def main() -> None:
        behind(policies).refuses.add("unload")
        for name in "wxyz":
            await policies.release(await policies.acquire(name, tmp_path / "a"))
        assert (files(policies.folder), len(policies)) == (4, 2)

    asyncio.run(main())


def test_an_adapter_that_a_full_disk_cuts_short_leaves_nothing(
    policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *_: object, **__: object) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workers.generator.vllm.adapters.write_peft", full)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(policies.acquire("x", tmp_path / "a"))
    assert files(policies.folder) == 0
