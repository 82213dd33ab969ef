"""What jobs need, in a process that is not the server."""

from __future__ import annotations

from billing.prices import load_prices
from scheduler.jobs.registry import JobContext
from store.blobs.opening import blobs_of
from store.blobs.owner import claim_prefix
from store.database.db import Database
from store.settings import Settings


def open_context(settings: Settings) -> JobContext:
    """The database must be migrated. The caller closes the context's database. Raises StoreAway, and SettingsError;
    also if the object store's prefix belongs to another service, whose blobs the jobs would delete."""
    database = Database(settings.effective_database_url, durable=settings.durable)
    try:
        claim_prefix(settings, database)
        return JobContext(database, blobs_of(settings), settings, load_prices(settings.prices))
    except BaseException:
        database.close()
        raise
