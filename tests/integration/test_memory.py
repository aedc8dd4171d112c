"""The worker's memory over a thousand requests through the serving loop, on the bundled pair."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

from decoder.batch import Batch
from decoder.forks import ForkRun
from decoder.generate import Request
from decoder.knobs import LeaseReader, Terms
from decoder.lane import Lane
from decoder.sampling import SamplingParams
from decoder.serving import Job, Serving
from decoder.spans import SpanTracker
from decoder.strategies import Models, fork_steps
from decoder.telemetry import TelemetrySender
from decoder.text import Text
from decoder.worker import Reporter, Scoring, WorkerMetrics
from storage.records import KnobRow, Lease, Record
from tests.decoding import engine, pair, prompts
from tests.support_serving import Listener

REQUESTS, WARM_UP, AT_ONCE = 1000, 200, 16
LEASE = Lease(
    pool="p", traffic_class="default", epoch=1, seq=1, policy_revision=1, issued=0.0, ttl=3600.0, rule="token_v3",
    table=(KnobRow(8, 2, 0.8, 1.0),), holdback=0.3, fork=0.1, label=0.2,
)  # fmt: skip
PAGE = os.sysconf("SC_PAGE_SIZE")


class Store:
    def read(self, pool: str, traffic_class: str) -> tuple[Lease, float]:
        return LEASE, 3600.0


class Nowhere:
    def append(self, records: Sequence[Record]) -> int:
        return len(records)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_peak_memory_over_a_thousand_requests_is_flat_within_5_percent():
    sender = TelemetrySender(Nowhere(), "p", "w", "b", start=False)
    reader = LeaseReader(Store(), "p")
    reader.poll_once()
    reporter = Reporter(sender, WorkerMetrics(sender, reader), pool="p", worker="w", boot="b")
    models = Models.of(engine())
    serving = Serving(
        Batch(engine(), 8), Lane(models), lambda c: ForkRun(fork_steps(models, c)), reader, reporter, sender,
        queue_size=AT_ONCE,
    )  # fmt: skip
    text, scoring = Text(pair().tokenizer), Scoring("m", "s", "1", lambda ids: 0.5)
    asked = prompts(20)

    def job(i: int) -> Job:
        stop = ("####",) if i % 3 == 0 else ()
        params = SamplingParams(max_tokens=4 + i % 12, seed=i, stop=stop, logprobs=1 if i % 5 == 0 else None)
        prompt = list(asked[i % len(asked)][:12])
        request = Request(f"r{i}", prompt, params, spans=SpanTracker(text.piece), detokenize=text.decode)
        return Job(request, Terms(), Listener(), scoring, streaming=i % 2 == 0)

    peaks, objects, given = {}, {}, 0
    for until in (WARM_UP, REQUESTS):
        peaks[until] = 0
        while given < until:
            serving.submit([job(i) for i in range(given, given + AT_ONCE // 2)])
            given += AT_ONCE // 2
            while serving.turn():
                peaks[until] = max(peaks[until], resident())
            sender.flush_once()
        gc.collect()
        objects[until] = len(gc.get_objects())
    served = sum(m.value for f in reporter.metrics.requests.collect() for m in f.samples if m.name.endswith("_total"))
    assert served == given == REQUESTS
    assert peaks[REQUESTS] <= 1.05 * peaks[WARM_UP]
    # Eight hundred requests that each left something behind would show here long before.
    assert objects[REQUESTS] <= objects[WARM_UP] + 400
