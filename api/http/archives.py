"""Archives of checkpoints, for older clients: a tar of the export that save_weights_external would have made.

Made when first asked for, kept while links to it are good, deleted by the reaper. Plain tar: float32 weights do not
compress. No torch here: the conversion works on numpy arrays, which are imported for it alone.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import orjson

from store.blobs.contract import Blobs, Damaged, files_of

#: How long signed links are valid.
LINKS_LAST = timedelta(hours=1)
#: Older clients consider an archive complete only if this file is in it.
COMPLETE = "checkpoint_complete"
ARCHIVES = "archives"


def archive_ref(ref: str) -> str:
    """The ref of the archive of the weights in `ref`. New weights, even under an old name, have a new one."""
    return f"{ARCHIVES}/{ref.rpartition('/')[2]}"


def archived(blobs: Blobs) -> set[str]:
    """The refs of weights that have an archive."""
    return {f"weights/{ref.rpartition('/')[2]}" for ref in blobs.listed(f"{ARCHIVES}/*")}


def make_archive(blobs: Blobs, ref: str) -> None:
    """Have the archive of the weights in `ref` at `archive_ref`, and count its age from now. Runs in a thread. Raises
    FileNotFoundError when there are no weights, and Damaged when they are not as they were written."""
    target = archive_ref(ref)
    # damaged ones are made anew in place: deleting them could remove what another process is uploading
    with suppress(FileNotFoundError, Damaged):
        blobs.check_folder(target)
        blobs.touch(target)
        return
    try:
        with blobs.reading(ref) as source, blobs.new_folder(target) as folder:
            _fill(source, folder)
    except OSError as error:
        # otherwise another process was faster with the same files
        if isinstance(error, Damaged) or not blobs.exists(target):
            raise


def _fill(source: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        export = source if not (source / "adapter.safetensors").is_file() else _export(source, Path(scratch))
        with tarfile.open(folder / "checkpoint.tar", "w") as tar:
            for name in files_of(export):
                tar.add(export / name, name, filter=_nobody)
            tar.addfile(tarfile.TarInfo(COMPLETE), io.BytesIO())


def _export(source: Path, target: Path) -> Path:
    from safetensors.numpy import load_file

    from workers.model.adapters.peft_format import write_export

    fields = orjson.loads((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter.safetensors")
    said = {"base_model": fields["base_model"], "rank": fields["rank"], "alpha": fields["alpha"]}
    write_export(target, tensors, **said, in_size=fields.get("in_size", 0), mixtral=fields.get("mixtral", False))
    return target


def _nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Keep the server's user and group out of the archive."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
