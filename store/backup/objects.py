"""The objects of a bucket in a backup: copied while servers write and delete beside it, and put back.

As with files (`store.backup.files`): what is under a name does not change, but lists of folders (folders/REF) are put
anew when a folder is replaced, so each round copies them again and leaves out those whose files are gone by then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from store.backup.files import digest_of
from store.blobs.bucket import MARK, OWNER, Bucket
from store.blobs.contract import Damaged, unsealed

#: Of a backup: the objects by their keys.
OBJECTS = "objects"
#: What can be made again, what is not finished, and what says whose prefix it is.
_LEFT_OUT = ("files/archives/", "folders/archives/", "data/archives/", "unfinished/", MARK, OWNER)


def copy_objects(bucket: Bucket, target: Path, sums: dict[str, str]) -> None:
    """Copy what is not in `sums` (path -> SHA-256) yet, and note it there."""
    for name in [name for name in sums if name.startswith(f"{OBJECTS}/folders/")]:
        _leave_out(target, name, sums)
    keys = [found.key for found in bucket.listed("") if not found.key.startswith(_LEFT_OUT)]
    for key in sorted(keys, key=lambda key: not key.startswith("folders/")):  # lists first, then what they name
        name = f"{OBJECTS}/{key}"
        if name in sums:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            bucket.download(key, target / name)
        except FileNotFoundError:  # deleted meanwhile
            (target / name).unlink(missing_ok=True)
            continue
        sums[name] = digest_of(target / name)
    named = set[str]()
    for name in [name for name in sums if name.startswith(f"{OBJECTS}/folders/")]:
        files = _files(target, name)
        if files is None:
            _leave_out(target, name, sums)
        else:
            named |= files
    for name in [name for name in sums if name.startswith(f"{OBJECTS}/data/") and name not in named]:
        _leave_out(target, name, sums)  # no list tells of it, and so nothing would ever delete it


def put_objects(bucket: Bucket, source: Path, sums: Mapping[str, str]) -> None:
    """Put them below a prefix; lists of folders last, with which the folders are there."""
    names = [name for name in sums if name.startswith(f"{OBJECTS}/")]
    for name in sorted(names, key=lambda name: name.startswith(f"{OBJECTS}/folders/")):
        bucket.put(name.removeprefix(f"{OBJECTS}/"), source / name)


def _files(target: Path, name: str) -> set[str] | None:
    """The names of the files of a folder's list; None unless it is undamaged and all of them were copied."""
    ref = name.removeprefix(f"{OBJECTS}/folders/")
    try:
        found = json.loads(unsealed(ref, (target / name).read_bytes()))
    except Damaged:
        return None
    data = f"{OBJECTS}/data/{ref}/{found['generation']}"
    sizes = {f"{data}/{file}": size for file, (_, size) in found["files"].items()}
    whole = all((target / path).is_file() and (target / path).stat().st_size == size for path, size in sizes.items())
    return set(sizes) if whole else None


def _leave_out(target: Path, name: str, sums: dict[str, str]) -> None:
    (target / name).unlink(missing_ok=True)
    del sums[name]
