"""Questions and orders to a running controller, with its refusals in one line and an exit code."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

REFUSED, NO_ANSWER = 1, 4
PATIENCE_S = 60.0

PoolArgument = Annotated[str, typer.Argument(help="Name of the pool.")]
ClassOption = Annotated[str | None, typer.Option("--class", help="One traffic class; all of them by default.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="LENITY_TOKEN_FILE", help="File with the token; or set LENITY_TOKEN.", exists=True, dir_okay=False
    ),
]


def token_from(path: Path | None) -> str | None:
    """The token of ``path``, else of LENITY_TOKEN; never an argument, which every user of the machine could read."""
    return path.read_text(encoding="utf-8").strip() if path is not None else os.environ.get("LENITY_TOKEN")


def get(url: str, path: str, token: str | None = None, **query: Any) -> Any:
    """The JSON answer of the controller at ``url``; ends the program with a line where there is none."""
    return _ask("GET", url, path, token, params={k: v for k, v in query.items() if v is not None})


def post(url: str, path: str, body: Any, token: str | None) -> Any:
    """Send ``body`` and return the JSON answer; waits where the controller asks for it."""
    return _ask("POST", url, path, token, json=body)


def _ask(method: str, url: str, path: str, token: str | None, **more: Any) -> Any:
    import httpx

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    waited = 0.0
    while True:
        try:
            answer = httpx.request(method, url.rstrip("/") + path, headers=headers, timeout=10.0, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            text = f"no answer from the controller at {url} ({e}); is `lenity controller` running?"
            raise fail(text, NO_ANSWER) from e
        if answer.status_code != 429 or waited >= PATIENCE_S:
            break
        pause = float(answer.headers.get("retry-after", "1"))
        time.sleep(pause)
        waited += pause
    if answer.is_success:
        return answer.json()
    raise fail(f"{method} {path}: {_detail(answer)}", REFUSED)


def fail(text: str, code: int) -> typer.Exit:
    """Say ``text`` on standard error; raise what this returns."""
    typer.echo(f"lenity: {text}", err=True)
    return typer.Exit(code)


def _detail(answer: Any) -> str:
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in detail)
    hint = ""
    if answer.status_code == 401:
        hint = "; give one with --token-file FILE or in LENITY_TOKEN"
    return f"{detail}{hint} (status {answer.status_code})"
