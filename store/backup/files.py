"""The files of a backup: copied while a server writes and deletes beside it, each with its SHA-256.

A blob never changes under its name, so a later round copies only what is new. What vanishes meanwhile was deleted by
the server, and is left out. The list `SHA256SUMS` has the form of `sha256sum -c`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from store.blobs.contract import SUMS_FILE
from store.people.secret import FILE_NAME as SECRET

SUMS = "SHA256SUMS"
#: The mark of a data folder, or of a bucket's prefix, into which a backup is being restored.
RESTORING = ".restoring"
#: Blobs that are not copied: those that can be made again, and unfinished ones.
_LEFT_OUT = {"archives", ".unfinished"}
_CHUNK = 1 << 20


class BadBackup(ValueError):
    """A backup that cannot be made or restored; the message names what stands in the way."""


def copy_new(data_dir: Path, target: Path, sums: dict[str, str], refs: Iterable[str] | None = None) -> None:
    """Copy the files of a data folder, without its database, that are not in `sums` (path -> SHA-256), and add them
    there; with `refs` only these blobs."""
    for name in _listed(data_dir) if refs is None else _files_at(data_dir, refs):
        if name in sums:
            continue
        digest = _copied(data_dir / name, target / name)
        if digest is not None:
            sums[name] = digest
        elif name.endswith(f"/{SUMS_FILE}"):
            _leave_out(target, name.removesuffix(SUMS_FILE), sums)
    for name in [name for name in sums if name.endswith(f"/{SUMS_FILE}")]:
        folder = name.removesuffix(SUMS_FILE)
        wanted: dict[str, str] = json.loads((target / name).read_text())
        if any(sums.get(folder + file) != digest for file, digest in wanted.items()):
            _leave_out(target, folder, sums)


def _listed(data_dir: Path) -> Iterator[str]:
    if (data_dir / SECRET).is_file():
        yield SECRET
    for folder, folders, files in os.walk(data_dir / "blobs"):
        here = Path(folder).relative_to(data_dir)
        if here.parts == ("blobs",):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from ((here / name).as_posix() for name in files)


def _files_at(data_dir: Path, refs: Iterable[str]) -> Iterator[str]:
    for ref in refs:
        yield f"blobs/{ref}"
        for folder, _, files in os.walk(data_dir / "blobs" / ref):
            yield from ((Path(folder).relative_to(data_dir) / name).as_posix() for name in files)


def _leave_out(target: Path, folder: str, sums: dict[str, str]) -> None:
    """Forget a folder that was deleted or replaced while it was copied; the next round copies what is there then."""
    shutil.rmtree(target / folder, ignore_errors=True)
    for name in [name for name in sums if name.startswith(folder)]:
        del sums[name]


def _copied(source: Path, target: Path) -> str | None:
    """Copy a file with its modification time, by which results expire. Returns its SHA-256; None if there is no such
    file."""
    try:
        reading = source.open("rb")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    with reading:
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with target.open("wb") as writing:
            while chunk := reading.read(_CHUNK):
                digest.update(chunk)
                writing.write(chunk)
        at = os.fstat(reading.fileno())
    os.utime(target, ns=(at.st_atime_ns, at.st_mtime_ns))
    return digest.hexdigest()


def digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_sums(backup: Path, sums: Mapping[str, str]) -> None:
    (backup / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def read_sums(backup: Path) -> dict[str, str]:
    try:
        lines = (backup / SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadBackup(f"{backup} is no backup of weftd: its {SUMS} cannot be read ({error})") from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in sums:
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadBackup(f"{backup / SUMS} names {name!r}, which is no file of a backup")
    return sums


def copy_checked(backup: Path, target: Path, sums: Mapping[str, str]) -> None:
    """Copy all files of a backup; raises BadBackup for the first one that is damaged."""
    for name, expected in sums.items():
        found = _copied(backup / name, target / name)
        if found is None:
            raise BadBackup(f"{name} is missing in {backup}: restore another backup")
        if found != expected:
            raise BadBackup(
                f"{name} in {backup} is damaged: its SHA-256 is {found}, and {expected} was written. "
                "Restore another backup"
            )
