"""Names of saved weights: `tinker://<run id>/<kind>/<name>`, parsed strictly."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.wire.checks.runs import name_problems
from weft.wire.rest import CHECKPOINT_TYPES

from api.errors import Invalid, quote, refuse

_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_SCHEME = "tinker://"


@dataclass(frozen=True)
class CheckpointPath:
    run_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}"


def parse_path(path: str, field: str) -> CheckpointPath:
    """The parts of a tinker path. Raises Invalid, naming `field`, for anything else."""
    parts = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or len(parts) != 3:
        raise Invalid(f"{field}: {quote(path)} is not of the form tinker://<run id>/<kind>/<name>")
    run_id, kind, name = parts
    if _RUN_ID.fullmatch(run_id) is None:
        raise Invalid(f"{field}: {quote(run_id)} is not a run id")
    if kind not in CHECKPOINT_TYPES:
        raise Invalid(f"{field}: the kind {quote(kind)} is not one of {', '.join(CHECKPOINT_TYPES)}")
    return CheckpointPath(run_id, kind, check_name(name, field))


def check_name(name: str, field: str) -> str:
    """A checkpoint's name."""
    refuse(name_problems(name), field)
    return name
