"""`lenity db`: look after the history database."""

from __future__ import annotations

import typer

from controller.commands.common import DEFAULT_DATABASE, DatabaseOption, errors

db_app = typer.Typer(no_args_is_help=True, help="Look after the history database.")


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the root."""
    app.add_typer(db_app, name="db")


@db_app.command("upgrade")
def db_upgrade(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Bring the database's schema up to this version."""
    from storage.history import History

    with errors():
        store = History(database)
        store.upgrade()
        typer.echo(f"{database.partition('://')[0]}: {store.schema_status()}")


@db_app.command("status")
def db_status(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Say which schema the database has and which one this version needs."""
    from storage.history import History

    with errors():
        typer.echo(str(History(database).schema_status()))
