"""Requests that decode together: rows join and leave between rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoder.generate import Engine, _Row
from decoder.request import Completion, Knobs, Observer, Request


@dataclass
class _Seat:
    """A row and who listens to it."""

    row: _Row
    knobs: Callable[[], Knobs]
    observer: Observer | None
    on_tokens: Callable[[list[int]], None] | None


class Batch:
    """Up to ``max_rows`` requests at work. Each gets the output that `Engine.generate` would give it alone.

    For one thread: nothing here is locked.
    """

    def __init__(self, engine: Engine, max_rows: int = 8):
        if max_rows < 1:
            raise ValueError(f"a batch has at least one row, not {max_rows!r}")
        self._engine = engine
        self._max_rows = max_rows
        self._seats: dict[str, _Seat] = {}

    @property
    def rows(self) -> int:
        """Requests at work."""
        return len(self._seats)

    @property
    def free(self) -> int:
        """Requests that can be added."""
        return self._max_rows - len(self._seats)

    @torch.inference_mode()
    def add(
        self,
        request: Request,
        knobs: Callable[[], Knobs],
        observer: Observer | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Take in a request; its prompt is read in the next `step`.

        ``knobs()`` is asked once per round. ``on_tokens`` gets what each round emits, before `step` returns. Raises
        ValueError for a request that cannot be served (as `Engine.generate`) or whose id is in the batch already, and
        RuntimeError when the batch is full.
        """
        if not self.free:
            raise RuntimeError(f"the batch has {self._max_rows} rows already")
        if request.request_id in self._seats:
            raise ValueError(f"request {request.request_id!r} is in the batch already")
        self._seats[request.request_id] = _Seat(self._engine._start(request), knobs, observer, on_tokens)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One round of every row; returns what finished, whose rows are free again. Nothing happens without rows."""
        done = []
        for name, seat in list(self._seats.items()):
            before = seat.row.emitted
            self._engine._round(seat.row, seat.knobs(), seat.observer)
            if seat.on_tokens is not None:
                seat.on_tokens(seat.row.output[before:])
            if seat.row.finish_reason:
                done.append(seat.row.completion())
                del self._seats[name]
        return done

    def cancel(self, request_id: str) -> Completion | None:
        """End a request between rounds, with finish reason "cancelled" and what came out so far.

        None when it is not in the batch (any more), or when it has not had a round yet.
        """
        seat = self._seats.pop(request_id, None)
        if seat is None or seat.row.knobs is None:
            return None
        seat.row.finish_reason = "cancelled"
        return seat.row.completion()
