"""Calendar windows: when the month, week or day began, in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def period_start(calendar: str, now: float) -> float:
    """Unix seconds at which the ``month``, ``week`` (from Monday) or ``day`` of ``now`` began, in UTC."""
    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if calendar == "month":
        day = day.replace(day=1)
    elif calendar == "week":
        day -= timedelta(days=day.weekday())
    elif calendar != "day":
        raise ValueError(f"a calendar window is a month, week or day, not {calendar!r}")
    return day.timestamp()
