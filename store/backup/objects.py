"""The objects of a bucket in a backup: copied while servers write and delete beside it, and put back.

As with files (`store.backup.files`), the content of a name does not change. A folder is copied by its list
(folders/REF), whole or not at all; nothing would ever delete a file that is in no list.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from store.backup.files import RESTORING, BadBackup, digest_of
from store.blobs.bucket import MARK, Bucket
from store.blobs.contract import Damaged, unsealed

#: The folder of a backup that holds the objects, by their keys.
OBJECTS = "objects"
#: The prefixes of keys that hold the names of blobs.
TREES = ("files", "folders")
#: Prefixes of objects that can be made again.
_LEFT_OUT = tuple(f"{tree}/archives/" for tree in TREES)


def copy_objects(bucket: Bucket, target: Path, sums: dict[str, str], refs: Iterable[str] | None = None) -> None:
    """Copy the objects that are not in `sums` (path -> SHA-256), and add them there; with `refs` only these blobs."""
    for key in _keys(bucket) if refs is None else (f"{tree}/{ref}" for ref in refs for tree in TREES):
        name = f"{OBJECTS}/{key}"
        if name in sums:
            continue
        try:
            copied = {name: _copied(bucket, key, target)}
            if key.startswith("folders/"):
                copied |= _files(bucket, key, target)
        except (FileNotFoundError, Damaged):  # deleted or replaced meanwhile, or damaged
            (target / name).unlink(missing_ok=True)
            continue
        sums |= copied


@contextmanager
def objects_put(bucket: Bucket, source: Path, sums: Mapping[str, str]) -> Iterator[None]:
    """Put a backup's objects below an empty prefix, for the block; if it fails they are deleted again. Of two processes
    that find the same prefix empty only one goes on, and neither deletes what the other has put."""
    mine = uuid.uuid4().hex.encode()
    bucket.create(RESTORING, mine)
    refuse_objects(bucket, mine)
    put = [name.removeprefix(f"{OBJECTS}/") for name in sums if name.startswith(f"{OBJECTS}/")]
    try:
        put_objects(bucket, source, sums)
        yield
    except BaseException:
        bucket.delete([*put, RESTORING])
        raise
    bucket.delete([RESTORING])


def refuse_objects(bucket: Bucket, mine: bytes | None = None) -> None:
    """Raise BadBackup if anything lies below the prefix, except the mark of a restore that is `mine`."""
    found = sorted(stored.key for stored in bucket.listed("") if stored.key != MARK)
    if RESTORING in found and (mine is None or bucket.get(RESTORING) != mine):
        raise BadBackup(
            f"{bucket.url}: a restore into it is under way, or was cut off ({RESTORING} is there): wait, or delete "
            "what lies below this prefix"
        )
    if other := next((key for key in found if key != RESTORING), None):
        raise BadBackup(f"{bucket.url} is not empty ({other} is there): name a prefix that is")


def put_objects(bucket: Bucket, source: Path, sums: Mapping[str, str]) -> None:
    """Put the objects. Lists of folders come last: with its list a folder exists."""
    names = [name for name in sums if name.startswith(f"{OBJECTS}/")]
    for name in sorted(names, key=lambda name: name.startswith(f"{OBJECTS}/folders/")):
        bucket.put(name.removeprefix(f"{OBJECTS}/"), source / name)


def _keys(bucket: Bucket) -> list[str]:
    found = (stored.key for tree in TREES for stored in bucket.listed(tree))
    return [key for key in found if not key.startswith(_LEFT_OUT)]


def _files(bucket: Bucket, key: str, target: Path) -> dict[str, str]:
    """The files of a folder whose list was copied; path -> SHA-256. Raises Damaged, and FileNotFoundError, unless all
    are there and whole."""
    ref = key.removeprefix("folders/")
    found = json.loads(unsealed(ref, (target / OBJECTS / key).read_bytes()))
    data, copied = f"data/{ref}/{found['generation']}", dict[str, str]()
    try:
        for file, (digest, _) in found["files"].items():
            name = f"{OBJECTS}/{data}/{file}"
            copied[name] = _copied(bucket, f"{data}/{file}", target)
            if copied[name] != digest:
                raise Damaged(f"blob {ref} is damaged: {file} is not as it was written")
    except OSError:
        shutil.rmtree(target / OBJECTS / data, ignore_errors=True)
        raise
    return copied


def _copied(bucket: Bucket, key: str, target: Path) -> str:
    """Copy an object; returns its SHA-256. Raises FileNotFoundError if there is none."""
    copy = target / OBJECTS / key
    copy.parent.mkdir(parents=True, exist_ok=True)
    bucket.download(key, copy)
    return digest_of(copy)
