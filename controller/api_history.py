"""Reading the past: series, decisions, alerts, and revisions of the policy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from controller.api_context import NOT_FOUND, AnyClass, ClassName, Context, PointLimit, PoolName, RowLimit, Since
from controller.api_json import Series, columns, plain

Until = Annotated[float | None, Query(alias="to", ge=0, le=1e11, allow_inf_nan=False, description="Unix seconds")]
Step = Annotated[float | None, Query(ge=1, le=366 * 86_400, allow_inf_nan=False, description="seconds; gives means")]
Changes = Annotated[bool, Query(description="only where state or reason changed; the last day's without `since`")]
Brief = Annotated[bool, Query(description="without the inputs, estimates and bounds that led to them")]
Rows = list[dict[str, Any]]
ALL_ROWS = 10_000
DAY_S = 86_400.0
DETAIL = ("inputs", "estimates", "bounds", "counterfactual")


def router(context: Context) -> APIRouter:
    """Everything that is read from the history; 503 while it cannot be read."""
    errors = NOT_FOUND | {503: {"description": "the history cannot be read"}}
    routes = APIRouter(dependencies=[Depends(context.access.reader)], responses=errors, tags=["history"])
    history = context.history

    @routes.get("/v1/pools/{pool}/series")
    def series(
        pool: PoolName,
        cls: ClassName,
        since: Since = None,
        until: Until = None,
        step: Step = None,
        limit: PointLimit = 1_000,
    ) -> Series:
        """What the loop saw and set at each tick, in columns; with `step` the means over steps of so many seconds."""
        context.check_class(pool, cls)
        after = since or 0.0
        rows = history.points(pool, cls, after, limit if step is None else ALL_ROWS, until, step)
        return columns(pool, cls, rows, after, limit, math.inf if until is None else until, step)

    @routes.get("/v1/pools/{pool}/decisions")
    def decisions(
        pool: PoolName,
        cls: AnyClass = None,
        since: Since = None,
        limit: RowLimit = 100,
        changes: Changes = False,
        brief: Brief = False,
    ) -> Rows:
        """Leases with everything that led to them, newest first."""
        context.check_class(pool, cls)
        if changes:
            after = max(0.0, context.clock() - DAY_S) if since is None else since
            rows = history.decision_changes(pool, cls, after, limit)
        else:
            rows = history.decisions(pool, cls, since, limit)
        return [plain({k: v for k, v in row.items() if not brief or k not in DETAIL}) for row in rows]

    @routes.get("/v1/pools/{pool}/alerts")
    def alerts(pool: PoolName, cls: AnyClass = None, since: Since = None, limit: RowLimit = 100) -> Rows:
        """When alerts began and ended to fire, newest first."""
        context.check_class(pool, cls)
        return [plain(row) for row in history.alerts(pool, cls, since, limit)]

    @routes.get("/v1/pools/{pool}/policy")
    def policy(pool: PoolName) -> dict[str, Any]:
        """The policy in force, and the last edit that was refused since then (null when none was)."""
        view = context.view_of(pool)
        rows = history.policy_revisions(pool, 100)
        active = next((r for r in rows if r.get("accepted")), None)
        newer = [r for r in rows if active is None or r["revision"] > active["revision"]]
        rejected = next((r for r in newer if not r.get("accepted")), None)
        return {"pool": pool, "active": plain(active), "rejected": plain(rejected), "rejection": view.policy_rejected}

    @routes.get("/v1/pools/{pool}/policy/revisions")
    def revisions(pool: PoolName, limit: RowLimit = 20) -> Rows:
        """Policy edits, accepted and refused, newest first; `diff` is against the policy in force before."""
        context.view_of(pool)
        return with_diffs(history.policy_revisions(pool, limit + 50), limit)

    return routes


def with_diffs(rows: Sequence[Mapping[str, Any]], limit: int) -> Rows:
    """The newest ``limit`` of ``rows`` (newest first), each with a unified diff against the accepted one before it.

    ``diff`` is None where that one is not among ``rows``.
    """
    found = []
    for i, row in enumerate(rows[:limit]):
        before = next((r for r in rows[i + 1 :] if r.get("accepted")), None)
        found.append(plain(row) | {"diff": None if before is None else _diff(before, row)})
    return found


def _diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    old, new = str(before.get("text", "")), str(after.get("text", ""))
    names = f"revision {before['revision']}", f"revision {after['revision']}"
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="", n=2))
