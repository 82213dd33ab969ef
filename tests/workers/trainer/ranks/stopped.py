"""One of two ranks: the second stops itself, and the first then tells it something, either its share of a pass, which
fits in no socket's buffer, or a word.

python -m tests.workers.trainer.ranks.stopped FOLDER pass|begin|drain|stop
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from scheduler.links.messages import OpKind, Pass, TrainOp
from store.blobs.folder import FolderBlobs
from workers.trainer.ranks import leader
from workers.trainer.ranks.group import Group
from workers.trainer.ranks.leader import Leader, Member, Word, announce
from workers.trainer.trainer import Trainer
from workers.trainer.watchdog import Watchdog

#: Seconds that telling it may take.
LIMIT_S = 1


def main(folder: Path, word: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    group, watchdog, blobs = Group(), Watchdog(), FolderBlobs(folder / "blobs")
    if not group.leads:
        os.kill(os.getpid(), signal.SIGSTOP)
    member = Member(
        group, {}, torch.device("cpu"), lambda others: Trainer({}, blobs, None, folder, watchdog.limit, others)
    )
    if word == "pass":
        large = TrainOp("op", "run", 0, OpKind.OPTIM_STEP, body=bytes(64 << 20))
        Leader(member).execute(Pass(1, "model", [large], limit_s=LIMIT_S), print)
    elif word == "drain":
        Leader(member).drain(print)
    else:
        announce(group, Word[word.upper()], watchdog.limit)


if __name__ == "__main__":
    with patch.object(leader, "HEARS_WITHIN_S", LIMIT_S):
        main(Path(sys.argv[1]), sys.argv[2])
