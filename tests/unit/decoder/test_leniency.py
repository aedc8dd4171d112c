"""Where in a request and in a block leniency holds: structured spans, and the depth of a lease."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder.batch import Batch
from decoder.generate import Knobs, Request, SamplingParams
from storage.records import PINNED, TOUCH
from tests.decoding import Rounds, engine, prompts, run


class EveryThird:
    """Allows leniency at two of three output positions."""

    def lenient_mask(self, output_ids: Any, block: Any) -> list[bool]:
        return [(len(output_ids) + j) % 3 > 0 for j in range(len(block))]


def test_structured_spans_pin_single_positions() -> None:
    everything, touches = Knobs(g=5, rule="threshold", theta=1.0), 0
    for seed, prompt in enumerate(prompts(3)):
        rounds = Rounds()
        request = Request("r", prompt, SamplingParams(seed=seed, max_tokens=60), spans=EveryThird())
        done = engine().generate(request, lambda: everything, rounds)
        at = 0
        for t in rounds:
            pinned = (at + np.arange(t.width)) % 3 == 0
            assert np.array_equal((t.flags & PINNED) > 0, pinned)
            assert np.array_equal(t.theta == 0, pinned) and not (t.flags[pinned] & TOUCH).any()
            at += t.emitted
        touches += done.touches
        lossless = Rounds()
        engine().generate(request, lambda: Knobs.lossless(5), lossless)
        assert any((t.flags & PINNED).any() for t in lossless)  # said whatever the lease says
    assert touches


def test_a_lease_may_open_structured_spans_too() -> None:
    everything = Knobs(g=5, rule="threshold", theta=1.0, structured=True)
    for changes in ({"spans": EveryThird()}, {"structured": True}):
        rounds = Rounds()
        request = Request("r", prompts(1)[0], SamplingParams(max_tokens=40), **changes)
        done = engine().generate(request, lambda: everything, rounds)
        free = run(engine(), prompts(1)[0], everything, max_tokens=40)
        assert done.token_ids == free.token_ids and done.touches == free.touches > 0
        assert all((t.theta == 1).all() and not (t.flags & PINNED).any() for t in rounds)
        closed = Rounds()
        kept = engine().generate(request, lambda: replace(everything, structured=False), closed)
        assert any((t.flags & PINNED).any() for t in closed)
        assert "structured" not in changes or (kept.touches == 0 and all((t.flags & PINNED).all() for t in closed))


@pytest.mark.parametrize("depth", [0.5, 2.0, 2.5])
def test_beyond_the_depth_of_a_block_nothing_is_lenient_and_telemetry_says_so(depth: float) -> None:
    """In the fractional position the weight is a share: at depth .5 some requests go untouched that rho = 1 touches."""
    knobs, reached = Knobs(g=5, rule="threshold", theta=1.0, depth=depth), math.ceil(depth)
    touches, places = [], set()
    for seed, prompt in enumerate(prompts(3)):
        rounds = Rounds()
        touches.append(run(engine(), prompt, knobs, rounds, seed=seed, max_tokens=40).touches)
        for t in rounds:
            assert np.all(t.theta[:reached] == 1) and not t.theta[reached:].any()
            assert not (t.flags[reached:] & TOUCH).any()
            places |= set(np.flatnonzero(t.flags & TOUCH).tolist())
        batch, alone = Batch(engine(), 2), run(engine(), prompt, knobs, seed=seed, max_tokens=12)
        for i, k in enumerate((knobs, replace(knobs, depth=5.0))):
            batch.add(Request(str(i), prompt, SamplingParams(seed=seed, max_tokens=12)), lambda k=k: k)
        found = {}
        while batch.rows:
            found |= {c.request.request_id: c.token_ids for c in batch.step()}
        assert found["0"] == alone.token_ids  # each row has its own depth
        if depth == 2.0:
            held = run(engine(), prompt, replace(knobs, holdback=1.0), seed=seed, max_tokens=40)
            lenient = run(engine(), prompt, knobs, seed=seed, max_tokens=40)
            assert engine().fork(held).token_ids == lenient.token_ids and held.arm == "holdback"
    assert sum(touches) > 3 and places == set(range(reached))
