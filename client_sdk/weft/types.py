"""Types of the wire under the names users know: `from weft import types`."""

from weft.wire.types import *  # noqa: F403
from weft.wire.types import __all__ as __all__
