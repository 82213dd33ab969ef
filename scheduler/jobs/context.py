"""What jobs work with, in a process that is not the server."""

from __future__ import annotations

from billing.prices import load_prices
from scheduler.jobs.registry import JobContext
from store.db import Database
from store.opening import blobs_of
from store.settings import Settings


def open_context(settings: Settings) -> JobContext:
    """The database must be migrated. Whoever opens a context closes its database."""
    database = Database(settings.effective_database_url, durable=settings.durable)
    return JobContext(database, blobs_of(settings), settings, load_prices(settings.prices))
