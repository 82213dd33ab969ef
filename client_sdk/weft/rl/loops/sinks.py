"""Further places for a loop's numbers; the server always gets them as the run's curves. Packages are imported when
used."""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any, Protocol, TextIO

from weft.packages import imported

logger = logging.getLogger("weft")


class Sink(Protocol):
    """Takes the numbers of each step. The loop closes it at its end; another loop may use it again."""

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def tell(sinks: Sequence[Sink], step: int, of: int, metrics: Mapping[str, float]) -> None:
    """Give the numbers of a step to all sinks. A sink's failure (a full disk, a tracker that is away) is logged and
    ends no run, since the server has the numbers, too."""
    for sink in sinks:
        try:
            sink.log(step, of, metrics)
        except Exception as error:
            kind, why = type(sink).__name__, type(error).__name__
            logger.warning("the sink %s failed at step %d: %s: %s", kind, step, why, error)


def close(sinks: Sequence[Sink]) -> None:
    """Close all sinks. A sink's failure is logged, and the others are closed."""
    for sink in sinks:
        try:
            sink.close()
        except Exception as error:
            logger.warning("the sink %s failed at its end: %s: %s", type(sink).__name__, type(error).__name__, error)


def _package(name: str) -> Any:
    return imported(name, f"this sink needs the package: pip install {name}")


class Progress:
    """A bar with the numbers that matter, and those of the last evaluation, on the terminal; a line for each where
    there is none."""

    def __init__(self, shown: tuple[str, ...] = ("reward", "loss", "lag/max", "spent_usd")) -> None:
        self.shown = shown
        self._bar: Any = None
        self._task: Any = None

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        names = [name for name in self.shown if name in metrics] or list(metrics)  # an evaluation has none of these
        told = {name: metrics[name] for name in names}
        if not sys.stderr.isatty():
            print(f"step {step + 1}/{of}  {_text(told)}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            rich = importlib.import_module("rich.progress")
            columns = rich.BarColumn(), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[text]}")
            self._bar = rich.Progress(*columns, rich.TimeRemainingColumn(), transient=False)
            self._bar.start()
            self._task = self._bar.add_task("", total=of, text="")
            self._told, self._done = dict[str, float](), 0
        self._told |= told
        self._done = max(self._done, step + 1)  # an evaluation ends later steps on
        self._bar.update(self._task, completed=self._done, text=_text(self._told))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def _text(told: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in told.items())


class JsonLines:
    """A file with one JSON object for each step. Numbers that JSON lacks (NaN, infinity) are null. A loop that goes on
    from a checkpoint appends: of two lines of one step the last counts."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = self._opened()

    def _opened(self) -> TextIO:
        """Open the file for appending; a last line that a full disk or a kill cut off is ended first."""
        cut = False
        if self._path.is_file() and self._path.stat().st_size:
            with self._path.open("rb") as file:
                file.seek(-1, SEEK_END)
                cut = file.read() != b"\n"
        opened = self._path.open("a")
        if cut:
            opened.write("\n")
        return opened

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        told = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if self._file.closed:
            self._file = self._opened()
        self._file.write(json.dumps({"step": step, **told}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Wandb:
    """Weights & Biases. Options are those of `wandb.init`; `id` and `resume` continue a run there. Its curves use the
    axis `step`: W&B's own steps must not go back, and would drop an evaluation's late numbers. A second loop that is
    given it begins a run of its own there."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run = self._begun()

    def _begun(self) -> Any:
        run = _package("wandb").init(**self._options)
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        self._run = self._run or self._begun()
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
        self._run = None


class Trackio:
    """trackio. Options are those of `trackio.init`."""

    def __init__(self, **options: Any) -> None:
        self._trackio, self._options = _package("trackio"), options
        self._trackio.init(**options)
        self._open = True

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        if not self._open:
            self._trackio.init(**self._options)
            self._open = True
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._open:
            self._trackio.finish()
        self._open = False


class TensorBoard:
    """Event files for TensorBoard, by the package tensorboardX, which needs no torch."""

    def __init__(self, folder: str | Path) -> None:
        self._writer = _package("tensorboardX").SummaryWriter(str(folder))

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
