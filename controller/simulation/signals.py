"""Numbers that change with time, as scenarios write them.

A plain number holds always. A mapping is steps, each holding until the next: ``{0s: 0.1, 10m: 0.9}``. A list of points
is straight lines between them: ``[[0s, 1], [1h, 16]]``. Before the first point and after the last one its value holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from policies.scalars import parse_duration, parse_number, parse_share


@dataclass(frozen=True)
class Signal:
    """A number against seconds of simulated time: steps, or straight lines between its points."""

    times: tuple[float, ...]
    values: tuple[float, ...]
    steps: bool = True

    def at(self, t: float) -> float:
        """The value at ``t`` seconds."""
        if len(self.values) == 1:
            return self.values[0]
        if self.steps:
            return self.values[max(0, bisect_right(self.times, t) - 1)]
        return float(np.interp(t, self.times, self.values))


def constant(value: float) -> Signal:
    """A signal that never changes."""
    return Signal((0.0,), (value,))


def _signal(parse: Callable[[Any], float]) -> Callable[[Any], Signal]:
    def build(value: Any) -> Signal:
        if isinstance(value, Signal):
            return value
        if isinstance(value, dict) and value:
            points, steps = list(value.items()), True
        elif isinstance(value, list) and value and all(isinstance(p, list) and len(p) == 2 for p in value):
            points, steps = [(p[0], p[1]) for p in value], False
        elif isinstance(value, dict | list):
            raise PydanticCustomError(
                "signal", "must be a number, steps {{0s: 1, 10m: 2}} or points [[0s, 1], [1h, 2]]"
            )
        else:
            return constant(parse(value))
        times = tuple(parse_duration(time) for time, _ in points)
        if list(times) != sorted(times):
            raise PydanticCustomError("signal", "the times must not go back")
        return Signal(times, tuple(parse(v) for _, v in points), steps)

    return build


def _interval(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise PydanticCustomError("interval", "must be [from, until], such as [1h, 90m]")
    if all(isinstance(v, float) for v in value):
        return (value[0], value[1])
    began, ended = parse_duration(value[0]), parse_duration(value[1])
    if not began < ended:
        raise PydanticCustomError("interval", "must end after it begins")
    return (began, ended)


def _intervals(value: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("interval", "must be a list of intervals, such as [[1h, 90m]]")
    return tuple(_interval(v) for v in value)


def inside(intervals: tuple[tuple[float, float], ...], t: float) -> bool:
    """Whether ``t`` seconds lie in one of the intervals (begin included, end not)."""
    return any(began <= t < ended for began, ended in intervals)


NumberSignal = Annotated[Signal, BeforeValidator(_signal(parse_number))]
ShareSignal = Annotated[Signal, BeforeValidator(_signal(parse_share))]
DurationSignal = Annotated[Signal, BeforeValidator(_signal(parse_duration))]
Interval = Annotated[tuple[float, float], BeforeValidator(_interval)]
Intervals = Annotated[tuple[tuple[float, float], ...], BeforeValidator(_intervals)]
