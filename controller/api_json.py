"""What the API answers with: plain JSON of records, series in columns, and errors that echo nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from typing import Any, Protocol

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

log = logging.getLogger("lenity.api")


class PointLike(Protocol):
    """One row of the series: what the loop wrote at one tick for one class."""

    @property
    def time(self) -> float | datetime: ...
    @property
    def values(self) -> Mapping[str, float | None]: ...


@dataclass(frozen=True)
class Series:
    """Columns of equal length: ``time`` in Unix seconds, ascending, and per name the values (null where not known).

    With a ``step`` each row stands for the step of that many seconds that begins at its time, and holds means.
    """

    pool: str
    traffic_class: str
    time: list[float]
    values: dict[str, list[float | None]]
    step: float | None = None


def columns(
    pool: str,
    cls: str,
    points: Sequence[PointLike],
    since: float,
    limit: int,
    until: float = math.inf,
    step: float | None = None,
) -> Series:
    """Points as columns in time's order: those with ``since`` < time <= ``until``, of which the newest ``limit``.

    ``step`` in seconds averages over steps that begin at its multiples; what is not finite is null.
    """
    rows = sorted(((unix(p.time), p.values) for p in points), key=lambda row: row[0])
    rows = [row for row in rows if since < row[0] <= until]
    if step is not None:
        rows = _averaged(rows, step)
    rows = rows[-limit:]
    names = sorted({name for _, values in rows for name in values})
    values = {name: [finite(row.get(name)) for _, row in rows] for name in names}
    return Series(pool, cls, [t for t, _ in rows], values, step)


def _averaged(
    rows: Sequence[tuple[float, Mapping[str, float | None]]], step: float
) -> list[tuple[float, Mapping[str, float | None]]]:
    sums: dict[int, dict[str, tuple[float, int]]] = {}
    for time, values in rows:
        bucket = sums.setdefault(math.floor(time / step), {})
        for name, value in values.items():
            if finite(value) is not None:
                total, n = bucket.get(name, (0.0, 0))
                bucket[name] = total + float(value or 0.0), n + 1
    return [(i * step, {name: total / n for name, (total, n) in bucket.items()}) for i, bucket in sums.items()]


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


async def no_history(request: Request, error: Exception) -> JSONResponse:
    """The answer where a store is away; what exactly failed goes to the log and not to the caller."""
    log.warning("a store is away for %s %s: %s", request.method, request.url.path, error)
    what = "the history cannot be read" if request.method == "GET" else "it cannot be written down"
    return JSONResponse({"detail": f"{what} at the moment"}, 503, {"Retry-After": "5"})


async def invalid(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with a request, and where. What was sent is not repeated: it may be a secret, or no JSON at all."""
    assert isinstance(error, RequestValidationError)
    faults = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()]
    return JSONResponse({"detail": faults[:20]}, 422)
