"""From the lease to the stream: blocks carry every column for every drafted position, and the knob that held there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from decoder.batch import Batch
from decoder.knobs import LeaseReader, Terms
from decoder.request import Request
from decoder.sampling import SamplingParams
from decoder.telemetry import TelemetrySender
from policies.rules import Scalars, accept_prob, get_rule
from storage.records import ACCEPTED, EXAMINED, PINNED, TOUCH, CapRow, KnobRow, Lease, TokenBlock
from tests.decoding import engine, prompts
from tests.support_serving import Leases, Stream

G, DEPTH, THETA, CAP = 5, 3.0, 0.9, 0.4
LEASE = Lease(
    pool="p", traffic_class="default", epoch=1, seq=1, policy_revision=1, issued=0.0, ttl=60.0, rule="threshold",
    table=(KnobRow(8, G, THETA, 1.0, DEPTH),), caps=(CapRow(0.5, CAP, 1.0, 2.0),),
)  # fmt: skip


class EveryOther:
    """Structured at every second output position."""

    def lenient_mask(self, output_ids: list[int], block: list[int]) -> list[bool]:
        return [(len(output_ids) + j) % 2 > 0 for j in range(len(block))]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def decoded(
    asked: dict[str, tuple[Terms, dict[str, Any]]], lease: Lease, ends_after: int = 1 << 30
) -> dict[str, list[Any]]:
    """Rows of (position in its block, theta, flags, scalars) by request; the lease has ended after so many rounds."""
    stream, clock, order = Stream(), Clock(), list(asked)
    sender = TelemetrySender(stream, "p", "w", "b", start=False)
    reader = LeaseReader(Leases(lease), "p", clock=clock)
    reader.poll_once()
    found: dict[str, list[Any]] = {}
    for name in order:  # one after another, so that the rows of a block are known
        terms, options = asked[name]
        batch, rounds = Batch(engine(), 1), 0
        request = Request(name, prompts(1)[0], SamplingParams(seed=3, max_tokens=40), **options)
        batch.add(request, lambda terms=terms: reader.knobs("default", 1, terms), sender)
        done = []
        while batch.rows:
            clock.now = 61.0 if rounds >= ends_after else 0.0
            done, rounds = batch.step(), rounds + 1
        sender.flush_once()
        blocks = [entry for entry in stream.entries if isinstance(entry, TokenBlock)]
        stream.entries.clear()
        found[name] = []
        for b in blocks:
            assert {len(getattr(b, column)) for column in TokenBlock.POSITION_COLUMNS} == {len(b.theta)}
            for j in range(len(b.theta)):
                scalars = Scalars(**{column: getattr(b, column)[j] for column in Scalars._fields})
                found[name].append((int(b.position[j]), float(b.theta[j]), int(b.flags[j]), scalars, b.lease_seq))
        assert len(found[name]) == done[0].drafted
        assert sum(int(b.round_emitted.sum()) for b in blocks) == len(done[0].token_ids)
        assert sum(bool(flags & TOUCH) for _, _, flags, _, _ in found[name]) == done[0].touches
    return found


def test_the_knob_in_a_block_is_the_one_that_held_at_each_position() -> None:
    found = decoded(
        {
            "lease": (Terms(), {}),
            "half": (Terms(share=0.5), {}),
            "too little": (Terms(share=0.2), {}),
            "another rule": (Terms(rule="token_v3"), {}),
            "pinned": (Terms(), {"pinned": True}),
            "json": (Terms(), {"structured": True}),
        },
        LEASE,
    )
    held = {"lease": (THETA, DEPTH), "half": (CAP, 2.0)}
    for name, rows in found.items():
        theta, depth = held.get(name, (0.0, 0.0))
        assert rows and {position for position, *_ in rows} == set(range(1, G + 1))
        for position, knob, flags, scalars, _ in rows:
            assert knob == np.float32(theta if position <= depth else 0.0), (name, position)
            assert bool(flags & PINNED) == (name in ("pinned", "json"))
            assert flags & EXAMINED or not flags & (ACCEPTED | TOUCH)
            if flags & TOUCH:
                rule = get_rule("threshold")
                assert accept_prob(rule, scalars, knob) > accept_prob(rule, scalars, 0.0)
    assert any(flags & TOUCH for _, _, flags, _, _ in found["lease"])


def test_spans_holdback_and_the_end_of_the_lease_show_in_the_blocks() -> None:
    everywhere = replace(LEASE, table=(KnobRow(8, G, THETA, 1.0),))
    spans = decoded({"r": (Terms(), {"spans": EveryOther()})}, everywhere)["r"]
    assert all((knob == 0) == bool(flags & PINNED) for _, knob, flags, _, _ in spans)
    assert 0 < sum(bool(flags & PINNED) for _, _, flags, _, _ in spans) < len(spans)
    opened = decoded({"r": (Terms(), {"spans": EveryOther()})}, replace(everywhere, structured="lenient"))["r"]
    assert all(knob == np.float32(THETA) and not flags & PINNED for _, knob, flags, _, _ in opened)

    rows = decoded({"r": (Terms(), {})}, replace(everywhere, holdback=1.0))["r"]
    touch = next(i for i, (_, _, flags, _, _) in enumerate(rows) if flags & TOUCH)
    assert not rows[touch][2] & ACCEPTED and all(knob == np.float32(THETA) for _, knob, *_ in rows[: touch + 1])
    assert all(knob == 0 and not flags & TOUCH for _, knob, flags, _, _ in rows[touch + 1 :])

    rows = decoded({"r": (Terms(), {})}, everywhere, ends_after=2)["r"]
    seqs = [seq for *_, seq in rows]
    assert seqs[:1] == [1] and seqs[-1] == 0 and seqs == sorted(seqs, reverse=True)
    assert all((knob == 0) == (seq == 0) for _, knob, _, _, seq in rows)
