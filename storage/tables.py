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
    false,
    text,
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
    """JSON text, the same on every database. Numbers come back bit for bit, infinities and NaN included. A string is
    taken for text that was encoded before (`to_json`)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return value if value is None or isinstance(value, str) else to_json(value)

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


def to_json(value: Any) -> str:
    """The text that a `Json` column holds for ``value``."""
    return json.dumps(value, separators=(",", ":"), default=plain_number)


def plain_number(value: Any) -> Any:
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


def _flag(column: str) -> Column[bool]:
    return Column(column, Boolean, nullable=False, server_default=false())


def _open(name: str, flag: str) -> Index:
    """The rows of a class that a job has not dealt with: an index of only those whose `flag` is false."""
    where = text(f"NOT {flag}")
    return Index(name, "pool", "traffic_class", "time", postgresql_where=where, sqlite_where=where)


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
    Index(None, "request_id"),
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
    _flag("superseded"),
    _flag("thinned"),
    UniqueConstraint("pool", "traffic_class", "epoch", "seq", "time"),
    Index(None, "pool", "time"),
    # Where something changed is seen from the index alone; the rows are large.
    Index(None, "pool", "traffic_class", "time", "id", "state", "reason"),
    _open("ix_decisions_unthinned", "thinned"),
)

points = Table(
    "points",
    metadata,
    _name("pool"),
    _name("traffic_class"),
    Column("time", UtcTime, nullable=False),
    Column("values", Json, nullable=False),
    _flag("rolled"),
    PrimaryKeyConstraint("pool", "traffic_class", "time"),
    _open("ix_points_unrolled", "rolled"),
)

# A row sums the points of `step` seconds from `time`; `fewer` counts the series that some of its points lack.
point_rollups = Table(
    "point_rollups",
    metadata,
    _name("pool"),
    _name("traffic_class"),
    _count("step"),
    Column("time", UtcTime, nullable=False),
    _count("count"),
    Column("sums", Json, nullable=False),
    Column("fewer", Json),
    PrimaryKeyConstraint("pool", "traffic_class", "step", "time"),
)

# Counts of drafted positions; `bucket` is the batch's rows rounded up to a power of two.
token_rollups = Table(
    "token_rollups",
    metadata,
    _name("pool"),
    _name("traffic_class"),
    _count("step"),
    Column("time", UtcTime, nullable=False),
    _count("bucket"),
    _count("position"),
    _count("drafted"),
    _count("examined"),
    _count("accepted"),
    _count("touches"),
    _count("pinned"),
    _number("theta_sum"),
    _number("tv_sum"),
    _flag("rolled"),
    PrimaryKeyConstraint("pool", "traffic_class", "step", "time", "bucket", "position"),
    _open("ix_token_rollups_unrolled", "rolled"),
    sqlite_with_rowid=False,
)

round_rollups = Table(
    "round_rollups",
    metadata,
    _name("pool"),
    _name("traffic_class"),
    _count("step"),
    Column("time", UtcTime, nullable=False),
    _count("bucket"),
    _count("rounds"),
    _count("request_rounds"),
    _count("drafted"),
    _count("emitted"),
    _count("prefill_tokens"),
    _number("draft_s"),
    _number("verify_s"),
    _number("overhead_s"),
    _flag("rolled"),
    PrimaryKeyConstraint("pool", "traffic_class", "step", "time", "bucket"),
    _open("ix_round_rollups_unrolled", "rolled"),
    sqlite_with_rowid=False,
)

# The budget's ledger: what was served and proven in a slice of the window, by evidence epoch, level of the lease, rule.
budget_slices = Table(
    "budget_slices",
    metadata,
    _name("pool"),
    _name("traffic_class"),
    Column("start", UtcTime, nullable=False),
    _count("evidence_epoch"),
    _count("level"),
    _name("rule"),
    _count("requests"),
    _count("touched"),
    _count("touches"),
    _count("forks"),
    _count("labelled"),
    _number("fork_loss"),
    _count("fork_touches"),
    PrimaryKeyConstraint("pool", "traffic_class", "start", "evidence_epoch", "level", "rule"),
    sqlite_with_rowid=False,
)

# Actions are numbered in the order in which they were committed, and no number is used twice.
operator_actions = Table(
    "operator_actions",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    _name("pool"),
    _name("traffic_class"),
    _name("action"),
    Column("amount", Double),
    Column("who", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("time", UtcTime, nullable=False),
    Index(None, "pool", "id"),
    sqlite_autoincrement=True,
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
