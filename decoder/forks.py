"""A fork that is generated a round at a time, so that it can wait whenever there is something better to do."""

from __future__ import annotations

import time

import torch

from decoder.generate import Completion, Engine, ForkResult, Rows


class ForkRun:
    """The branch of a touched request that was not served; the same branch that `Engine.fork` generates at once.

    Raises ValueError for a request that was never touched.
    """

    @torch.inference_mode()
    def __init__(self, engine: Engine, completion: Completion):
        point = completion.fork_point
        if point is None:
            raise ValueError(f"request {completion.request.request_id} was never touched: there is nothing to fork")
        self._completion, self._point = completion, point
        self._rows, self._row = Rows(engine, 1), engine.start(completion.request)
        self._row.arm, self._row.touches = point.arm, point.touches
        self._row.emit(point.token_ids)
        self._rows.join(self._row)
        self._busy_s = 0.0

    @torch.inference_mode()
    def step(self) -> ForkResult | None:
        """One round; the result when the branch has ended."""
        row, began = self._row, time.perf_counter()
        if not row.finish_reason:
            self._rows.round(0, [self._point.knobs], [None])
        self._busy_s += time.perf_counter() - began
        if not row.finish_reason:
            return None
        return ForkResult(
            token_ids=row.output,
            touches=row.touches if self._point.arm == "lenient" else self._completion.touches,
            target_passes=row.target_passes,
            total_s=self._busy_s,
            finish_reason=row.finish_reason,
        )
