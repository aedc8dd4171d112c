"""Requests answered by a cascade: the draft answer's confidence and how long it took.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("requests", sa.Column("confidence", sa.Double()))
    op.add_column("requests", sa.Column("draft_s", sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("requests") as table:
        table.drop_column("draft_s")
        table.drop_column("confidence")
