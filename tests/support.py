"""What tests of several kinds share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float = 5.0, every: float = 0.01) -> T:
    """Call ``predicate`` until it is true and return what it gave; AssertionError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            name = getattr(predicate, "__name__", "predicate")
            raise AssertionError(f"{name} was not true within {timeout} s (last value: {value!r:.200})")
        time.sleep(every)
