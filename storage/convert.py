"""How records become rows of the history's tables and come back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping

from storage.records import Decision, Lease


@dataclass(frozen=True)
class Point:
    """What the series of one class were at one tick (`time`: Unix seconds).

    Values are kept to seven digits; those that are not finite are not kept.
    """

    pool: str
    traffic_class: str
    time: float
    values: dict[str, float]


@dataclass(frozen=True)
class Alert:
    """An alert that began (`firing`) or ended, at `time` in Unix seconds."""

    pool: str
    traffic_class: str
    time: float
    name: str
    firing: bool
    detail: str


def decision_of(row: Mapping[str, Any]) -> Decision:
    """The Decision of one row of `History.decisions`."""
    names = ("pool", "traffic_class", "state", "reason", "explanation", *_DETAIL)
    lease = Lease.from_json(json.dumps(row["lease"]))
    return Decision(time=row["unix_time"], lease=lease, **{name: row[name] for name in names})


_DETAIL = ("inputs", "estimates", "bounds", "counterfactual")


def decision_row(d: Decision) -> dict[str, Any]:
    """The row of a decision; what only its replay needs is one column of JSON."""
    return {
        "pool": d.pool,
        "traffic_class": d.traffic_class,
        "time": d.time,
        "epoch": d.lease.epoch,
        "seq": d.lease.seq,
        "policy_revision": d.lease.policy_revision,
        "state": d.state,
        "reason": d.reason,
        "explanation": clean(d.explanation),
        "lease": d.lease.to_json(),
        "detail": {"unix_time": d.time} | {name: getattr(d, name) for name in _DETAIL},
    }


def decision_dict(row: RowMapping) -> dict[str, Any]:
    """What readers get of a decision's row."""
    columns = ("pool", "traffic_class", "time", "epoch", "seq", "policy_revision", "state", "reason", "explanation")
    plain = {name: row[name] for name in (*columns, "superseded")}
    return plain | {"lease": json.loads(row["lease"])} | dict(row["detail"])


def point_row(point: Point) -> dict[str, Any]:
    """The row of a point."""
    values = {name: float(f"{value:.7g}") for name, value in point.values.items() if math.isfinite(value)}
    return fields(point) | {"values": values}


def fields(record: Any, **more: Any) -> dict[str, Any]:
    """The row of a record whose fields are columns."""
    return {name: clean(v) if isinstance(v, str) else v for name, v in vars(record).items()} | more


def clean(text: str) -> str:
    """Text that every database can store: no NUL, no half of a surrogate pair."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")
