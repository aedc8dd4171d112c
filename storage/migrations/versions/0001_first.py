"""The first schema: epochs, snapshots, policy revisions, requests, forks, scores, decisions, points, alerts.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _name(column: str) -> sa.Column[str]:
    return sa.Column(column, sa.String(128), nullable=False)


def _number(column: str) -> sa.Column[float]:
    return sa.Column(column, sa.Double(), nullable=False)


def _count(column: str) -> sa.Column[int]:
    return sa.Column(column, COUNT, nullable=False)


def _time(column: str) -> sa.Column[object]:
    return sa.Column(column, TIME, nullable=False)


def _flag(column: str) -> sa.Column[bool]:
    return sa.Column(column, sa.Boolean(), nullable=False)


def _text(column: str) -> sa.Column[str]:
    return sa.Column(column, sa.Text(), nullable=False)


def upgrade() -> None:
    op.create_table(
        "epochs",
        _name("pool"),
        _count("epoch"),
        sa.Column("holder", sa.String(256), nullable=False),
        _time("claimed"),
        sa.PrimaryKeyConstraint("pool", name="pk_epochs"),
    )
    op.create_table(
        "snapshots",
        _name("pool"),
        _count("epoch"),
        _time("time"),
        sa.Column("last_id", sa.String(64), nullable=False),
        _text("state"),
        sa.PrimaryKeyConstraint("pool", name="pk_snapshots"),
    )
    op.create_table(
        "policy_revisions",
        sa.Column("revision", COUNT, autoincrement=True, nullable=False),
        _name("pool"),
        _time("time"),
        _name("sha"),
        _text("source"),
        _text("text"),
        _flag("accepted"),
        sa.Column("error", sa.Text()),
        sa.PrimaryKeyConstraint("revision", name="pk_policy_revisions"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_policy_revisions_pool_revision", "policy_revisions", ["pool", "revision"])
    op.create_table(
        "requests",
        *map(_name, ("pool", "request_id", "traffic_class")),
        *map(_time, ("received", "started")),
        sa.Column("first_touch_at", TIME),
        *map(_name, ("worker", "boot")),
        *map(_count, ("epoch", "lease_seq")),
        _name("rule"),
        *map(_number, ("theta", "rho")),
        _name("arm"),
        *map(_number, ("holdback_prob", "fork_prob", "label_prob")),
        *map(_flag, ("fork_drawn", "label_drawn")),
        *map(_count, ("touches", "prompt_tokens", "tokens", "target_passes")),
        *map(_number, ("first_token_s", "total_s")),
        *map(_name, ("finish_reason", "strategy")),
        sa.PrimaryKeyConstraint("pool", "request_id", name="pk_requests"),
    )
    op.create_index("ix_requests_pool_received", "requests", ["pool", "received"])
    op.create_index("ix_requests_pool_started", "requests", ["pool", "started"])
    op.create_table(
        "forks",
        *map(_name, ("pool", "request_id", "traffic_class")),
        _time("received"),
        *map(_name, ("worker", "boot")),
        _flag("done"),
        *map(_count, ("touches", "tokens", "target_passes")),
        _number("total_s"),
        sa.PrimaryKeyConstraint("pool", "request_id", name="pk_forks"),
    )
    op.create_index("ix_forks_pool_received", "forks", ["pool", "received"])
    op.create_table(
        "scores",
        *map(_name, ("pool", "request_id", "traffic_class", "branch", "metric")),
        _number("score"),
        *map(_name, ("scorer", "scorer_version")),
        *map(_time, ("time", "received")),
        sa.PrimaryKeyConstraint(
            "pool", "request_id", "branch", "metric", "scorer", "scorer_version", name="pk_scores"
        ),
    )
    op.create_index("ix_scores_pool_received", "scores", ["pool", "received"])
    op.create_table(
        "decisions",
        sa.Column("id", COUNT, autoincrement=True, nullable=False),
        *map(_name, ("pool", "traffic_class")),
        _time("time"),
        *map(_count, ("epoch", "seq", "policy_revision")),
        *map(_name, ("state", "reason")),
        *map(_text, ("explanation", "lease", "detail")),
        sa.PrimaryKeyConstraint("id", name="pk_decisions"),
        sa.UniqueConstraint(
            "pool", "traffic_class", "epoch", "seq", "time", name="uq_decisions_pool_traffic_class_epoch_seq_time"
        ),
    )
    op.create_index("ix_decisions_pool_time", "decisions", ["pool", "time"])
    op.create_index("ix_decisions_pool_traffic_class_time", "decisions", ["pool", "traffic_class", "time"])
    op.create_table(
        "points",
        *map(_name, ("pool", "traffic_class")),
        _time("time"),
        _text("values"),
        sa.PrimaryKeyConstraint("pool", "traffic_class", "time", name="pk_points"),
    )
    op.create_table(
        "alerts",
        sa.Column("id", COUNT, autoincrement=True, nullable=False),
        *map(_name, ("pool", "traffic_class")),
        _time("time"),
        _name("name"),
        _flag("firing"),
        _text("detail"),
        sa.PrimaryKeyConstraint("id", name="pk_alerts"),
        sa.UniqueConstraint("pool", "traffic_class", "name", "time", name="uq_alerts_pool_traffic_class_name_time"),
    )
    op.create_index("ix_alerts_pool_time", "alerts", ["pool", "time"])


def downgrade() -> None:
    for table in ("alerts", "points", "decisions", "scores", "forks", "requests"):
        op.drop_table(table)
    for table in ("policy_revisions", "snapshots", "epochs"):
        op.drop_table(table)
