"""What operators ordered: the table of their actions, which the loop polls by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, select, text

from storage.records import ACTIONS, Action, OperatorAction
from storage.tables import operator_actions

# Any number that no other program on the server uses. Actions are added one at a time, so that a reader that has seen
# number n has seen every smaller one too: sequences hand out numbers in another order than transactions commit.
_ADD_LOCK = 0x6C656E697480


def add(
    connection: Connection,
    pool: str,
    traffic_class: str,
    action: Action,
    who: str,
    why: str,
    now: float,
    amount: float | None,
) -> int:
    """Store one action and return its number; ValueError for one that means nothing."""
    if action not in ACTIONS:
        raise ValueError(f"action is {action!r:.40}, expected one of {', '.join(ACTIONS)}")
    if (amount is not None) != (action == "adjust_budget"):
        raise ValueError(f"{action}: an amount in loss units belongs to adjust_budget and to nothing else")
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADD_LOCK})
    row = {"pool": pool, "traffic_class": traffic_class, "action": action, "amount": amount, "who": who, "why": why}
    insert = operator_actions.insert().values(**row, time=now).returning(operator_actions.c.id)
    return int(connection.execute(insert).scalar_one())


def after(pool: str, last: int) -> Select[Any]:
    """Actions of a pool with numbers above `last`, oldest first."""
    c = operator_actions.c
    return select(operator_actions).where(c.pool == pool, c.id > last).order_by(c.id)


def newest(pool: str) -> Select[Any]:
    """Actions of a pool, newest first."""
    return select(operator_actions).where(operator_actions.c.pool == pool).order_by(operator_actions.c.id.desc())


def actions(rows: Sequence[RowMapping]) -> list[OperatorAction]:
    """The actions of result rows."""
    return [OperatorAction(**{**row, "time": row["time"].timestamp()}) for row in rows]
