"""The cost plant: seconds of a round by width and rows, and how a pool's rows follow from its load.

A target pass over ``rows * width`` tokens takes ``target * sqrt(1 + (rows * width / saturates)^2)``: nearly free while
the pass waits for memory, in proportion to the tokens once arithmetic is the limit. A draft step is the same with its
own limits. With measurement noise, and pauses of seconds that hit a round now and then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from controller.simulation.document import Costs, WorkerSpec
from controller.simulation.source import F, Ints


@dataclass(frozen=True)
class Machine:
    """A worker's speed at one time."""

    target_s: float
    draft_s: float
    overhead_s: float
    saturates: float
    draft_saturates: float

    @classmethod
    def at(cls, costs: Costs, worker: WorkerSpec, t: float) -> Machine:
        """The machine of ``worker`` at ``t`` seconds."""
        slow = worker.slowness.at(t)
        return cls(
            costs.target.at(t) * slow,
            costs.draft.at(t) * slow,
            costs.overhead.at(t) * slow,
            costs.saturates.at(t),
            costs.draft_saturates.at(t),
        )

    def draft(self, width: Ints, rows: int) -> F:
        """Seconds to draft ``width`` tokens in each of ``rows`` rows."""
        step = self.draft_s * math.sqrt(1 + (rows / self.draft_saturates) ** 2)
        return width.astype(np.float64) * step

    def verify(self, width: Ints, rows: int) -> F:
        """Seconds of the target pass over blocks of ``width`` drafts (``width + 1`` tokens) in ``rows`` rows."""
        return np.asarray(self.target_s * np.sqrt(1 + (rows * (width + 1.0) / self.saturates) ** 2))

    def round(self, width: Ints, rows: int) -> F:
        """Seconds of whole rounds."""
        return self.draft(width, rows) + self.verify(width, rows) + self.overhead_s

    def plain(self, rows: int) -> float:
        """Seconds per token of plain decoding."""
        return float(self.round(np.zeros(1, dtype=np.int64), rows)[0])
