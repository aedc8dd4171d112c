"""Operator actions, rollups, the budget's slices; superseded decisions; what jobs have dealt with.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
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
    return sa.Column(column, sa.Boolean(), nullable=False, server_default=sa.false())


def _open(name: str, table: str, flag: str) -> None:
    where = sa.text(f"NOT {flag}")
    op.create_index(name, table, ["pool", "traffic_class", "time"], postgresql_where=where, sqlite_where=where)


def upgrade() -> None:
    op.create_index("ix_requests_request_id", "requests", ["request_id"])
    op.add_column("decisions", _flag("superseded"))
    op.add_column("decisions", _flag("thinned"))
    op.add_column("points", _flag("rolled"))
    _open("ix_decisions_unthinned", "decisions", "thinned")
    op.drop_index("ix_decisions_pool_traffic_class_time", "decisions")
    columns = ["pool", "traffic_class", "time", "id", "state", "reason"]
    op.create_index("ix_decisions_" + "_".join(columns), "decisions", columns)
    _open("ix_points_unrolled", "points", "rolled")
    op.create_table(
        "point_rollups",
        *map(_name, ("pool", "traffic_class")),
        _count("step"),
        _time("time"),
        _count("count"),
        sa.Column("sums", sa.Text(), nullable=False),
        sa.Column("fewer", sa.Text()),
        sa.PrimaryKeyConstraint("pool", "traffic_class", "step", "time", name="pk_point_rollups"),
    )
    op.create_table(
        "token_rollups",
        *map(_name, ("pool", "traffic_class")),
        _count("step"),
        _time("time"),
        *map(_count, ("bucket", "position", "drafted", "examined", "accepted", "touches", "pinned")),
        *map(_number, ("theta_sum", "tv_sum")),
        _flag("rolled"),
        sa.PrimaryKeyConstraint(
            "pool", "traffic_class", "step", "time", "bucket", "position", name="pk_token_rollups"
        ),
        sqlite_with_rowid=False,
    )
    _open("ix_token_rollups_unrolled", "token_rollups", "rolled")
    op.create_table(
        "round_rollups",
        *map(_name, ("pool", "traffic_class")),
        _count("step"),
        _time("time"),
        *map(_count, ("bucket", "rounds", "request_rounds", "drafted", "emitted", "prefill_tokens")),
        *map(_number, ("draft_s", "verify_s", "overhead_s")),
        _flag("rolled"),
        sa.PrimaryKeyConstraint("pool", "traffic_class", "step", "time", "bucket", name="pk_round_rollups"),
        sqlite_with_rowid=False,
    )
    _open("ix_round_rollups_unrolled", "round_rollups", "rolled")
    op.create_table(
        "budget_slices",
        *map(_name, ("pool", "traffic_class")),
        _time("start"),
        *map(_count, ("evidence_epoch", "level")),
        _name("rule"),
        *map(_count, ("requests", "touched", "touches", "forks", "labelled")),
        _number("fork_loss"),
        _count("fork_touches"),
        sa.PrimaryKeyConstraint(
            "pool", "traffic_class", "start", "evidence_epoch", "level", "rule", name="pk_budget_slices"
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "operator_actions",
        sa.Column("id", COUNT, autoincrement=True, nullable=False),
        *map(_name, ("pool", "traffic_class", "action")),
        sa.Column("amount", sa.Double()),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        _time("time"),
        sa.PrimaryKeyConstraint("id", name="pk_operator_actions"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_operator_actions_pool_id", "operator_actions", ["pool", "id"])


def downgrade() -> None:
    for table in ("operator_actions", "budget_slices", "round_rollups", "token_rollups", "point_rollups"):
        op.drop_table(table)
    op.drop_index("ix_points_unrolled", "points")
    op.drop_index("ix_decisions_unthinned", "decisions")
    columns = ["pool", "traffic_class", "time", "id", "state", "reason"]
    op.drop_index("ix_decisions_" + "_".join(columns), "decisions")
    op.create_index("ix_decisions_pool_traffic_class_time", "decisions", columns[:3])
    op.drop_index("ix_requests_request_id", "requests")
    with op.batch_alter_table("points") as batch:
        batch.drop_column("rolled")
    with op.batch_alter_table("decisions") as batch:
        batch.drop_column("thinned")
        batch.drop_column("superseded")
