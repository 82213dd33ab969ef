"""Types of the wire under the names users know: `from weft import types`."""

from typing import TYPE_CHECKING

from weft.wire.types import *  # noqa: F403

if not TYPE_CHECKING:
    from weft.wire.types import __all__ as __all__
