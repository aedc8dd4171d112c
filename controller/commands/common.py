"""What the commands share: options, output and errors."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from policies.errors import LenityError
from storage.errors import StorageError

DEFAULT_DATABASE = "sqlite:///lenity.db"
DEFAULT_URL = "http://127.0.0.1:8470"
DatabaseOption = Annotated[
    str, typer.Option(envvar="LENITY_DATABASE_URL", help="sqlite:///FILE or postgresql+psycopg://…")
]
RedisOption = Annotated[str, typer.Option(envvar="LENITY_REDIS_URL", help="redis://…, rediss://… or unix:///SOCKET")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[str, typer.Option(envvar="LENITY_URL", help="The controller's address.")]


class errors:
    """Turns our errors into one line on standard error and exit code 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LenityError | StorageError | OSError):
            raise SystemExit(f"lenity: {error}") from error


def print_json(value: Any) -> None:
    """``value`` as one line of JSON on standard output."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
