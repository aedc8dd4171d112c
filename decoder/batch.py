"""Requests that decode together: rows join and leave between rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoder.generate import Engine, Rows
from decoder.request import Completion, Knobs, Observer, Request, TokenLogprob
from decoder.row import Row
from policies.errors import ModelError

OnTokens = Callable[[list[int], list[TokenLogprob]], None]


@dataclass(eq=False)
class _Seat:
    """A request at work and who listens to it."""

    row: Row
    knobs: Callable[[], Knobs]
    observer: Observer | None
    on_tokens: OnTokens | None
    told: int = 0  # output tokens that `on_tokens` knows


class Batch:
    """Up to ``max_rows`` requests at work. Each gets the output that `Engine.generate` would give it alone.

    That is exact but for rounding: rows read in one pass have logits that differ from those of a row read alone in the
    last bits, so an output may differ where two tokens nearly tie or a uniform nearly hits its threshold. For one
    thread: nothing here is locked. Raises ModelError for models that cannot decode so many rows in one pass.
    """

    def __init__(self, engine: Engine, max_rows: int = 8):
        if max_rows < 1:
            raise ValueError(f"a batch has at least one row, not {max_rows!r}")
        self._engine = engine
        self._max_rows = max_rows
        self._rows = Rows(engine, max_rows)
        self._seats: list[_Seat] = []  # as the rows
        self._waiting: list[_Seat] = []  # no round yet

    @property
    def rows(self) -> int:
        """Requests at work."""
        return len(self._seats) + len(self._waiting)

    @property
    def free(self) -> int:
        """Requests that can be added."""
        return self._max_rows - self.rows

    def add(
        self,
        request: Request,
        knobs: Callable[[], Knobs],
        observer: Observer | None = None,
        on_tokens: OnTokens | None = None,
    ) -> None:
        """Take in a request; its prompt is read in the next `step`.

        ``knobs()`` is asked once per round. ``on_tokens`` gets what each round emits, with its log-probabilities if
        they were asked for, before `step` returns. Raises
        ValueError for a request that cannot be served (as `Engine.generate`) or whose id is in the batch already, and
        RuntimeError when the batch is full.
        """
        if not self.free:
            raise RuntimeError(f"the batch has {self._max_rows} rows already")
        if self._find(request.request_id) is not None:
            raise ValueError(f"request {request.request_id!r} is in the batch already")
        self._waiting.append(_Seat(self._engine.start(request), knobs, observer, on_tokens))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One round of every row; returns what finished, whose rows are free again. Nothing happens without rows.

        The rows that are there have their round together; then each new one has its first round alone, in which it
        reads its prompt. Raises ModelError for knobs whose rule cannot be used here; rows stay as they were then, but
        one that was to have its first round is dropped.
        """
        done: list[Completion] = []
        if self._seats:
            self._play(0, done)
        while self._waiting:
            seat = self._waiting.pop(0)
            self._rows.join(seat.row)
            self._seats.append(seat)
            try:
                self._play(len(self._seats) - 1, done)
            except ModelError:
                self._leave(seat)
                raise
        return done

    @torch.inference_mode()
    def cancel(self, request_id: str) -> Completion | None:
        """End a request between rounds, with finish reason "cancelled" and what came out so far.

        None when it is not in the batch (any more), or when it has not had a round yet.
        """
        seat = self._find(request_id)
        if seat is None:
            return None
        if seat in self._waiting:
            self._waiting.remove(seat)
        else:
            self._leave(seat)
        if seat.row.knobs is None:
            return None
        seat.row.finish_reason = "cancelled"
        return seat.row.completion()

    def _play(self, first: int, done: list[Completion]) -> None:
        """A round of the rows from ``first`` on."""
        seats = self._seats[first:]
        self._rows.round(first, [seat.knobs() for seat in seats], [seat.observer for seat in seats])
        for seat in seats:
            if seat.row.finish_reason:
                self._leave(seat)
                done.append(seat.row.completion())
        for seat in seats:
            if seat.on_tokens is not None:
                new, logprobs = seat.row.news(seat.told)
                seat.told += len(new)
                if new:
                    seat.on_tokens(new, logprobs)

    def _leave(self, seat: _Seat) -> None:
        """Free the seat; the last one takes its place."""
        i = next(i for i, other in enumerate(self._seats) if other is seat)
        self._rows.leave(i)
        last = self._seats.pop()
        if i < len(self._seats):
            self._seats[i] = last

    def _find(self, request_id: str) -> _Seat | None:
        seats = (*self._seats, *self._waiting)
        return next((seat for seat in seats if seat.row.request.request_id == request_id), None)
