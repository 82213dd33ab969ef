"""Reads what our sinks write, with the packages' own readers or records; nothing leaves this machine. Prints one line
of JSON: for each sink the points of `reward` as pairs (step, value)."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from weft import rl

STEPS = ({"reward": 0.25, "kl/mean": 1e-3}, {"reward": 0.5, "kl/mean": 2e-3})
#: Metrics of the first step, logged after the second: an evaluation takes its time.
LATE = {"eval/reward": 0.75}


def through(sink: Any) -> None:
    for step, metrics in enumerate(STEPS):
        sink.log(step, len(STEPS), metrics)
    sink.log(0, len(STEPS), LATE)
    sink.close()


def tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    through(rl.TensorBoard(folder))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward", "kl/mean", "eval/reward"]
    assert [(point.step, point.value) for point in events.Scalars("eval/reward")] == [(0, 0.75)]
    return [(point.step, point.value) for point in events.Scalars("reward")]


def trackio(folder: Path) -> list[tuple[int, float]]:
    os.environ |= {"TRACKIO_DIR": str(folder)}
    through(rl.Trackio(project="sums", name="first"))
    from trackio.sqlite_storage import SQLiteStorage

    logged = SQLiteStorage.get_logs("sums", "first")
    assert [(point["step"], point["eval/reward"]) for point in logged if "eval/reward" in point] == [(0, 0.75)]
    return [(point["step"], point["reward"]) for point in logged if "reward" in point]


def wandb(folder: Path) -> list[tuple[int, float]]:
    """Runs offline. Its file is 7 bytes, then LevelDB's log: records of checksum, length, type, and a protobuf."""
    through(rl.Wandb(project="sums", dir=str(folder), mode="offline"))
    from wandb.proto.wandb_internal_pb2 import Record

    [log] = folder.glob("wandb/offline-run-*/*.wandb")
    written, at, points, late = log.read_bytes(), 7, [], []
    while at < len(written):
        _, length, kind = struct.unpack_from("<IHB", written, at)
        assert kind == 1, "a record that is whole"
        record = Record.FromString(written[at + 7 : at + 7 + length])
        items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "reward" in items:
            points.append((items["step"], items["reward"]))
        if "eval/reward" in items:
            late.append((items["step"], items["eval/reward"]))
        at += 7 + length
    assert late == [(0, 0.75)]
    return points


if __name__ == "__main__":
    os.environ |= {"WANDB_SILENT": "true"}
    found = {}
    for reader in (tensorboard, trackio, wandb):
        with tempfile.TemporaryDirectory() as folder:
            found[reader.__name__] = reader(Path(folder))
    print(json.dumps(found))
