"""A fork that is generated a step at a time, so that it can wait whenever there is something better to do."""

from __future__ import annotations

from dataclasses import replace

from decoder.request import ForkResult
from decoder.steps import Run, Steps


class ForkRun:
    """The branch of a touched request that was not served, in the steps of `Engine.fork_steps` or of a strategy."""

    def __init__(self, steps: Steps[ForkResult]):
        self._run = Run(steps)

    def step(self) -> ForkResult | None:
        """One step; the result when the branch has ended. Its seconds are those of the steps.

        The first raises ValueError for a request that was never touched.
        """
        result = self._run.step()
        return None if result is None else replace(result, total_s=self._run.busy_s)
