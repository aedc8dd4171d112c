"""The controller's HTTP API and its status page.

Everything is read from the newest snapshots on the `Board` and from the history; no request waits for the loop. All of
it is read-only. The page's files are part of the package, so that it works without any other server.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from pathlib import Path as FilePath
from typing import Annotated, Any, Protocol

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import TypeAdapter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.view import Board, BoardFull, PoolView, Subscription
from storage.errors import StorageError

DASHBOARD = FilePath(__file__).parent / "dashboard"
MAX_POINTS = 5_000
MAX_ROWS = 500
LATE_TICKS = 2.0
RECONNECT_MS = 2_000

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

log = logging.getLogger("lenity.api")


class PointLike(Protocol):
    """One row of the series: what the loop wrote at one tick for one class."""

    @property
    def time(self) -> float | datetime: ...
    @property
    def values(self) -> Mapping[str, float | None]: ...


class HistoryReader(Protocol):
    """What the API reads from the history; `limit` keeps the newest rows. Raises StorageError."""

    def points(self, pool: str, cls: str, since: float, limit: int) -> Sequence[PointLike]: ...
    def decisions(self, pool: str, cls: str | None, since: float | None, limit: int) -> Sequence[Any]: ...
    def alerts(self, pool: str, cls: str | None, since: float | None, limit: int) -> Sequence[Any]: ...
    def policy_revisions(self, pool: str, limit: int) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Health:
    """The answer of the probes: ``ok``, and what is wrong in plain words."""

    ok: bool
    reasons: list[str]


@dataclass(frozen=True)
class Pools:
    """Every pool as of its last tick, and the controller's clock."""

    time: float
    pools: list[PoolView]


@dataclass(frozen=True)
class Series:
    """Columns of equal length: ``time`` in Unix seconds, ascending, and per name the values (null where not known)."""

    pool: str
    traffic_class: str
    time: list[float]
    values: dict[str, list[float | None]]


PoolName = Annotated[str, Path(min_length=1, max_length=128)]
ClassName = Annotated[str, Query(alias="class", min_length=1, max_length=128)]
AnyClass = Annotated[str | None, Query(alias="class", min_length=1, max_length=128)]
Since = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="Unix seconds: only later rows")]
PointLimit = Annotated[int, Query(ge=1, le=MAX_POINTS, description="at most so many rows, the newest ones")]
RowLimit = Annotated[int, Query(ge=1, le=MAX_ROWS, description="at most so many rows, the newest ones")]
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"description": "no such pool or class"}}


async def subscription(request: Request) -> AsyncIterator[Subscription]:
    """A place on the board for as long as the request lasts; too many of them are refused."""
    board: Board = request.app.state.board
    try:
        stream = board.subscribe()
    except BoardFull as e:
        raise HTTPException(503, f"{e}; poll /v1/pools instead", headers={"Retry-After": "10"}) from None
    with stream:
        yield stream


def create_app(
    board: Board,
    history: HistoryReader,
    *,
    ready: Callable[[], tuple[bool, list[str]]],
    clock: Callable[[], float],
    registry: CollectorRegistry,
) -> FastAPI:
    """The application over ``board`` and ``history``.

    ``ready`` says whether the controller can act, with reasons; ``clock`` is the loop's clock in Unix seconds (views
    are dated by it); ``registry`` holds what ``/metrics`` shows. Readiness also needs that every pool has ticked within
    two intervals.
    """
    app = FastAPI(title="Lenity controller", docs_url=None, redoc_url=None)
    app.state.board = board
    app.add_middleware(SecurityHeaders)
    app.mount("/static", StaticFiles(directory=DASHBOARD), name="static")
    app.add_exception_handler(StorageError, no_history)
    add_probes(app, board, ready=ready, clock=clock, registry=registry)
    views = TypeAdapter(PoolView)

    def view_of(pool: str) -> PoolView:
        view = board.pool(pool)
        if view is None:
            known = ", ".join(v.pool for v in board.pools()) or "none"
            raise HTTPException(404, f"no pool {pool!r}; there are: {known}")
        return view

    def check_class(pool: str, name: str | None) -> None:
        names = [c.traffic_class for c in view_of(pool).classes]
        if name is not None and name not in names:
            raise HTTPException(404, f"pool {pool!r} has no class {name!r}; there are: {', '.join(names) or 'none'}")

    @app.get("/v1/pools")
    async def pools() -> Pools:
        """Every pool with its classes: state, knobs, budget, evidence, alerts."""
        return Pools(clock(), board.pools())

    @app.get("/v1/pools/{pool}", responses=NOT_FOUND)
    async def pool(pool: PoolName) -> PoolView:
        """One pool."""
        return view_of(pool)

    @app.get("/v1/pools/{pool}/series", responses=NOT_FOUND)
    def series(pool: PoolName, cls: ClassName, since: Since = None, limit: PointLimit = 1_000) -> Series:
        """What the loop saw and set at each tick, in columns."""
        check_class(pool, cls)
        return columns(pool, cls, history.points(pool, cls, since or 0.0, limit), since or 0.0, limit)

    @app.get("/v1/pools/{pool}/decisions", responses=NOT_FOUND)
    def decisions(
        pool: PoolName, cls: AnyClass = None, since: Since = None, limit: RowLimit = 100
    ) -> list[dict[str, Any]]:
        """Leases with everything that led to them."""
        check_class(pool, cls)
        return [plain(row) for row in history.decisions(pool, cls, since, limit)]

    @app.get("/v1/pools/{pool}/alerts", responses=NOT_FOUND)
    def alerts(
        pool: PoolName, cls: AnyClass = None, since: Since = None, limit: RowLimit = 100
    ) -> list[dict[str, Any]]:
        """When alerts began and ended to fire."""
        check_class(pool, cls)
        return [plain(row) for row in history.alerts(pool, cls, since, limit)]

    @app.get("/v1/pools/{pool}/policy/revisions", responses=NOT_FOUND)
    def revisions(pool: PoolName, limit: RowLimit = 20) -> list[dict[str, Any]]:
        """Policy edits, accepted and refused."""
        view_of(pool)
        return [plain(row) for row in history.policy_revisions(pool, limit)]

    @app.get("/v1/events", response_class=EventSourceResponse)
    async def events(stream: Annotated[Subscription, Depends(subscription)]) -> AsyncIterator[ServerSentEvent]:
        """Each pool's view whenever it changes, as events named ``pool``."""
        yield ServerSentEvent(comment="lenity", retry=RECONNECT_MS)
        while (changed := await stream.next()) is not None:
            for view in changed:
                yield ServerSentEvent(event="pool", raw_data=views.dump_json(view).decode())

    return app


def add_probes(
    app: FastAPI,
    board: Board,
    *,
    ready: Callable[[], tuple[bool, list[str]]],
    clock: Callable[[], float],
    registry: CollectorRegistry,
) -> None:
    """The page, the health probes and the metrics."""

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(DASHBOARD / "index.html")

    @app.get("/healthz")
    async def alive() -> Health:
        """The process answers."""
        return Health(True, [])

    @app.get("/readyz", responses={503: {"model": Health, "description": "cannot act, with reasons"}})
    async def readiness(response: Response) -> Health:
        """The controller can act: its loop ticks and what it depends on works."""
        ok, reasons = ready()
        late = late_ticks(board.pools(), clock())
        if not ok or late:
            response.status_code = 503
        return Health(ok and not late, [*reasons, *late])

    @app.get("/metrics", include_in_schema=False)
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})


async def no_history(request: Request, error: Exception) -> JSONResponse:
    """The answer where the history cannot be read; what exactly failed goes to the log and not to the caller."""
    log.warning("history cannot be read for %s: %s", request.url.path, error)
    return JSONResponse({"detail": "the history cannot be read at the moment"}, 503, {"Retry-After": "5"})


def late_ticks(views: Sequence[PoolView], now: float) -> list[str]:
    """Reasons why the loop does not count as running: no tick yet, or none for `LATE_TICKS` intervals."""
    if not views:
        return ["the control loop has not ticked yet"]
    return [
        f"pool {v.pool}: the control loop has not ticked for {now - v.time:.1f} s (interval {v.interval_s:g} s)"
        for v in views
        if now - v.time > LATE_TICKS * v.interval_s
    ]


def columns(pool: str, cls: str, points: Sequence[PointLike], since: float, limit: int) -> Series:
    """Points as columns in time's order, the newest ``limit`` of those after ``since``; what is not finite is null."""
    rows = sorted(((unix(p.time), p.values) for p in points), key=lambda row: row[0])
    rows = [row for row in rows if row[0] > since][-limit:]
    names = sorted({name for _, values in rows for name in values})
    return Series(
        pool, cls, [t for t, _ in rows], {name: [finite(values.get(name)) for _, values in rows] for name in names}
    )


def unix(time: float | datetime) -> float:
    """Unix seconds of an aware datetime, or of Unix seconds."""
    return time.timestamp() if isinstance(time, datetime) else float(time)


def finite(value: float | None) -> float | None:
    """``value`` as JSON can carry it: None where it is not a finite number."""
    return float(value) if value is not None and math.isfinite(value) else None


def plain(value: Any) -> Any:
    """``value`` as plain JSON types: records become objects, datetimes Unix seconds, what is not finite null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, datetime):
        return unix(value)
    return finite(value) if isinstance(value, float) else value


class SecurityHeaders:
    """ASGI middleware: the same security headers on every answer, streams included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


class BoardServer(uvicorn.Server):
    """A uvicorn server whose event streams do not hold up its shutdown: the board ends them first."""

    def __init__(self, config: uvicorn.Config, board: Board) -> None:
        super().__init__(config)
        self._board = board

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, finish open requests, close."""
        self._board.close()
        await super().shutdown(sockets)


class ApiServer:
    """The application in a thread of its own."""

    def __init__(self, app: ASGIApp, board: Board, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=3
        )
        self._server = BoardServer(config, board)
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Bind, serve and return the URL (port 0 takes a free one); raises OSError when the address cannot be bound."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server((self._host, self._port), family=family, backlog=128)
        host, port = self._socket.getsockname()[:2]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="lenity-api", daemon=True
        )
        self._thread.start()
        return f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"

    def stop(self, timeout: float = 5.0) -> bool:
        """End the event streams, finish open requests and stop; False when the thread outlived ``timeout`` seconds."""
        self._server.should_exit = True
        if self._thread is None or self._socket is None:
            return True
        self._thread.join(timeout)
        self._socket.close()
        return not self._thread.is_alive()
