"""Traces of the loop: a span a tick with its phases inside, nothing at all unless asked for."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from controller.loop import PoolLoop
from controller.tracing import open_traces, traced

PHASES = {
    "tick": "tick",
    "policy": "_poll_policy",
    "ingest": "_ingest",
    "decide": "_decide",
    "save": "_save",
    "lease": "_lease",
    "show": "_show",
}


class Loop:
    """Two phases, the second of which may fail."""

    pool = "chat"

    def __init__(self) -> None:
        self.fails = False

    @traced("tick")
    def tick(self, now: float) -> float:
        self.first()
        return self.second(now)

    @traced("first")
    def first(self) -> None:
        return None

    @traced("second")
    def second(self, now: float) -> float:
        if self.fails:
            raise RuntimeError("no")
        return now


def test_a_tick_is_a_span_with_its_phases_inside() -> None:
    """In their order, of one trace, with the pool; the method's result comes through."""
    spans = InMemorySpanExporter()
    with open_traces(None, exporter=spans):
        assert Loop().tick(7.0) == 7.0
    first, second, tick = spans.get_finished_spans()
    assert [s.name for s in (first, second, tick)] == ["first", "second", "tick"]
    assert tick.parent is None
    for span in (first, second):
        assert span.parent is not None
        assert span.parent.span_id == tick.context.span_id
    assert {s.attributes["lenity.pool"] for s in (first, second, tick) if s.attributes} == {"chat"}
    assert tick.resource.attributes["service.name"] == "lenity-controller"


def test_an_error_is_recorded_and_still_raised() -> None:
    """In the phase and in the tick."""
    spans, loop = InMemorySpanExporter(), Loop()
    loop.fails = True
    with open_traces(None, exporter=spans), pytest.raises(RuntimeError):
        loop.tick(1.0)
    status = {s.name: s.status.status_code for s in spans.get_finished_spans()}
    assert status == {"first": StatusCode.UNSET, "second": StatusCode.ERROR, "tick": StatusCode.ERROR}


def test_nothing_is_traced_unless_asked_for_and_after_the_end() -> None:
    """No endpoint, no spans."""
    spans = InMemorySpanExporter()
    with open_traces(None):
        Loop().tick(1.0)
    with open_traces(None, exporter=spans):
        pass
    Loop().tick(2.0)
    assert spans.get_finished_spans() == ()


def test_the_phases_of_the_loop_are_traced() -> None:
    """By name."""
    assert all(hasattr(getattr(PoolLoop, method), "__wrapped__") for method in PHASES.values())
