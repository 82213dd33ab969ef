"""What every table shares: identifiers' and timestamps' types, and the names of constraints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, ColumnElement, DateTime, Double, Integer, MetaData, TypeDecorator, func
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute

#: SQLite only auto-increments an INTEGER primary key.
BigInt = BigInteger().with_variant(Integer(), "sqlite")


class Utc(TypeDecorator[datetime]):
    """A UTC instant. SQLite forgets time zones, so the zone is taken off going in and put back coming out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError(f"a timestamp without a time zone cannot be stored: {value!r}")
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def any_index_but(column: InstrumentedAttribute[str]) -> ColumnElement[str]:
    """The column, in a condition that must not use its index. SQLite, which keeps no statistics, may otherwise use an
    organisation's index instead of a run's, and read all rows of the organisation."""
    return column.concat("")


_HALF = 1 << 32


def halves(*columns: ColumnElement[int] | InstrumentedAttribute[int]) -> list[ColumnElement[int]]:
    """The sums of the upper and of the lower half of each column, for `whole`: SQLite's SUM fails beyond 64 bits. In
    both databases n == n / half * half + n % half, whatever the sign."""
    return [func.sum(part) for column in columns for part in (column.op("/")(_HALF), column % _HALF)]


def whole(upper: int | None, lower: int | None) -> int:
    """The exact sum, from its `halves`; 0 for no rows. PostgreSQL's sums are of another type."""
    return int(upper or 0) * _HALF + int(lower or 0)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        float: Double(),  # SQLAlchemy 2.0 would take Float
        datetime: Utc(),
        dict[str, Any]: JSON(),
        list[str]: JSON(),
        list[int]: JSON(),
    }
