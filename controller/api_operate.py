"""What operators order: freeze, force lossless, resume, reset or adjust a budget. Who and why stay on the record.

An order is written to the history; the loop that leads the pool obeys it at its next tick, on whichever controller it
runs. While the history is away the controller that leads the pool obeys all the same and writes it down later.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from controller.api_context import NOT_FOUND, Context, PoolName, RowLimit
from controller.api_guard import WRITE_ERRORS
from controller.api_json import plain
from controller.auth import Identity
from storage.errors import StorageError
from storage.records import ALL_CLASSES, Action, OperatorAction

log = logging.getLogger("lenity.api")

ClassOrAll = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._:-]{0,127})$")]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=3, max_length=500)]


class Order(BaseModel):
    """An order for one class, or for all of a pool (``*``)."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    action: Annotated[Action, Field(description="what to do")]
    traffic_class: Annotated[ClassOrAll, Field(description="one class, or * for all of them")] = ALL_CLASSES
    why: Annotated[Reason, Field(description="why; it stays on the record")]
    amount: Annotated[
        float | None, Field(ge=-1e6, le=1e6, description="loss units to add to the budget; for adjust_budget only")
    ] = None

    @model_validator(mode="after")
    def _amount_where_it_belongs(self) -> Self:
        if (self.action == "adjust_budget") != (self.amount is not None):
            raise PydanticCustomError("amount", "adjust_budget needs an amount, and nothing else takes one")
        return self


@dataclass(frozen=True)
class Ordered:
    """An order as it was written down; ``time`` is Unix seconds, ``id`` 0 for one that will be written down later."""

    id: int
    pool: str
    traffic_class: str
    action: str
    amount: float | None
    who: str
    why: str
    time: float


def router(context: Context) -> APIRouter:
    """Orders, and the record of them."""
    routes = APIRouter(tags=["operators"])
    operator: Any = Depends(context.access.writer("operator"))

    @routes.post("/v1/pools/{pool}/actions", status_code=201, responses=NOT_FOUND | WRITE_ERRORS)
    def act(pool: PoolName, order: Order, who: Identity = operator) -> Ordered:
        """Order something; the loop obeys at its next tick."""
        context.check_class(pool, None if order.traffic_class == ALL_CLASSES else order.traffic_class)
        now = context.clock()
        values = (pool, order.traffic_class, order.action, who.name, order.why, now, order.amount)
        try:
            number = context.history.add_operator_action(*values)
        except StorageError:
            number = 0
            unwritten = OperatorAction(
                0, pool, order.traffic_class, order.action, order.amount, who.name, order.why, now
            )
            if context.act is None or not context.act(unwritten):
                raise
        log.warning("%s orders %s for %s/%s", who.name, order.action, pool, order.traffic_class)
        return Ordered(number, pool, order.traffic_class, order.action, order.amount, who.name, order.why, now)

    @routes.get("/v1/pools/{pool}/actions", responses=NOT_FOUND, dependencies=[Depends(context.access.reader)])
    def actions(pool: PoolName, limit: RowLimit = 100) -> list[dict[str, Any]]:
        """What was ordered, by whom and why, newest first."""
        context.view_of(pool)
        return [plain(row) for row in context.history.operator_log(pool, limit)]

    return routes
