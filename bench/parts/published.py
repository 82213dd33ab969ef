"""A model folder as one downloads it, of any Qwen3-MoE shape, with random weights: what a server makes of a published
model can be tried where none can be fetched.

config.json, an index, a shard of safetensors for each layer and one for what is around them, in bfloat16, and the
tokenizer of the built-in model. Weights are drawn where `device` is, a shard at a time, and several shards are written
at once. They have the sizes of `toy.random_decoder`: numbers stay near one through any number of layers.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.parts.peers import transformers_config
from workers.model.base.weights import places
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.planning.machine import free_bytes
from workers.model.tiny import TINY_PATH

#: Shards that are drawn and written at a time.
WRITERS = 8
GIB = 2**30

Shapes = dict[str, tuple[int, ...]]


def say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def model_folder(folder: Path | None, config: DecoderConfig, saved_bytes: int, *, keep: bool) -> Iterator[Path]:
    """The model, made if it is not there, and removed if it was made and is not to `keep`. `saved_bytes`: how much its
    tenants will save."""
    folder = folder or Path(tempfile.mkdtemp(prefix="weft-model-", dir=_spacious(size_of(config))))
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "config.json").is_file():
        say(f"model: {folder} is there already")
        yield folder
        return
    try:
        _check_room(folder, size_of(config), saved_bytes)
        began, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its CUDA context is no part of the service
            size = pool.submit(write_folder, folder, config, device, say).result()
        say(f"model: {size / GIB:.2f} GiB in {folder}, written in {time.monotonic() - began:.1f} s")
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _spacious(size_bytes: int) -> Path | None:
    """The place for the model: in memory, if a third of the free memory stays free; otherwise on the disk."""
    memory = Path("/dev/shm")
    free = min(shutil.disk_usage(memory).free, 2 * free_bytes() // 3) if memory.is_dir() else 0
    return memory if size_bytes <= free else None


def _check_room(folder: Path, model_bytes: int, saved_bytes: int) -> None:
    """Check the room for the model, and for what its tenants save into the server's data folder. Exits if there is too
    little."""
    data = Path(tempfile.gettempdir())
    together = folder.stat().st_dev == data.stat().st_dev
    for place, needed, what in (
        (folder, model_bytes + together * saved_bytes, "the model"),
        (data, saved_bytes, "what the tenants save"),
    ):
        free = shutil.disk_usage(place).free
        if place.resolve().is_relative_to("/dev/shm"):
            free = min(free, free_bytes())
        say(f"room: {place} has {free / GIB:.1f} GiB, {what} takes {needed / GIB:.1f}")
        if needed > free:
            raise SystemExit(f"{place} has too little room for {what}: choose another --folder, or TMPDIR")


def shards_of(config: DecoderConfig) -> dict[str, Shapes]:
    """By file: the names and shapes of its tensors."""
    found: dict[str, Shapes] = {}
    for name, place in places(Decoder(config, torch.bfloat16, "meta")):
        layer = int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0
        file = f"model-{layer + 1:05}-of-{config.num_layers + 1:05}.safetensors"
        found.setdefault(file, {})[name] = tuple(place.target.shape)
    return found


def size_of(config: DecoderConfig) -> int:
    """Bytes of all tensors."""
    return sum(2 * math.prod(shape) for shapes in shards_of(config).values() for shape in shapes.values())


def write_folder(
    folder: Path, config: DecoderConfig, device: str, tell: Callable[[str], None] = lambda line: None
) -> int:
    """Write the folder; returns the bytes of all tensors. config.json comes last: a folder that has one is complete."""
    shards, began, written = shards_of(config), time.monotonic(), 0
    with ThreadPoolExecutor(WRITERS) as pool:
        drawn = [
            pool.submit(_write_shard, folder / file, shapes, device, seed)
            for seed, (file, shapes) in enumerate(shards.items())
        ]
        for number, shard in enumerate(as_completed(drawn), start=1):
            written += shard.result()
            if number % WRITERS == 0 or number == len(drawn):
                rate = written / (time.monotonic() - began)
                tell(f"shard {number} of {len(drawn)}, {written / GIB:.1f} GiB at {rate / GIB:.2f} GiB/s")
    index = {"metadata": {"total_size": written}, "weight_map": {name: f for f in shards for name in shards[f]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_PATH / name, folder)
    published = transformers_config(config, dtype="bfloat16", architectures=[config.architecture])
    (folder / "config.json").write_text(published.to_json_string())
    return written


def _write_shard(path: Path, shapes: Shapes, device: str, seed: int) -> int:
    """Write one file: the length of its header, the header, and all tensors one after another."""
    values, header, start = _drawn(shapes, device, seed), dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, shape in shapes.items():
        end = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        start = end
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        file.write(values.view(torch.uint8).numpy().data)
    return start


def _drawn(shapes: Mapping[str, tuple[int, ...]], device: str, seed: int) -> Tensor:
    """Random numbers for all these tensors, on the host."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=generator)
    for name, part in zip(shapes, values.split(sizes), strict=True):
        if "norm" in name:
            part.fill_(1.0)
        elif "embed_tokens" in name:
            part.mul_(50.0)
        elif name.endswith("mlp.gate.weight"):
            part.mul_(2.5)
    if device == "cpu":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)
