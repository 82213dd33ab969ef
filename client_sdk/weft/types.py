"""Types of the wire under the names users know: `from weft import types`."""

import typing as _typing

from weft.wire.types import *  # noqa: F403

if not _typing.TYPE_CHECKING:
    from weft.wire.types import __all__ as __all__
