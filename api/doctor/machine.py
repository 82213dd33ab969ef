"""The machine that a service is to run on: its disk, its permissions, its limit of open files, its GPUs and kernels."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from api.doctor.findings import Finding, ok, warning, wrong
from api.server.serve import other_server
from api.state.polls import OTHER_FILES, most_connections
from store.blobs.room import LEAST_FREE_BYTES, NoRoom, Room
from store.settings import Settings, SettingsError

#: Free bytes below which an operator should look for room, before anything is refused.
SHORT_BYTES = 40 * LEAST_FREE_BYTES
_ROOMS = Path(__file__).resolve().parents[2]


def disk(settings: Settings) -> Iterator[Finding]:
    """Check that the data folder allows what a service does in it: a write, a flush, a rename, a lock."""
    folder = settings.data_dir if settings.data_dir.exists() else nearest(settings.data_dir)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
            file = Path(place, "a")
            with file.open("wb") as stream:
                stream.write(b"x")
                stream.flush()
                os.fsync(stream.fileno())
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(file, file.with_name("b"))
    except OSError as error:
        remedy = "give the user that runs weftd a folder that it may write to, on a file system with locks"
        yield wrong("disk", f"{folder} cannot be written, flushed, locked and renamed in: {error.strerror}", remedy)
        return
    free = shutil.disk_usage(folder).free
    try:
        Room(folder).check()
    except NoRoom as error:
        yield wrong("disk", str(error), f"free some room on the file system of {folder}, or move the data folder")
        return
    says = f"{free / 1e9:.1f} GB are free in {folder}"
    if free < SHORT_BYTES:
        yield warning("disk", says, f"new work is refused below {LEAST_FREE_BYTES >> 20} MiB: make room before")
    else:
        yield ok("disk", says)


def permissions(settings: Settings) -> Iterator[Finding]:
    """Check that everything in the data folder is readable by its user alone."""
    folder = settings.data_dir
    if not folder.is_dir():
        yield ok("permissions", f"{folder} is not there yet: the first start makes it")
        return
    open_to_others = []
    for path in (folder, folder / "server.secret", folder / "weft.db"):
        if not path.exists():
            continue
        facts = path.stat()
        if facts.st_uid != os.geteuid():
            yield wrong(
                "permissions",
                f"{path} belongs to user {facts.st_uid}, and this is user {os.geteuid()}",
                f"run weftd as that user, or chown -R {os.geteuid()} {folder}",
            )
            return
        if facts.st_mode & 0o077:
            open_to_others.append(path)
    # If nobody else may enter the folder, the modes of its contents do not matter.
    if folder in open_to_others:
        names = ", ".join(str(path) for path in open_to_others)
        yield warning("permissions", f"other users of this machine may read {names}", f"chmod -R go= {folder}")
    else:
        yield ok("permissions", f"{folder} is its user's alone")


def open_files(settings: Settings) -> Iterator[Finding]:
    """Check that enough files may be open at a time. The server raises its own limit as far as it may."""
    wanted = settings.front.max_connections
    remedy = f"ulimit -n {wanted + OTHER_FILES} (systemd: LimitNOFILE), or lower front.max_connections"
    try:
        most = most_connections(settings.front)
    except SettingsError as error:
        yield wrong("open files", str(error), remedy)
        return
    if most < wanted:
        says = f"a process may open {most + OTHER_FILES} files: {most} connections at a time"
        yield warning("open files", says, remedy)
    else:
        yield ok("open files", f"enough for {wanted} connections")


def server(settings: Settings) -> Iterator[Finding]:
    process = other_server(settings.data_dir)
    says = "none serves this folder alone" if process is None else f"process {process} serves this folder"
    yield ok("server", says)


def computing(settings: Settings) -> Iterator[Finding]:
    """GPUs and kernels, as found by a process that loads torch like the workers do."""
    paths = os.pathsep.join([str(_ROOMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "workers.model.devices"]
    asked = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    try:
        found = json.loads(asked.stdout)
    except ValueError:
        reason = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield wrong("torch", f"cannot be loaded: {reason}", "install torch as `make setup` does")
        return
    gpus = found["gpus"]
    for index, gpu in enumerate(gpus):
        free = f"{gpu['free'] / 1e9:.0f} of {gpu['total'] / 1e9:.0f} GB free"
        yield ok("gpu", f"cuda:{index} is a {gpu['name']} (sm {gpu['capability']}), {free}; torch {found['torch']}")
    for role, device in (("trainer", settings.trainer.device), ("generator", settings.generator.device)):
        number = int(device.partition(":")[2] or 0)
        if device.startswith("cuda") and number >= len(gpus):
            says = f"{role}.device is {device}, and torch {found['torch']} finds {len(gpus)} GPUs"
            yield wrong("gpu", says, "install torch for this GPU's driver, or set the device to auto or cpu")
    if not gpus:
        yield ok("gpu", f"none: trainer and generator compute on the CPU, with torch {found['torch']}")
    if gpus and not found["triton"]:
        yield wrong("kernels", "triton, in which the GPU's are written, cannot be imported", "pip install triton")
    elif not found["native"]:
        says = "those of the CPU could not be built: small groups are several times slower"
        yield warning("kernels", says, "apt-get install gcc")
    else:
        yield ok("kernels", "those of the CPU are built" + (f"; triton {found['triton']}" if gpus else ""))


def nearest(folder: Path) -> Path:
    """The folder, or the nearest existing folder that it will be made in."""
    return folder if folder.is_dir() or folder == folder.parent else nearest(folder.parent)
