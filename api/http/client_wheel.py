"""The wheel of the client that this server was installed with, so that nobody has to guess which one fits.

Made of the files of the installed `weft` and what pip noted about it: the same bytes at every server of a version.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import weft
from weft.version import __version__

DISTRIBUTION = "weft-tuning"
#: The path of the wheel on every server.
WHEEL_NAME = f"weft_tuning-{__version__}-py3-none-any.whl"
WHEEL_PATH = f"/sdk/{WHEEL_NAME}"
_NOTES = ("METADATA", "entry_points.txt", "licenses/LICENSE")
_WHEEL = "Wheel-Version: 1.0\nGenerator: weftd\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class ClientWheel:
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@functools.cache
def client_wheel() -> ClientWheel | None:
    """The wheel; None if the client was not installed by pip but is only on the path."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None
    notes = f"weft_tuning-{__version__}.dist-info"
    files = {f"{notes}/{name}": text.encode() for name in _NOTES if (text := installed.read_text(name)) is not None}
    files[f"{notes}/WHEEL"] = _WHEEL.encode()
    root = Path(weft.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[f"weft/{path.relative_to(root).as_posix()}"] = path.read_bytes()
    record = [f"{name},sha256={_urlsafe(content)},{len(content)}\n" for name, content in sorted(files.items())]
    files[f"{notes}/RECORD"] = "".join([*record, f"{notes}/RECORD,,\n"]).encode()
    return ClientWheel(_zipped(files))


def _urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _zipped(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return written.getvalue()
