"""One copy of the base for all workers of a host: its bits, its files, and what real workers take and read."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench.memory import Host, forget_pages, make_model, pair, planned
from bench.parts.worker import Worker
from scheduler.links.configs import Basics, GeneratorConfig, TorchConfig
from tests.forked import Forked
from tests.workers.model.models import packed, random_adapter, reference
from workers.generator import process as generator_process
from workers.generator.torch_engine import TorchEngine
from workers.model.attend import PackedAttend
from workers.model.base.files import CannotShare, hold, leave_files, own_folder, remove_unused, stored_bytes
from workers.model.base.shared import base_decoder
from workers.model.base.weights import ModelWeightsError, load_decoder
from workers.model.decoder import Decoder
from workers.model.device import ModelDevice
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows
from workers.model.tiny import TINY_PATH
from workers.trainer import process as trainer_process

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "base"
    found.mkdir()
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("weft-*/*"))


def gradients(decoder: Decoder, rank: int = 3) -> list[torch.Tensor]:
    """Log-probabilities of a batch of two tenants, and the gradients of their adapters."""
    tokens, positions = packed([7, 18], decoder.config.vocab_size)
    adapters = [random_adapter(decoder, rank, seed) for seed in (1, 2)]
    grads = [adapter.zeros(adapter.shape) for adapter in adapters]
    rows = LoraRows([0, 7, 25], list(adapters), list(grads))
    hidden = decoder(tokens, positions, PackedAttend([7, 18]), rows)
    found = target_logprobs(decoder, hidden, torch.arange(25), tokens, rows)
    found.sum().backward()
    return [found.detach(), *(grad.flat for grad in grads)]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3-tied", torch.float32),
        ("deepseek", torch.bfloat16),
        ("qwen3-next", torch.float32),
        ("nemotron-h-latent", torch.bfloat16),
    ],
)
def test_shared_weights_have_the_bits_of_a_copy(family: str, dtype: torch.dtype, tmp_path: Path, folder: Path) -> None:
    model = tmp_path / "model"
    reference(family).save_pretrained(model)
    own, where = load_decoder(model, dtype), ModelDevice(CPU, dtype)
    loaded, first = base_decoder(model, where, folder)
    mapped, second = base_decoder(model, where, folder)
    assert "loaded, for all" in first
    assert "mapped" in second
    assert len(files(folder)) == 1
    for shared in (loaded, mapped):
        for (name, mine), (theirs, other) in zip(own.named_parameters(), shared.named_parameters(), strict=True):
            assert (name, mine.dtype) == (theirs, other.dtype)
            assert torch.equal(mine, other)
            assert other.data_ptr() % 64 == 0
    assert all(map(torch.equal, gradients(own), gradients(mapped)))
    leave_files(folder)
    assert files(folder) == []
    torch.equal(own.embed, mapped.embed)  # a removed file stays for those who have mapped it


WRITE = """
import sys
from pathlib import Path
from workers.model.device import choose_device
from workers.model.base.shared import base_decoder
decoder, _ = base_decoder(Path(sys.argv[1]), choose_device("cpu"), Path(sys.argv[2]))
print("there", flush=True)
decoder.embed.data.zero_()
"""


def test_nobody_can_write_to_what_others_read(folder: Path) -> None:
    writer = Forked("-c", WRITE, str(TINY_PATH), str(folder))
    assert (writer.communicate()[0], writer.wait()) == ("there\n", -signal.SIGSEGV)


def test_other_bytes_have_another_file_and_unused_ones_go(tmp_path: Path, folder: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    reference("qwen3").save_pretrained(model)
    reference("qwen3", seed=1).save_pretrained(other)
    _, first = base_decoder(model, ModelDevice(CPU, torch.float32), folder)
    _, half = base_decoder(model, ModelDevice(CPU, torch.bfloat16), folder)
    second, theirs = base_decoder(other, ModelDevice(CPU, torch.float32), folder)
    assert {how.partition(",")[0] for how in (first, half, theirs)} == {"loaded"}
    assert len(files(folder)) == 3
    assert torch.equal(second.embed, load_decoder(other).embed)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(folder))
    stale = files(folder)[0].with_name("0" * 32)
    stale.write_bytes(b"of a killed server")
    remove_unused(folder)
    assert len(files(folder)) == 3
    leave_files(folder)
    assert files(folder) == []


def test_a_checkpoint_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ModelWeightsError, match="missing"):
        base_decoder(tmp_path / "model", ModelDevice(CPU, torch.float32), folder)
    assert files(folder) == []


@pytest.mark.skipif(sys.platform != "linux", reason="says of Linux's mounts")
def test_a_base_takes_memory_only_where_it_lies_in_it() -> None:
    """The kernel already counts a file on a disk as available: counted twice, a plan would give away memory that is
    not there."""
    for place, taken in (("/var/tmp", 0), ("/dev/shm", 1 << 30)):
        with tempfile.TemporaryDirectory(dir=place) as own:
            with (own_folder(Path(own)) / "base").open("wb") as file:
                file.truncate(1 << 30)
            assert stored_bytes(Path(own)) == taken


def test_without_room_the_worker_says_so_and_loads_a_copy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotShare, match=r"MiB free and the base takes 1,099,511,627,776; .* base_dir"):
        hold(folder, "x", 1 << 60, lambda descriptor: None)
    assert files(folder) == []
    reference("qwen3").save_pretrained(tmp_path / "model")
    where = ModelDevice(CPU, torch.float32)
    _, how = base_decoder(tmp_path / "model", where, tmp_path / "nowhere")
    assert "a copy of its own" in how
    assert "set base_dir" in how
    (folder / f"weft-{os.geteuid()}").chmod(0o755)  # as another user might have made it
    decoder, how = base_decoder(tmp_path / "model", where, folder)
    assert "not a folder of this user alone" in how
    (folder / f"weft-{os.geteuid()}").chmod(0o700)

    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("workers.model.base.files.fcntl.flock", no_locks)
    decoder, how = base_decoder(tmp_path / "model", where, folder)
    assert "No locks available" in how
    assert torch.equal(decoder.embed, load_decoder(tmp_path / "model").embed)


FILL = """
import os, sys, time
from pathlib import Path
from workers.model.base.files import hold
def fill(descriptor):
    print("filling", flush=True)
    os.pwrite(descriptor, b"w" * SIZE, 0)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), 9)
    time.sleep(0.2)
SIZE = 1 << 20
descriptor, filled = hold(Path(sys.argv[1]), "base", SIZE, fill)
print("filled" if filled else "found", os.pread(descriptor, SIZE, 0) == b"w" * SIZE, flush=True)
sys.stdin.read()
"""


def start(folder: Path, how: str, count: int) -> list[Forked]:
    return [Forked("-c", FILL, str(folder), how) for _ in range(count)]


def said(processes: Sequence[Forked]) -> list[str]:
    return sorted(process.communicate()[0] for process in processes)


def test_a_file_of_a_killed_loader_is_filled_again_and_by_one_alone(folder: Path) -> None:
    assert said(start(folder, "die", 1)) == ["filling\n"]
    (half,) = files(folder)
    assert half.stat().st_size > 1 << 20  # all but the mark
    assert said(start(folder, "live", 3)) == ["filling\nfilled True\n", "found True\n", "found True\n"]
    (process,) = start(folder, "live", 1)
    assert process.stdout is not None
    assert process.stdout.readline() == "found True\n"  # it is kept until somebody looks for what nobody uses
    remove_unused(folder)
    assert files(folder) == [half]
    process.kill()
    process.communicate()
    remove_unused(folder)
    assert files(folder) == []


def test_of_two_that_find_a_file_incomplete_at_the_same_time_one_fills_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock belongs to a descriptor, so two threads behave like two processes."""
    both, lock, seen = threading.Barrier(2), fcntl.flock, threading.local()

    def flock(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_EX and not hasattr(seen, "incomplete"):
            seen.incomplete = True
            both.wait(30)
        lock(descriptor, how)

    monkeypatch.setattr("workers.model.base.files.fcntl.flock", flock)
    found: list[bool] = []

    def work() -> None:
        found.append(hold(folder, "base", 4, lambda descriptor: None)[1])

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [False, True]
    monkeypatch.undo()
    leave_files(folder)


#: What a worker on a CPU takes beyond its plan if torch was built for CUDA, whose libraries it loads even so: torch
#: 2.11 for CUDA 13 takes 127 MB more when imported than torch 2.13 for CPUs.
CUDA_LIBRARIES_BYTES = 160 << 20


def memory_of(worker: Worker) -> tuple[int, int]:
    """The proportional set size without libraries, and the size of the libraries: a process's share of a library
    changes as other processes come and go, even foreign ones."""
    own_kb, libraries_kb, library = 0, 0, False
    for line in Path(f"/proc/{worker.pid}/smaps").read_text().splitlines():
        first, value = line.split(maxsplit=2)[:2]
        if "-" in first:
            library = ".so" in line
        elif first == "Pss:" and not library:
            own_kb += int(value)
        elif first == "Rss:" and library:
            libraries_kb += int(value)
    return own_kb << 10, libraries_kb << 10


def without_libraries(worker: Worker) -> int:
    return memory_of(worker)[0]


def test_trainer_and_generator_compute_with_the_file_s_bytes(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are made as their processes make them, and no weight of theirs is a copy."""
    for process in (trainer_process, generator_process):
        monkeypatch.setattr(process, "probe", lambda decoder, findings: "together")
    where = ModelDevice(CPU, torch.float32)
    basics = Basics(str(tmp_path), {"m": str(TINY_PATH)}, base_dir=str(folder))
    trained = trainer_process.load_models(basics.models, where, basics.base_dir, tmp_path)["m"]
    engine = generator_process._engine("m", TINY_PATH, GeneratorConfig(basics, 2, 64, TorchConfig(packed=False)), where)
    assert isinstance(engine, TorchEngine)
    (file,) = files(folder)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    spans = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    for decoder in (trained, engine._decoder):
        for name, weight in decoder.named_parameters():
            assert any(low <= weight.data_ptr() < high for low, high in spans), name
    engine.close()
    leave_files(folder)


@pytest.mark.long  # 200 MB and five processes
def test_workers_take_one_copy_and_a_restart_reads_none(tmp_path: Path, folder: Path) -> None:
    """With real workers, of which the one that has loaded is killed."""
    model = tmp_path / "model"
    weights = make_model(model, 200)
    host = Host(model, tmp_path / "data", str(folder))
    with pair(Host(TINY_PATH, tmp_path / "data", "")) as both:
        fixed = sum(map(without_libraries, both))
    forget_pages(model)
    with pair(host) as (trainer, generator):
        own, libraries_of = zip(*map(memory_of, (trainer, generator)), strict=True)
        together = sum(own) + max(libraries_of)
        libraries = 2 * CUDA_LIBRARIES_BYTES if torch.version.cuda else 0
        assert 0.7 * planned(model, 2) < together < planned(model, 2) + libraries
        assert trainer.read_bytes > 0.9 * weights
        before, sampled = host.train(trainer), host.sample(generator)
        assert "loaded, for all" in trainer.end(signal.SIGKILL)
        forget_pages(model)
        again = host.trainer()
        assert again.read_bytes < 0.05 * weights
        assert host.train(again) == before
        assert host.sample(generator) == sampled
        mapped = sum(map(without_libraries, (again, generator)))  # the one that has loaded keeps a part of what it read
        assert 0.85 * weights < mapped - fixed < 1.15 * weights
        assert "mapped" in again.end()
        assert len(files(folder)) == 1
    remove_unused(folder)
    assert files(folder) == []
