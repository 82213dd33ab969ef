"""What older clients of Tinker's cannot read, by the version that they name in each request."""

from __future__ import annotations

import re

from fastapi import Request
from weft.wire.rest import CHECKPOINT_TYPES

#: Clients before this version fail on a listing that has external weights in it.
EXTERNAL_SINCE = (0, 28)

_TINKER = re.compile(r"AsyncTinker/Python (\d{1,4})\.(\d{1,4})")


def readable_kinds(request: Request) -> list[str]:
    """The kinds of checkpoints that a listing may show to this client."""
    tinker = _TINKER.match(request.headers.get("user-agent", ""))
    old = tinker is not None and (int(tinker[1]), int(tinker[2])) < EXTERNAL_SINCE
    return [kind for kind in CHECKPOINT_TYPES if not (old and kind == "external_weights")]
