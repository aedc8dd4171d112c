"""The tables of the history. Times are aware UTC instants; text of prompts or completions is never stored.

A change here needs a new file in `migrations/versions`; a test compares the two.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger as _BigInteger
from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator


class UtcTime(TypeDecorator[datetime]):
    """An instant, given as Unix seconds or as an aware datetime in any zone, returned as an aware UTC datetime.

    Kept to the microsecond: `timestamp with time zone` on PostgreSQL, ISO text in UTC on SQLite, which sorts by time.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        return dialect.type_descriptor(DateTime(timezone=dialect.name != "sqlite"))

    def process_bind_param(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        instant = as_utc(value)
        return instant.replace(tzinfo=None) if dialect.name == "sqlite" else instant

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Json(TypeDecorator[Any]):
    """JSON text, the same on every database. Numbers come back bit for bit, infinities and NaN included."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, separators=(",", ":"), default=_plain)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def as_utc(value: float | datetime) -> datetime:
    """The instant of Unix seconds or of an aware datetime; ValueError for a naive one or one outside the calendar."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"a time without a zone is not an instant: {value.isoformat()}")
        return value.astimezone(UTC)
    if not math.isfinite(value):
        raise ValueError(f"not a time: {value}")
    try:
        return datetime.fromtimestamp(value, UTC)
    except (OverflowError, OSError) as e:
        raise ValueError(f"not a time: {value}") from e


def _plain(value: Any) -> Any:
    """What `json` does not know: NumPy scalars and arrays, and tuples inside them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON")


# SQLite counts rows of a key only in a column of exactly this type.
BigInteger = _BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _name(column: str) -> Column[str]:
    return Column(column, String(128), nullable=False)


def _number(column: str) -> Column[float]:
    return Column(column, Double, nullable=False)


def _count(column: str) -> Column[int]:
    return Column(column, BigInteger, nullable=False)


epochs = Table(
    "epochs",
    metadata,
    Column("pool", String(128), primary_key=True),
    _count("epoch"),
    Column("holder", String(256), nullable=False),
    Column("claimed", UtcTime, nullable=False),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("pool", String(128), primary_key=True),
    _count("epoch"),
    Column("time", UtcTime, nullable=False),
    Column("last_id", String(64), nullable=False),
    Column("state", Json, nullable=False),
)

policy_revisions = Table(
    "policy_revisions",
    metadata,
    Column("revision", BigInteger, primary_key=True, autoincrement=True),
    _name("pool"),
    Column("time", UtcTime, nullable=False),
    Column("sha", String(128), nullable=False),
    Column("source", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("accepted", Boolean, nullable=False),
    Column("error", Text),
    Index(None, "pool", "revision"),
    sqlite_autoincrement=True,
)

requests = Table(
    "requests",
    metadata,
    _name("pool"),
    _name("request_id"),
    _name("traffic_class"),
    Column("received", UtcTime, nullable=False),
    Column("started", UtcTime, nullable=False),
    Column("first_touch_at", UtcTime),
    _name("worker"),
    _name("boot"),
    _count("epoch"),
    _count("lease_seq"),
    _name("rule"),
    _number("theta"),
    _number("rho"),
    _name("arm"),
    _number("holdback_prob"),
    _number("fork_prob"),
    _number("label_prob"),
    Column("fork_drawn", Boolean, nullable=False),
    Column("label_drawn", Boolean, nullable=False),
    _count("touches"),
    _count("prompt_tokens"),
    _count("tokens"),
    _count("target_passes"),
    _number("first_token_s"),
    _number("total_s"),
    _name("finish_reason"),
    _name("strategy"),
    Column("confidence", Double),
    Column("draft_s", Double, nullable=False, server_default="0"),
    PrimaryKeyConstraint("pool", "request_id"),
    Index(None, "pool", "received"),
    Index(None, "pool", "started"),
)

forks = Table(
    "forks",
    metadata,
    _name("pool"),
    _name("request_id"),
    _name("traffic_class"),
    Column("received", UtcTime, nullable=False),
    _name("worker"),
    _name("boot"),
    Column("done", Boolean, nullable=False),
    _count("touches"),
    _count("tokens"),
    _count("target_passes"),
    _number("total_s"),
    PrimaryKeyConstraint("pool", "request_id"),
    Index(None, "pool", "received"),
)

scores = Table(
    "scores",
    metadata,
    _name("pool"),
    _name("request_id"),
    _name("traffic_class"),
    _name("branch"),
    _name("metric"),
    _number("score"),
    _name("scorer"),
    _name("scorer_version"),
    Column("time", UtcTime, nullable=False),
    Column("received", UtcTime, nullable=False),
    PrimaryKeyConstraint("pool", "request_id", "branch", "metric", "scorer", "scorer_version"),
    Index(None, "pool", "received"),
)

decisions = Table(
    "decisions",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    _name("pool"),
    _name("traffic_class"),
    Column("time", UtcTime, nullable=False),
    _count("epoch"),
    _count("seq"),
    _count("policy_revision"),
    _name("state"),
    _name("reason"),
    Column("explanation", Text, nullable=False),
    Column("lease", Text, nullable=False),
    Column("detail", Json, nullable=False),
    UniqueConstraint("pool", "traffic_class", "epoch", "seq", "time"),
    Index(None, "pool", "time"),
    Index(None, "pool", "traffic_class", "time"),
)

points = Table(
    "points",
    metadata,
    _name("pool"),
    _name("traffic_class"),
    Column("time", UtcTime, nullable=False),
    Column("values", Json, nullable=False),
    PrimaryKeyConstraint("pool", "traffic_class", "time"),
)

alerts = Table(
    "alerts",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    _name("pool"),
    _name("traffic_class"),
    Column("time", UtcTime, nullable=False),
    _name("name"),
    Column("firing", Boolean, nullable=False),
    Column("detail", Text, nullable=False),
    UniqueConstraint("pool", "traffic_class", "name", "time"),
    Index(None, "pool", "time"),
)
