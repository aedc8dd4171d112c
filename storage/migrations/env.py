"""Runs the migrations inside the transaction it is given, or in one of its own when called by the alembic command.

One transaction holds the whole upgrade, schema and version together, on SQLite too: one that was killed leaves nothing
behind and can be run again.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from storage.tables import metadata


def run(connection: Connection) -> None:
    """Migrate over `connection`, whose transaction the caller commits."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transactional_ddl=True,
        transaction_per_migration=False,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    from storage.history import History

    with History(context.get_x_argument(as_dictionary=True)["url"]).transaction() as own:
        run(own)
