"""Compiles the kernels for this machine, once, and loads them.

The result is kept in the user's cache folder, or among temporary files where they have none, under the hash of
source, flags, compiler and processor, with a checksum at its end: what a crash or a full disk left is compiled anew.
Compiling takes a few seconds; `python -m workers.model.native.build [FILE.c ...]` does it ahead, also for the
generator's attend.c. An image has what it compiled ahead beside the rooms, where no volume of a user's cache hides
it. Without a C compiler torch computes the same sums, several times slower where groups are small or layers are
recurrent.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_HERE = Path(__file__).absolute().parent
#: The folder in which the build of an image, which sets XDG_CACHE_HOME to it, leaves compiled kernels. Elsewhere it is
#: only read.
_AHEAD = _HERE.parents[2] / "compiled" / "weft"
#: The sources of one library, since they call each other.
_TOGETHER = tuple(_HERE / name for name in ("kernels.c", "outer.c", "gemm.c", "gate.c", "joined.c"))
#: Headers that kernels include, the generator's too.
_HEADERS = tuple(_HERE / name for name in ("products.h", "segments.h", "vectors.h"))
#: Results are those of the code as written: nothing is reordered, and products are fused with sums only where `fused`
#: says so.
_FLAGS = ("-O3", "-std=gnu11", "-march=native", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-shared")


@cache
def library(source: Path | None = None) -> ctypes.CDLL | None:
    """The compiled kernels of `source` (None: those of `_TOGETHER`); None if they cannot be built, with a
    reason in the log."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("no C compiler (cc, gcc or clang): adapters of small groups are computed several times slower")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, _TOGETHER if source is None else (source,))))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("the native kernels could not be built, adapters are computed slower: %s", reason.strip()[-500:])
        return None


def _compiled(compiler: str, files: Sequence[Path]) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    texts = [file.read_text() for file in (*files, *_HEADERS)]
    facts = "\n".join((*texts, *_FLAGS, version, processor()))
    name = f"{files[0].stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    if _whole(_AHEAD / name):
        return _AHEAD / name
    target = _cache_folder() / name
    if not _whole(target):
        handle, made = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        try:
            _compile(compiler, files, made)
            _seal(Path(made))
            os.replace(made, target)  # atomic: another process may compile at the same time
        finally:
            Path(made).unlink(missing_ok=True)
    return target


def _seal(file: Path) -> None:
    """Add a checksum over everything before it. Loaders ignore bytes after the last section."""
    body = file.read_bytes()
    with file.open("ab") as out:
        out.write(hashlib.sha256(body).digest())
        out.flush()
        os.fsync(out.fileno())


def _whole(file: Path) -> bool:
    """True if the file is exactly what was compiled: a damaged library may end the process that loads it."""
    try:
        found = file.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return len(found) > size and hashlib.sha256(found[:-size]).digest() == found[-size:]


def _compile(compiler: str, files: Sequence[Path], target: str) -> None:
    """Compile the files into the library `target`, with OpenMP if the compiler has it."""
    command = [compiler, *_FLAGS, f"-I{_HERE}", "-o", target, *map(str, files), "-lm"]
    with_threads = subprocess.run([*command, "-fopenmp"], capture_output=True, text=True)
    if with_threads.returncode:
        subprocess.run(command, capture_output=True, text=True, check=True)


def processor() -> str:
    """The processor's name and features, which -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cache_folder() -> Path:
    """A folder that only this user can write, since its files are loaded and run. If the user has no cache folder, one
    in the temporary folder that all processes of the user find."""
    for choose in (_of_the_user, _of_temporary_files):
        with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home folder
            folder = choose()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
            if ours and os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="weft-native-"))


def _of_the_user() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def _of_temporary_files() -> Path:
    return Path(tempfile.gettempdir()) / f"weft-native-{os.geteuid()}"


if __name__ == "__main__":
    named = [Path(name).absolute() for name in sys.argv[1:]] or sorted(_HERE.glob("*.c"))
    sources = dict.fromkeys(None if source in _TOGETHER else source for source in named)
    raise SystemExit(0 if all([library(source) is not None for source in sources]) else 1)
