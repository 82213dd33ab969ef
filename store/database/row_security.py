"""Row-level security of PostgreSQL: a second protection besides lookups, which all name their organisation.

Every table with an `org_id` (and organisations and users) gets two policies. `weft_app` sees and writes the rows of the
organisation in `app.org_id` only, and none when that is not set; `weft_service` sees all. The server logs in as a
member of both. What it does for a request it does as `weft_app` (`store.database.caller.restrict`); what it does by
itself, for all organisations together, as `weft_service`. The policies are forced, so the owner of the tables is bound
by them too.

`protect` runs after every upgrade and covers whatever tables there are: a new table needs nothing.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import ProgrammingError

from store.database.caller import APP_ROLE

SERVICE_ROLE = "weft_service"
#: SQLSTATE of an action that the login has no right to.
_MAY_NOT = "42501"

_MINE = "current_setting('app.org_id', true)"
_BUDGET = f"EXISTS (SELECT 1 FROM budgets b WHERE b.id = budget_periods.budget_id AND b.org_id = {_MINE})"  # noqa: S608
#: Tables whose rows belong to an organisation by a column other than `org_id`.
_OTHERS = {
    "organisations": (f"id = {_MINE}", f"id = {_MINE}"),
    # A user may be made before the membership is.
    "users": (f"EXISTS (SELECT 1 FROM memberships m WHERE m.user_id = users.id AND m.org_id = {_MINE})", "true"),  # noqa: S608
    "budget_periods": (_BUDGET, _BUDGET),
}
#: Tables about all organisations together, which no request reads or writes.
SERVER_ONLY = ("alembic_version", "identities", "job_leases", "job_runs", "stripe_webhook_events")


def protect(connection: Connection) -> None:
    """Put every table under its policies. Nothing happens on SQLite, whose file has one owner anyway."""
    if connection.dialect.name != "postgresql":
        return
    make_roles(connection)
    schema = inspect(connection)
    for table in schema.get_table_names():
        if table in _OTHERS:
            _shield(connection, table, *_OTHERS[table])
        elif any(column["name"] == "org_id" for column in schema.get_columns(table)):
            _shield(connection, table, f"org_id = {_MINE}", f"org_id = {_MINE}")
    roles = f"{APP_ROLE}, {SERVICE_ROLE}"
    connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {roles}"))
    connection.execute(text(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {roles}"))
    for table in set(SERVER_ONLY) & set(schema.get_table_names()):
        connection.execute(text(f"REVOKE ALL ON {table} FROM {APP_ROLE}"))


def make_roles(connection: Connection) -> None:
    """Create both roles, with the login as a member. Raises PermissionError, with the commands for an administrator, if
    the login may not do so."""
    roles = (APP_ROLE, SERVICE_ROLE)
    try:
        for role in roles:
            _make_role(connection, role)
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", "") != _MAY_NOT:
            raise
        made = "; ".join(f"CREATE ROLE {role} NOLOGIN" for role in roles)
        needed = f"{made}; GRANT {', '.join(roles)} TO {connection.engine.url.username}"
        raise PermissionError(f"the login may not make its roles: let who may run {needed} (docs/tenancy.md)") from None


def _make_role(connection: Connection, role: str) -> None:
    """Create a role; roles are shared by all databases of a server."""
    if connection.scalar(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}) is None:
        made_by_another = "duplicate_object OR unique_violation"
        connection.execute(
            text(f"DO $$ BEGIN CREATE ROLE {role} NOLOGIN; EXCEPTION WHEN {made_by_another} THEN NULL; END $$")
        )
    if not may_use(connection, role):
        connection.execute(text(f"GRANT {role} TO CURRENT_USER"))


def may_use(connection: Connection, role: str) -> bool:
    """True if the login may become the role and act as it. Since PostgreSQL 16 that takes more than to be a member,
    which is all that the role's creator is."""
    info = connection.dialect.server_version_info
    needed = ("USAGE", "SET") if info is not None and info >= (16,) else ("MEMBER",)
    has = " AND ".join(f"pg_has_role(current_user, :role, '{what}')" for what in needed)
    return bool(connection.scalar(text(f"SELECT {has}"), {"role": role}))


def _shield(connection: Connection, table: str, using: str, check: str) -> None:
    there = "SELECT 1 FROM pg_policies WHERE schemaname = 'public' AND tablename = :table AND policyname = 'tenant'"
    if connection.scalar(text(there), {"table": table}) is not None:
        return
    for statement in (
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
        f"CREATE POLICY tenant ON {table} TO {APP_ROLE} USING ({using}) WITH CHECK ({check})",
        f"CREATE POLICY service ON {table} TO {SERVICE_ROLE} USING (true) WITH CHECK (true)",
    ):
        connection.execute(text(statement))
