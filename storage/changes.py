"""Decisions at which something changed, out of one decision a tick."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, or_, select

from storage.tables import as_utc, decisions


def changed_decisions(pool: str, cls: str | None, since: float | datetime) -> Select[Any]:
    """The decisions of ``pool`` later than ``since`` whose state or reason differs from the one before of their class,
    newest first; the first of each class counts as a change."""
    d = decisions.c
    chosen = [d.pool == pool, d.time > as_utc(since), *(() if cls is None else (d.traffic_class == cls,))]
    window: dict[str, Any] = {"partition_by": d.traffic_class, "order_by": (d.time, d.id)}
    before = [func.lag(column).over(**window).label(f"{column.name}_before") for column in (d.state, d.reason)]
    each = select(d.id, d.state, d.reason, *before).where(*chosen).subquery()
    e = each.c
    changed = or_(e.reason_before.is_(None), e.reason != e.reason_before, e.state != e.state_before)
    return select(decisions).join(each, d.id == e.id).where(changed).order_by(d.time.desc(), d.id.desc())
