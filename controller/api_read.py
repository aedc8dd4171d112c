"""Reading the present: pools, leases, estimates, budgets, reasons, and the stream of changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import TypeAdapter

from controller.api_context import NOT_FOUND, AnyClass, Context, PoolName
from controller.view import Board, BoardFull, ClassView, Estimate, PoolView, Subscription
from controller.why import Why, explain
from storage.errors import StorageError
from storage.records import Lease

RECONNECT_MS = 2_000


@dataclass(frozen=True)
class Pools:
    """Every pool as of its last tick, and the controller's clock."""

    time: float
    pools: list[PoolView]


@dataclass(frozen=True)
class Estimates:
    """What is estimated for one class, with intervals."""

    traffic_class: str
    rule: str
    estimates: Mapping[str, Estimate]
    positions: tuple[float, ...]
    frontier: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Budget:
    """One class's error budget. Losses are in requests' worth of quality, ``remaining`` is a share of it."""

    traffic_class: str
    state: str
    metric: str
    max_loss: float
    window_s: float
    confidence: float
    requests_in_window: int
    budget: float
    spent: float
    spent_upper: float
    remaining: float
    burn: Mapping[str, float]
    touches_per_request_allowed: float
    labels_needed: int | None


async def subscription(request: Request) -> AsyncIterator[Subscription]:
    """A place on the board for as long as the request lasts; too many of them are refused."""
    board: Board = request.app.state.board
    try:
        stream = board.subscribe()
    except BoardFull as e:
        raise HTTPException(503, f"{e}; poll /v1/pools instead", headers={"Retry-After": "10"}) from None
    with stream:
        yield stream


def router(context: Context) -> APIRouter:
    """Everything that is read from the newest views; the history adds to the reasons where it can be read."""
    routes = APIRouter(dependencies=[Depends(context.access.reader)], tags=["state"])
    views = TypeAdapter(PoolView)

    def classes(pool: str, name: str | None) -> list[ClassView]:
        context.check_class(pool, name)
        return [c for c in context.view_of(pool).classes if name is None or c.traffic_class == name]

    @routes.get("/v1/pools")
    async def pools() -> Pools:
        """Every pool with its classes: state, knobs, budget, evidence, alerts."""
        return Pools(context.clock(), context.board.pools())

    @routes.get("/v1/pools/{pool}", responses=NOT_FOUND)
    async def pool(pool: PoolName) -> PoolView:
        """One pool."""
        return context.view_of(pool)

    @routes.get("/v1/pools/{pool}/leases", responses=NOT_FOUND)
    async def leases(pool: PoolName, cls: AnyClass = None) -> list[Lease]:
        """The newest lease of each class: the knobs that workers may use, and for how long."""
        return [c.lease for c in classes(pool, cls) if c.lease is not None]

    @routes.get("/v1/pools/{pool}/estimates", responses=NOT_FOUND)
    async def estimates(pool: PoolName, cls: AnyClass = None) -> list[Estimates]:
        """What is estimated for each class, with intervals."""
        return [Estimates(c.traffic_class, c.rule, c.estimates, c.positions, c.frontier) for c in classes(pool, cls)]

    @routes.get("/v1/pools/{pool}/budget", responses=NOT_FOUND)
    async def budget(pool: PoolName, cls: AnyClass = None) -> list[Budget]:
        """Each class's error budget: what the window allows, what is spent at most, and how fast it goes."""
        names = Budget.__dataclass_fields__
        return [Budget(**{name: getattr(c, name) for name in names}) for c in classes(pool, cls)]

    @routes.get("/v1/pools/{pool}/why", responses=NOT_FOUND)
    def why(pool: PoolName, cls: AnyClass = None) -> list[Why]:
        """Why each class decodes as it does, in plain words with the numbers, when that may change, and what to do."""
        return [explain(pool, c, _newest(context, pool, c.traffic_class), context.clock()) for c in classes(pool, cls)]

    @routes.get("/v1/events", response_class=EventSourceResponse)
    async def events(stream: Annotated[Subscription, Depends(subscription)]) -> AsyncIterator[ServerSentEvent]:
        """Each pool's view whenever it changes, as events named ``pool``."""
        yield ServerSentEvent(comment="lenity", retry=RECONNECT_MS)
        while (changed := await stream.next()) is not None:
            for view in changed:
                yield ServerSentEvent(event="pool", raw_data=views.dump_json(view).decode())

    return routes


def _newest(context: Context, pool: str, cls: str) -> Mapping[str, Any] | None:
    try:
        rows = context.history.decisions(pool, cls, None, 1)
    except StorageError:
        return None
    return rows[0] if rows else None
