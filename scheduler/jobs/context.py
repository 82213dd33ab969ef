"""What jobs work with, in a process that is not the server."""

from __future__ import annotations

from billing.prices import load_prices
from scheduler.jobs.registry import JobContext
from store.blobs.opening import blobs_of
from store.blobs.owner import claim_prefix
from store.database.db import Database
from store.settings import Settings


def open_context(settings: Settings) -> JobContext:
    """The database must be migrated. Whoever opens a context closes its database. Raises SettingsError, also when the
    prefix of the object store is another service's, whose blobs jobs would delete; StoreAway."""
    database = Database(settings.effective_database_url, durable=settings.durable)
    try:
        claim_prefix(settings, database)
        return JobContext(database, blobs_of(settings), settings, load_prices(settings.prices))
    except BaseException:
        database.close()
        raise
