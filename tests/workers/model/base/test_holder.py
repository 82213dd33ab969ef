"""The process that holds a base's weights for all workers on a device: who loads, who may die, who is refused.
Everything but the memory (`file_memory.py`) is the code that runs on a GPU; the tests at the end need one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.forked import Forked
from tests.waiting import until
from tests.workers.model.models import packed, reference
from workers.model.attend import PackedAttend
from workers.model.base import holder, shared
from workers.model.base.files import CannotShare, at_folder, remove_unused
from workers.model.base.shared import base_decoder
from workers.model.base.weights import ModelWeightsError, load_decoder
from workers.model.decoder import Decoder
from workers.model.device import ModelDevice
from workers.model.tiny import TINY_PATH

ROOT = Path(__file__).parents[4]
FILES = "tests.workers.model.base.file_memory"
CPU = ModelDevice(torch.device("cpu"), torch.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sockets and rooms. No holder outlives the test."""
    found = tmp_path / "base"
    found.mkdir()
    monkeypatch.setenv("HOLDER_TEST", str(found))
    monkeypatch.setitem(holder.MEMORY, "cpu", FILES)
    monkeypatch.setattr(holder, "_end", lambda: None)  # it would end the tests' own process
    yield found
    for pid in holders(found):
        os.kill(pid, signal.SIGKILL)


def rooms(folder: Path) -> int:
    """The number of times that weights were loaded."""
    return len(list(folder.glob("room-*")))


def holders(folder: Path) -> list[int]:
    """The processes, other than tests, that have a lock of the folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "comm").read_text().strip()
            held = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:
            continue
        if title == holder.TITLE and any(path.startswith(str(folder)) for path in held):
            found.append(int(process.name))
    return found


CLIENT = f"""
import sys, os
from pathlib import Path
from tests.workers.model.base.forked_holder import fork_holders
from workers.model.base.shared import base_decoder
from workers.model.device import choose_device
fork_holders("{FILES}")
decoder, how = base_decoder(Path(sys.argv[1]), choose_device("cpu", *sys.argv[3:]), Path(sys.argv[2]))
print(how.partition(",")[0], float(decoder.embed.double().sum()), flush=True)
sys.stdin.read()
"""


class Client:
    """A worker that only gets its weights."""

    def __init__(self, folder: Path, model: Path = TINY_PATH, dtype: str = "float32") -> None:
        self.process: Forked | subprocess.Popen[str] = Forked("-c", CLIENT, str(model), str(folder), dtype)

    def said(self) -> tuple[str, float]:
        assert self.process.stdout is not None
        how, total = self.process.stdout.readline().split()
        return how, float(total)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.mark.parametrize("family", ["qwen3-tied", "nemotron-h-latent"])
def test_held_weights_have_the_bits_of_a_copy(family: str, tmp_path: Path, folder: Path) -> None:
    model, where = tmp_path / "model", ModelDevice(CPU.device, torch.bfloat16)
    reference(family).save_pretrained(model)
    own = load_decoder(model, where.dtype)
    for word in ("loaded, for all", "opened"):
        decoder, how = base_decoder(model, where, folder)
        assert word in how
        for (name, mine), (theirs, other) in zip(own.named_parameters(), decoder.named_parameters(), strict=True):
            assert (name, mine.dtype, mine.shape) == (theirs, other.dtype, other.shape)
            assert torch.equal(mine, other)
            assert other.data_ptr() % 64 == 0
    assert rooms(folder) == 1


def test_one_loads_for_all_who_come_at_once_and_the_death_of_any_leaves_it_to_the_others(folder: Path) -> None:
    clients = [Client(folder) for _ in range(4)]
    total = float(load_decoder(TINY_PATH).embed.double().sum())
    said = [client.said() for client in clients]
    assert sorted(how for how, _ in said) == ["loaded", "opened", "opened", "opened"]
    assert {found for _, found in said} == {total}
    (pid,) = holders(folder)
    first = next(client for client, (how, _) in zip(clients, said, strict=True) if how == "loaded")
    first.kill()
    os.kill(pid, signal.SIGTERM)  # sent to all processes of a stopping service: it stays for workers that drain
    remove_unused(folder)
    again = Client(folder)
    assert again.said() == ("opened", total)
    assert holders(folder) == [pid]
    assert rooms(folder) == 1
    for client in (*clients, again):
        client.kill()
    until(lambda: not holders(folder))  # after a SIGTERM without grace
    assert Client(folder).said() == ("loaded", total)


def test_a_holder_that_dies_ends_its_workers_and_the_next_starts_another(folder: Path) -> None:
    client = Client(folder)
    client.said()
    (pid,) = holders(folder)
    os.kill(pid, signal.SIGKILL)
    assert client.process.wait(60) == 1
    log = client.process.communicate()[1]
    assert "the process that held the weights is gone" in log
    again = Client(folder)
    assert again.said()[0] == "loaded"
    assert rooms(folder) == 2
    assert holders(folder) != [pid]
    again.kill()


@pytest.mark.parametrize("trouble", ["die", "full"])
def test_a_holder_that_dies_while_it_loads_or_waits_for_memory(folder: Path, trouble: str) -> None:
    """One of the workers that wait for it starts another; memory of a process that is just ending is waited for."""
    (folder / trouble).touch()
    clients = [Client(folder) for _ in range(3)]
    assert sorted(client.said()[0] for client in clients) == ["loaded", "opened", "opened"]
    assert rooms(folder) == 1
    for client in clients:
        client.kill()


def test_unused_holders_leave_and_take_everything_along(folder: Path) -> None:
    client = Client(folder)
    client.said()
    own = folder / f"weft-{os.geteuid()}"
    (kept,) = own.glob("*.sock")
    assert kept.stat().st_mode & 0o777 == 0o600
    remove_unused(folder)
    time.sleep(0.2)
    assert len(holders(folder)) == 1
    client.kill()
    until(lambda: not used(kept, folder))
    remove_unused(folder)
    until(lambda: not holders(folder))
    until(lambda: remove_unused(folder) or not any(own.iterdir()))  # its lock goes when the kernel has let go of it


def test_a_later_worker_cannot_end_the_holder_for_the_others(folder: Path) -> None:
    """If memory were shared anew for each worker, one for which that fails would end it."""
    client = Client(folder)
    client.said()
    (folder / "unshared").touch()
    other = Client(folder)
    assert other.said()[0] == "opened"
    assert len(holders(folder)) == 1
    for each in (client, other):
        each.kill()


def test_the_memory_of_a_holder_is_free_for_whoever_it_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even within the time of grace, since those workers load a copy of their own."""
    client = Client(folder)
    client.said()
    (path,) = (folder / f"weft-{os.geteuid()}").glob("*.sock")
    client.kill()
    until(lambda: not used(path, folder))

    def refused(folder: Path, load: holder.Load) -> None:
        raise CannotShare("the process that holds the weights is in another container")

    there: list[int] = []

    def load(*args: Any) -> Decoder:
        there.extend(holders(folder))
        return load_decoder(*args)

    monkeypatch.setattr(shared, "held", refused)
    monkeypatch.setattr(shared, "load_decoder", load)
    monkeypatch.setattr(shared, "MEMORY_WITHIN_S", 200.0)
    _, how = base_decoder(TINY_PATH, CPU, folder)
    assert "in another container" in how
    assert not there  # two copies at once may not fit


def test_a_holder_that_stays_is_not_waited_for(folder: Path) -> None:
    client = Client(folder)
    client.said()
    remove_unused(folder, within_s=3600)
    assert len(holders(folder)) == 1
    client.kill()
    remove_unused(folder, within_s=3600)
    assert not holders(folder)


def used(path: Path, folder: Path) -> bool:
    """Whether a holder has a connection besides its listener."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(path.name) for line in lines) > 1


def test_grace_lets_a_worker_that_starts_again_find_its_holder(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    grace, answers = holder.Grace(3600), holder.Here([1])
    serving = threading.Thread(target=holder.serve, args=(listener, "n", answers, grace), daemon=True)
    serving.start()
    for _ in range(2):
        assert asked(tmp_path / "s", b"n") == answers
    refused = asked(tmp_path / "s", b"another")
    assert isinstance(refused, holder.Refused)
    assert "other weights" in refused.why
    serving.join(1.5)
    assert serving.is_alive()
    grace.end()
    serving.join(30)
    assert not serving.is_alive()


def asked(path: Path, message: bytes) -> holder.Here | holder.Refused:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        connection = Connection(os.dup(link.fileno()))
        connection.send_bytes(message)
        found: holder.Here | holder.Refused = msgspec.msgpack.decode(
            connection.recv_bytes(), type=holder.Here | holder.Refused
        )
        connection.close()
        return found


def test_two_models_and_two_dtypes_have_a_holder_each(tmp_path: Path, folder: Path) -> None:
    reference("qwen3").save_pretrained(tmp_path / "model")
    clients = [Client(folder), Client(folder, tmp_path / "model"), Client(folder, dtype="bfloat16")]
    assert [client.said()[0] for client in clients] == ["loaded"] * 3
    assert len(holders(folder)) == 3
    for client in clients:
        client.kill()


def test_other_bytes_than_the_name_says_are_refused(tmp_path: Path, folder: Path) -> None:
    """For instance if a checkpoint is replaced, or the server updated, while a worker starts."""
    load = holder.Load.of(TINY_PATH, CPU, FILES)
    with pytest.raises(CannotShare, match="has changed since the worker looked"):
        holder.held(folder, msgspec.structs.replace(load, name="0" * 32))
    shutil.copytree(TINY_PATH, tmp_path / "model")
    model = holder.Load.of(tmp_path / "model", CPU, FILES)
    assert model.name != load.name
    os.utime(tmp_path / "model" / "config.json", (1, 1))
    assert holder.Load.of(tmp_path / "model", CPU, FILES).name != model.name


def test_what_cannot_be_shared_is_a_copy_of_its_own_and_the_log_says_why(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "closed").touch()
    decoder, how = base_decoder(TINY_PATH, CPU, folder)
    assert "a copy of its own" in how
    assert "invalid device context" in caplog.text
    assert 'with base_dir = "" it has one for each' in caplog.text
    assert torch.equal(decoder.embed, load_decoder(TINY_PATH).embed)
    until(lambda: not holders(folder))  # its memory is needed
    reference("llama").save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ModelWeightsError, match="missing"):
        base_decoder(tmp_path / "model", CPU, folder)
    assert "ModelWeightsError" in caplog.text
    _, how = base_decoder(TINY_PATH, CPU, folder / "nowhere")
    assert "set base_dir" in how


def test_only_processes_that_see_each_other_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    link = Connection(ours.detach())
    with monkeypatch.context() as patch:
        patch.setattr(holder, "_peer", lambda link: (0, os.geteuid()))  # as from another PID namespace
        assert not holder._answered(link, b"n", "n", holder.Here([]))
    other = Connection(theirs.detach())
    refused = msgspec.msgpack.decode(other.recv_bytes(), type=holder.Here | holder.Refused)
    assert "one IPC and one PID namespace" in refused.why
    assert holder._answered(link, b"n", "n", holder.Here([]))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_real_namespaces_and_users(folder: Path) -> None:
    client = Client(folder)
    client.said()
    apart = ["unshare", "--ipc", sys.executable, "-c", CLIENT, str(TINY_PATH), str(folder)]
    found = subprocess.run(apart, cwd=ROOT, text=True, capture_output=True, input="")
    if "unshare failed" in found.stderr or "Operation not permitted" in found.stderr:
        pytest.skip("no namespaces here")
    assert "are not shared: the process that holds the weights is in another container" in found.stderr
    own = folder / f"weft-{os.geteuid()}"
    (path,) = own.glob("*.sock")
    own.chmod(0o711)
    path.chmod(0o666)
    with at_folder(own) as short:
        stranger = os.fork()
        if stranger == 0:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(f"{short}/{path.name}")
                os._exit(len(link.recv(1)))
        assert os.waitpid(stranger, 0)[1] == 0  # it was hung up on
    client.kill()


# On a GPU

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def logits(decoder: Decoder) -> torch.Tensor:
    """The logits of a packed batch of two sequences, on the CPU."""
    tokens, positions = (each.to(decoder.device) for each in packed([7, 18], decoder.config.vocab_size))
    with torch.no_grad():
        return decoder.logits(decoder(tokens, positions, PackedAttend([7, 18]))).cpu()


ON_GPU = CLIENT.replace(f'fork_holders("{FILES}")', "").replace('"cpu"', '"cuda"')


class GpuClient(Client):
    def __init__(self, folder: Path, model: Path, dtype: str) -> None:
        command = [sys.executable, "-c", ON_GPU, str(model), str(folder), dtype]
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [
    pytest.param(torch.float32, 5e-3, marks=on_gpu, id="float32"),
    pytest.param(torch.bfloat16, 0.15, marks=on_gpu, id="bfloat16"),
])  # fmt: skip
def test_a_gpu_has_one_copy_whose_logits_are_the_cpus(
    tmp_path: Path, folder: Path, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers use expandable segments; the holder allocates without them."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    model, where = tmp_path / "model", ModelDevice(torch.device("cuda", 0), dtype)
    reference("moe").save_pretrained(model)
    decoder, how = base_decoder(model, where, folder)
    assert "loaded, for all workers on the device" in how
    expected = logits(load_decoder(model, dtype))
    assert torch.allclose(logits(decoder), expected, atol=tolerance)
    assert torch.equal(logits(decoder), logits(load_decoder(model, dtype, "cuda")))
    graph, tokens = torch.cuda.CUDAGraph(), torch.arange(4, device="cuda")
    torch.nn.functional.embedding(tokens, decoder.embed)
    with torch.cuda.graph(graph):
        rows = torch.nn.functional.embedding(tokens, decoder.embed)
    name = str(dtype).removeprefix("torch.")
    other = GpuClient(folder, model, name)
    assert other.said()[0] == "opened"
    other.kill()
    graph.replay()
    assert torch.equal(rows, decoder.embed[:4])
    assert torch.allclose(logits(decoder), expected, atol=tolerance)
    assert GpuClient(folder, model, name).said()[0] == "opened"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpus_memory_is_taken_once_and_given_back(tmp_path: Path, folder: Path) -> None:
    """Two gigabytes of weights, two workers, each killed in turn, and then the holder."""
    from bench.memory import make_model

    weights, free = make_model(tmp_path / "model", 2048), lambda: torch.cuda.mem_get_info(0)[0]
    before = free()
    first = GpuClient(folder, tmp_path / "model", "float32")
    assert first.said()[0] == "loaded"
    one = before - free()
    second = GpuClient(folder, tmp_path / "model", "float32")
    assert second.said()[0] == "opened"
    assert weights < one
    assert before - free() < one + weights // 2  # a context, but no weights
    first.kill()
    assert before - free() > weights
    third = GpuClient(folder, tmp_path / "model", "float32")
    assert third.said()[0] == "opened"
    (pid,) = holders(folder)
    os.kill(pid, signal.SIGKILL)
    for client in (second, third):
        assert client.process.wait(60) == 1
    until(lambda: before - free() < weights // 4)
    assert GpuClient(folder, tmp_path / "model", "float32").said()[0] == "loaded"
