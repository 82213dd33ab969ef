"""What jobs work with, in a process that is not the server."""

from __future__ import annotations

from billing.prices import load_prices
from scheduler.jobs.registry import JobContext
from store.blobs import Blobs
from store.db import Database
from store.settings import Settings


def open_context(settings: Settings) -> JobContext:
    """The database must be migrated. Whoever opens a context closes its database."""
    database = Database(settings.effective_database_url, durable=settings.durable)
    return JobContext(
        database, Blobs(settings.blobs_dir, durable=settings.durable), settings, load_prices(settings.prices)
    )
