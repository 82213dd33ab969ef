"""Every type of the wire by its name in Tinker's SDK, and Weft's own: what modules name in their `__all__`. Users see
this module as `weft.types`."""

# ruff: noqa: F403
import typing as _typing

from weft.wire.account.billing import *
from weft.wire.account.limits import *
from weft.wire.account.usage import *
from weft.wire.binary.sample_codec import *
from weft.wire.error import *
from weft.wire.inputs import *
from weft.wire.losses import *
from weft.wire.metrics import *
from weft.wire.rest import *
from weft.wire.sampling import *
from weft.wire.service import *
from weft.wire.sessions import *
from weft.wire.tensor import *
from weft.wire.training import *
from weft.wire.weights import *

if not _typing.TYPE_CHECKING:  # checkers follow the imports, and would take this for an empty list
    __all__ = [name for name in dir() if not name.startswith("_")]
