"""Which service owns the blobs below a prefix of an object store. Two services there would delete each other's blobs.

The database has the service's id (the lease "blobs", which never ends, so a backup has it, too), the prefix an object
that names it. Whoever finds another's name there does not start.
"""

from __future__ import annotations

import json
import socket
import uuid
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from store.database.bulk import insert_into
from store.database.db import Database
from store.settings import Settings, SettingsError
from store.tables import JobLease

_LEASE = "blobs"
_FOR_EVER = datetime(9999, 1, 1, tzinfo=UTC)


def claim_prefix(settings: Settings, database: Database) -> None:
    """At every start of a server on a bucket. Raises SettingsError if the prefix is another service's."""
    if not settings.blob_url:
        return
    from store.blobs.bucket import OWNER, Bucket

    bucket = Bucket(settings.blob_url)
    service, url = database.write_now(_service_id), make_url(settings.effective_database_url)
    who = {
        "service": service,
        "database": f"{url.host or socket.gethostname()} {url.database}",
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    bucket.create(OWNER, json.dumps(who).encode())
    owner = json.loads(bucket.get(OWNER))
    if owner["service"] != service:
        raise SettingsError(
            f"blob_url {settings.blob_url} belongs to the service of the database {owner['database']} since "
            f"{owner['since']}, not to that of {who['database']}: give each a prefix of its own. If that database is "
            f"gone for good, delete the object {OWNER} below the prefix"
        )


def _service_id(session: Session) -> str:
    """The service's id. Several servers that start at once may all find none."""
    lease = insert_into(session, JobLease).values(name=_LEASE, holder=uuid.uuid4().hex, until=_FOR_EVER)
    session.execute(lease.on_conflict_do_nothing(index_elements=["name"]))
    return session.scalars(select(JobLease.holder).where(JobLease.name == _LEASE)).one()
