"""Time for the controller: looks like Unix seconds, but never steps."""

from __future__ import annotations

import time
from collections.abc import Callable


def elapsed_seconds() -> float:
    """Seconds on a clock that only moves forward and, where the system has one, also runs during suspend."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SteadyClock:
    """Unix time read once at start plus elapsed seconds since: a wall clock that steps by hours does not move it.

    Cooldowns, windows and burn rates are differences of `now`, so they are right whatever the wall clock does; after a
    restart the new anchor is compared with saved times by wall clock, which is the best there is.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = elapsed_seconds,
        *,
        floor: float = 0.0,
    ):
        self._elapsed = elapsed
        self._origin = max(wall(), floor) - elapsed()

    def now(self) -> float:
        """Steady seconds since the Unix epoch."""
        return self._origin + self._elapsed()
