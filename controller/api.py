"""The controller's HTTP API and its status page.

What is read comes from the newest snapshots on the `Board` and from the history; no request waits for the loop. What is
written goes the way everything else goes: labels to the stream, orders to the history. The page's files are part of the
package, so that it works without any other server. The parts: `api_read` (now), `api_history` (before), `api_quality`
(labels), `api_operate` (orders), `api_guard` (who may).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from controller import api_history, api_operate, api_quality, api_read
from controller.api_context import MAX_POINTS, Context, HistoryStore
from controller.api_guard import Access, BodyLimit, SecurityHeaders
from controller.api_json import invalid, no_history
from controller.api_server import ApiServer, BoardServer
from controller.auth import Tokens
from controller.view import Board, PoolView, Wanted
from storage.errors import StorageError
from storage.records import OperatorAction, QualityScore

__all__ = ["MAX_POINTS", "ApiServer", "BoardServer", "create_app"]

DASHBOARD = FilePath(__file__).parent / "dashboard"
LATE_TICKS = 2.0


@dataclass(frozen=True)
class Health:
    """The answer of the probes: ``ok``, and what is wrong in plain words."""

    ok: bool
    reasons: list[str]


def create_app(
    board: Board,
    history: HistoryStore,
    *,
    ready: Callable[[], tuple[bool, list[str]]],
    clock: Callable[[], float],
    registry: CollectorRegistry,
    tokens: Tokens | None = None,
    read_tokens: Tokens | None = None,
    submit: Callable[[Sequence[QualityScore]], object] | None = None,
    wanted: Callable[[str], Sequence[Wanted]] | None = None,
    act: Callable[[OperatorAction], bool] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The application over ``board`` and ``history``.

    ``ready`` says whether the controller can act, with reasons; ``clock`` is the loop's clock in Unix seconds (views
    are dated by it); ``registry`` holds what ``/metrics`` shows. Readiness also needs that every pool has ticked within
    two intervals. Without ``tokens`` nobody may write; with ``read_tokens`` reading needs a token too. ``submit`` sends
    labels on to their stream, ``wanted`` lists a pool's requests that are worth one; ``act`` has the loop obey an order
    while the history cannot take it down. ``monotonic`` times the rate of writes.
    """
    access = Access(tokens, read_tokens, monotonic)
    context = Context(board, history, ready, clock, registry, access, submit, wanted, act)
    app = FastAPI(title="Lenity controller", docs_url=None, redoc_url=None)
    app.state.board = board
    app.add_middleware(BodyLimit)
    app.add_middleware(SecurityHeaders)
    app.mount("/static", StaticFiles(directory=DASHBOARD), name="static")
    app.add_exception_handler(StorageError, no_history)
    app.add_exception_handler(RequestValidationError, invalid)
    _add_probes(app, context)
    for part in (api_read, api_history, api_quality, api_operate):
        app.include_router(part.router(context))
    return app


def _add_probes(app: FastAPI, context: Context) -> None:
    """The page, the health probes and the metrics."""

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(DASHBOARD / "index.html")

    @app.get("/healthz", tags=["probes"])
    async def alive() -> Health:
        """The process answers."""
        return Health(True, [])

    @app.get("/readyz", responses={503: {"model": Health, "description": "cannot act, with reasons"}}, tags=["probes"])
    async def readiness(response: Response) -> Health:
        """The controller can act: its loop ticks and what it depends on works."""
        ok, reasons = context.ready()
        late = late_ticks(context.board.pools(), context.clock())
        if not ok or late:
            response.status_code = 503
        return Health(ok and not late, [*reasons, *late, *context.access.problems])

    @app.get("/metrics", include_in_schema=False, dependencies=[Depends(context.access.reader)])
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(context.registry), headers={"Content-Type": content_type})


def late_ticks(views: Sequence[PoolView], now: float) -> list[str]:
    """Reasons why the loop does not count as running: no tick yet, or none for `LATE_TICKS` intervals."""
    if not views:
        return ["the control loop has not ticked yet"]
    return [
        f"pool {v.pool}: the control loop has not ticked for {now - v.time:.1f} s (interval {v.interval_s:g} s)"
        for v in views
        if now - v.time > LATE_TICKS * v.interval_s
    ]
