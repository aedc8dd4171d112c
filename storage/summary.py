"""Sums over the requests of a stretch of time. Ratios are left to the caller: sums over sums."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Table, and_, case, func, select, true

from storage.tables import forks, requests, scores

By = Literal["received", "started"]


def requests_between(
    connection: Connection,
    pool: str,
    start: float | datetime,
    end: float | datetime,
    traffic_class: str | None = None,
    by: By = "received",
) -> dict[str, Any]:
    """Requests with `start` <= time < `end`: totals, by arm, and their scores.

    Args:
        by: the time that counts: `received` by the controller, or `started` on the worker's clock.

    Returns:
        requests, touched, touches, tokens, prompt_tokens, target_passes, seconds, first_token_seconds, forks_drawn,
        labels_drawn; `arms`: the same for each of untouched, lenient, holdback; forks_done; served_scores and
        served_score_sum; `scores`: {n, sum} for each arm and branch; `paired`: touched requests with both branches
        scored alike, {n, lossless_sum, lenient_sum, loss_sum}, loss = lossless minus lenient.
    """
    r = requests.c
    chosen = [r.pool == pool, getattr(r, by) >= start, getattr(r, by) < end]
    if traffic_class is not None:
        chosen.append(r.traffic_class == traffic_class)
    sums = {
        "requests": func.count(),
        "touched": func.sum(case((r.touches > 0, 1), else_=0)),
        "touches": func.sum(r.touches),
        "tokens": func.sum(r.tokens),
        "prompt_tokens": func.sum(r.prompt_tokens),
        "target_passes": func.sum(r.target_passes),
        "seconds": func.sum(r.total_s),
        "first_token_seconds": func.sum(r.first_token_s),
        "forks_drawn": func.sum(case((r.fork_drawn, 1), else_=0)),
        "labels_drawn": func.sum(case((r.label_drawn, 1), else_=0)),
    }
    rows = connection.execute(
        select(r.arm, *(column.label(name) for name, column in sums.items())).where(*chosen).group_by(r.arm)
    ).mappings()
    arms: dict[str, dict[str, int | float]] = {
        arm: dict.fromkeys(sums, 0) for arm in ("untouched", "lenient", "holdback")
    }
    for row in rows:
        arms[row["arm"]] = {name: number(row[name]) for name in sums}
    total: dict[str, Any] = {name: sum(arm[name] for arm in arms.values()) for name in sums}

    s, scored = _with(connection, scores)
    by_branch = connection.execute(
        select(r.arm, s.branch, func.count().label("n"), func.sum(s.score).label("sum"))
        .select_from(scored)
        .where(*chosen)
        .group_by(r.arm, s.branch)
    ).mappings()
    total["scores"] = {arm: {branch: {"n": 0, "sum": 0.0} for branch in ("served", "fork")} for arm in arms}
    for row in by_branch:
        total["scores"][row["arm"]][row["branch"]] = {"n": row["n"], "sum": float(row["sum"])}

    served = [branches["served"] for branches in total["scores"].values()]
    total |= {"served_scores": sum(b["n"] for b in served), "served_score_sum": sum(b["sum"] for b in served)}
    total["paired"] = _paired(connection, chosen)
    f, forked = _with(connection, forks)
    done = select(func.count()).select_from(forked).where(*chosen, f.done)
    total["forks_done"] = connection.execute(done).scalar_one()
    total["arms"] = arms
    return total


def _paired(connection: Connection, chosen: list[Any]) -> dict[str, Any]:
    r = requests.c
    s, scored = _with(connection, scores)
    paired = (
        select(
            r.arm,
            func.max(case((s.branch == "served", s.score))).label("served"),
            func.max(case((s.branch == "fork", s.score))).label("fork"),
        )
        .select_from(scored)
        .where(*chosen, r.touches > 0)
        .group_by(r.request_id, r.arm, s.metric, s.scorer, s.scorer_version)
        .having(func.count() == 2)
        .subquery()
    )
    pair = paired.c
    held_back = pair.arm == "holdback"
    lossless = func.sum(case((held_back, pair.served), else_=pair.fork))
    lenient = func.sum(case((held_back, pair.fork), else_=pair.served))
    row = connection.execute(
        select(func.count().label("n"), lossless.label("lossless"), lenient.label("lenient"))
    ).one()
    a, b = float(row.lossless or 0.0), float(row.lenient or 0.0)
    return {"n": row.n, "lossless_sum": a, "lenient_sum": b, "loss_sum": a - b}


def _with(connection: Connection, table: Table) -> tuple[Any, Any]:
    """Columns of `table`, and requests joined to its rows, which are looked up by their key request by request.

    PostgreSQL without statistics, as after a bulk of new rows, would read all rows of the pool for every request (a
    thousand times slower); OFFSET keeps it from planning the look-up together with the rest.
    """
    of_request = and_(table.c.pool == requests.c.pool, table.c.request_id == requests.c.request_id)
    if connection.dialect.name == "sqlite":
        return table.c, requests.join(table, of_request)
    rows = select(table).where(of_request).offset(0).lateral()
    return rows.c, requests.join(rows, true())


def number(value: Any) -> int | float:
    """A sum as a plain number: PostgreSQL sums counts into Decimal."""
    return value if isinstance(value, int | float) else int(value)
