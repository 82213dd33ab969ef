"""A PostgreSQL that takes no writes: what the writer's connection leads to is a standby since a failover, or whoever
manages it has made it read-only, for its disk is nearly full.

That is no fault of what was to be written, as the driver's InternalError says, and another connection may lead to the
server that takes its place: it is an OperationalError of a connection that is lost, which everybody tries again.
"""

from __future__ import annotations

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import OperationalError


def takes_no_writes(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) == "25006"


def away(error: BaseException) -> OperationalError:
    return OperationalError(None, None, error, connection_invalidated=True)


def tell_standbys(engine: Engine) -> None:
    @event.listens_for(engine, "handle_error", retval=True)
    def failed(context: ExceptionContext) -> BaseException | None:
        if not takes_no_writes(context.original_exception):
            return None
        context.is_disconnect = True
        return away(context.original_exception)
