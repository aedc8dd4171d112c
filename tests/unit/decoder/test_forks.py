"""A fork generated a round at a time is the fork."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoder.forks import ForkRun
from decoder.generate import Knobs
from tests.decoding import engine, prompts, run

LENIENT = Knobs(g=4, rule="threshold", theta=0.9, holdback=0.5, fork=1.0)


def test_a_fork_in_rounds_is_the_fork_at_once():
    arms = set()
    for seed, prompt in enumerate(prompts(8)):
        served = run(engine(), prompt, LENIENT, max_tokens=40, seed=seed)
        if served.fork_point is None:
            continue
        arms.add(served.arm)
        branch, result, rounds = ForkRun(engine().fork_steps(served)), None, 0
        while result is None:
            result, rounds = branch.step(), rounds + 1
        whole = engine().fork(served)
        assert replace(result, total_s=0.0) == replace(whole, total_s=0.0)
        assert rounds == max(1, result.target_passes) and result.total_s > 0
    assert arms == {"lenient", "holdback"}


def test_a_request_that_was_never_touched_has_no_fork():
    with pytest.raises(ValueError, match="never touched"):
        ForkRun(engine().fork_steps(run(engine(), prompts(1)[0], Knobs.lossless(4), max_tokens=3))).step()
