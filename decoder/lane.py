"""The lane beside the batch: strategies that take one request at a time, a step of theirs between two rounds.

A step is a token, a few drafted tokens or one verified block, so neither side waits for more than one step of the
other, and a long answer in the lane does not hold up the rows of the batch. It looks like a `decoder.batch.Batch` of
one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decoder.batch import OnTokens
from decoder.request import Completion, Knobs, Observer, Request
from decoder.steps import Run
from decoder.strategies import Models, StrategyCompletion, get_strategy


@dataclass(eq=False)
class _Seat:
    request: Request
    run: Run[StrategyCompletion]
    on_tokens: OnTokens | None
    told: int = 0


class Lane:
    """One request at work by any strategy of `decoder.strategies`. For one thread, the batch's."""

    def __init__(self, models: Models):
        self._models = models
        self._seat: _Seat | None = None

    @property
    def rows(self) -> int:
        """1 while there is a request."""
        return int(self._seat is not None)

    @property
    def free(self) -> int:
        """Requests that can be added."""
        return 1 - self.rows

    def add(
        self,
        request: Request,
        knobs: Callable[[], Knobs],
        observer: Observer | None = None,
        on_tokens: OnTokens | None = None,
        strategy: str = "speculative",
    ) -> None:
        """Take in a request; arguments as for `Batch.add`.

        Raises ValueError for a request that cannot be served, and RuntimeError when there is one already.
        """
        if self._seat is not None:
            raise RuntimeError("the lane has a request already")
        self._models.engine.start(request)
        self._seat = _Seat(
            request, Run(get_strategy(strategy).steps(self._models, request, knobs, observer)), on_tokens
        )

    def step(self) -> list[Completion]:
        """One step; the request if it has finished."""
        seat = self._seat
        if seat is None:
            return []
        done = seat.run.step()
        if seat.on_tokens is not None and seat.run.row is not None:
            new, logprobs = seat.run.row.news(seat.told)
            seat.told += len(new)
            if new:
                seat.on_tokens(new, logprobs)
        if done is None:
            return []
        self._seat = None
        return [done]

    def cancel(self, request_id: str) -> Completion | None:
        """As `Batch.cancel`: None where nothing was decided yet."""
        seat = self._seat
        if seat is None or seat.request.request_id != request_id:
            return None
        self._seat = None
        seat.run.close()
        row = seat.run.row
        if row is None or row.knobs is None:
            return None
        row.finish_reason = "cancelled"
        return row.completion()
