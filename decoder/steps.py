"""Decoding in steps, so that one thread can go to and fro between requests."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Generic, TypeVar

from decoder.request import Completion, ForkPoint
from decoder.row import Row

_T = TypeVar("_T")

# A request at work: gives its row after every step (one or a few passes of a model), and in the end what came of it.
Steps = Generator[Row, None, _T]


def finish(steps: Steps[_T]) -> _T:
    """All the steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result


def fork_point(completion: Completion) -> ForkPoint:
    """Where the branch that was not served begins; ValueError for a request that was never touched."""
    if completion.fork_point is None:
        raise ValueError(f"request {completion.request.request_id} was never touched: there is nothing to fork")
    return completion.fork_point


class Run(Generic[_T]):
    """A request at work, stepped from outside. ``busy_s`` are the seconds that its steps took, and nothing between."""

    def __init__(self, steps: Steps[_T]):
        self._steps = steps
        self.row: Row | None = None  # after the first step
        self.busy_s = 0.0

    def step(self) -> _T | None:
        """One step; what came of it when there is none left."""
        began = time.perf_counter()
        try:
            self.row = next(self._steps)
            while self.row.finish_reason:  # it has ended and has only to say so
                self.row = next(self._steps)
        except StopIteration as end:
            result: _T = end.value
            return result
        finally:
            self.busy_s += time.perf_counter() - began
        return None

    def close(self) -> None:
        """Give it up."""
        self._steps.close()
