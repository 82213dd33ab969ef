"""One rank of a trainer (`python -m workers.trainer.ranks.process DOOR PARENT`), started by torchrun (`launch`).

Rank 0 is to the server what a trainer of one process is; the others do what it says. SIGTERM is for rank 0.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scheduler.links.configs import TrainerConfig
from scheduler.links.sockets import WorkerLink
from workers.basics import announced, blobs_of, say_as
from workers.leave import leave
from workers.model.base.files import CannotShare
from workers.model.base.sharded import held_bytes, load_sharded
from workers.model.base.shared import Mapped, mapped
from workers.model.config import UnsupportedModel
from workers.model.device import ModelDevice, device_of
from workers.model.isolation import probe
from workers.model.owned.load import Owned, load_owned
from workers.nursery import die_with_parent
from workers.scratch import scratch
from workers.trainer.computing import Others
from workers.trainer.process import StopFlag, serve_all
from workers.trainer.ranks.group import FOR_EVER, Base, Group
from workers.trainer.ranks.launch import handed
from workers.trainer.ranks.leader import Leader, Member, Word, announce, follow
from workers.trainer.trainer import Trainer
from workers.trainer.watchdog import Watchdog

log = logging.getLogger("trainer")


def main(door: str, parent: int) -> int:
    die_with_parent()  # torchrun's children have sessions of their own
    if os.getppid() != parent:  # the parent died before that call
        leave(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config, link = handed(door)
    say_as(config.basics)
    # Rank 0 has nothing to finish yet; the others leave when it does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if link is None else lambda signum, frame: leave(0))
    torch.set_num_threads(config.basics.threads)
    where = device_of(_own(config.basics.device), config.basics.dtype)
    on_gpu = where.device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=FOR_EVER)
    group = Group(dist.new_group(backend="gloo", timeout=FOR_EVER) if on_gpu else None)
    with nullcontext() if link is None else announced(config.basics, "trainer"):
        bases = load(config, where, mesh_of(config, where), group)
    watchdog = Watchdog()
    blobs = blobs_of(config.basics)

    def begin(pages: Path) -> Member:
        models = {name: base.decoder for name, base in bases.items()}

        def make(others: Others) -> Trainer:
            return Trainer(models, blobs, config.bounds, pages, watchdog.limit, others)

        return Member(group, bases, where.device, make)

    with scratch("paged") as temporary:
        pages = _pages(config, temporary)
        if link is None:
            follow(group, lambda: begin(pages))
            return 0
        stop = StopFlag()
        signal.signal(signal.SIGTERM, stop.set)

        def lead(_: Path) -> Leader:
            announce(group, Word.BEGIN, watchdog.limit)
            return Leader(begin(pages))

        code = serve_all(config, WorkerLink(link), blobs, stop, lead)
        announce(group, Word.STOP, watchdog.limit)
        return code


def mesh_of(config: TrainerConfig, where: ModelDevice) -> DeviceMesh:
    """The mesh of ranks: each keeps a part of the base; or, with several nodes, each node keeps the whole base among
    its ranks."""
    if config.nodes > 1 and config.shard == "node":
        return init_device_mesh(where.device.type, (config.nodes, config.ranks), mesh_dim_names=("nodes", "ranks"))
    return init_device_mesh(where.device.type, (config.nodes * config.ranks,))


def load(config: TrainerConfig, where: ModelDevice, mesh: DeviceMesh, group: Group) -> dict[str, Base]:
    """This rank's parts of the base models. Tenants are packed where every rank finds that they can be."""
    bases: dict[str, Base] = {}
    for name, path in config.basics.models.items():
        base: Base
        if config.shard == "experts":
            base = load_owned(path, where.dtype, where.device, group.control)
        else:
            together = map_together(Path(path), config, where, group)
            base = together or load_sharded(path, where.dtype, where.device, mesh)
        bases[name] = base
        probe(base.decoder, Path(config.basics.data_dir) / "isolation")
        found = group.exchange(base.decoder.isolation)
        base.decoder.isolation = "per-segment" if "per-segment" in found else found[0]
        if isinstance(base, Owned) and base.decoder.isolation == "per-segment":
            problem = "tenants' rows meet at the owner of an expert, and this machine must compute each tenant's alone"
            raise UnsupportedModel(name, Path(path), problem, 'trainer.shard = "all"')
        if group.leads:
            held, mode = held_bytes(base.decoder) >> 20, base.decoder.isolation
            log.info("loaded %s over %d ranks, %d MiB of it on this one; %s", name, group.size, held, mode)
    return bases


def map_together(path: Path, config: TrainerConfig, where: ModelDevice, group: Group) -> Mapped | None:
    """The base as one file mapped by the ranks of a host, if each host is to have the whole base: on a CPU, and only if
    all ranks can."""
    folder, whole = config.basics.base_dir, config.nodes == 1 or config.shard == "node"
    if where.device.type != "cpu" or not folder or not whole:
        return None
    base: Mapped | None = None
    problem = ""
    try:
        base = Mapped(mapped(path, where, Path(folder))[0])
    except (CannotShare, OSError) as error:
        problem = str(error) or type(error).__name__
    problems = list(filter(None, group.exchange(problem)))
    if problems and group.leads:
        log.warning("%s: ranks have a part each, for its weights are not shared: %s", path.name, problems[0])
    return None if problems else base


def _pages(config: TrainerConfig, temporary: Path) -> Path:
    """A folder for this rank alone, emptied of what a lost trainer has left."""
    if config.basics.redis_url:
        return temporary
    pages = Path(config.basics.data_dir) / f"{config.pages}-{dist.get_rank()}"
    shutil.rmtree(pages, ignore_errors=True)
    return pages


def _own(device: str) -> str:
    """A rank's own GPU, where GPUs are used."""
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return f"cuda:{os.environ['LOCAL_RANK']}" if cuda else device


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2])))
