"""The worker: takes tasks from a source, decodes them, and reports what happened.

One thread decodes. For each task: generate under the knobs of the moment, send the `RequestRecord`; if a fork was
drawn, generate the branch that was not served, send the `ForkRecord`, and score both branches; otherwise score the
served one if a label was drawn or the task scores itself. A scorer sees tokens and the task, never the arm. A score
that could not be made is counted and not sent: it takes the worst case at the controller.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decoder.knobs import ANY, LEASED, LeaseReader
from decoder.request import Completion, ForkResult, Request
from decoder.sampling import SamplingParams
from decoder.strategies import Models, StrategyCompletion, decode, fork
from decoder.telemetry import TelemetrySender
from storage.records import Branch, ForkRecord, QualityScore, RequestRecord

log = structlog.get_logger(__name__)

MAX_FAILURES_IN_A_ROW = 5


@dataclass(frozen=True)
class Scoring:
    """How the output of one task is scored: ``score(token_ids)`` in [0, 1], under these names in the records.

    ``always`` scores the served branch of every request, touched or not.
    """

    metric: str
    scorer: str
    version: str
    score: Callable[[Sequence[int]], float]
    always: bool = False


@dataclass(frozen=True)
class Task:
    """One thing to decode. ``pinned`` forbids leniency for it whatever the lease says."""

    prompt_ids: list[int]
    params: SamplingParams
    traffic_class: str = "default"
    scoring: Scoring | None = None
    pinned: bool = False


class Source(Protocol):
    """Where tasks come from."""

    def next(self, stop: threading.Event) -> Task | None:
        """The next task; waits for one until ``stop`` is set. None means there will be no more."""
        ...


class WorkerMetrics(Collector):
    """Raw Prometheus counters of one worker; ratios are left to queries."""

    def __init__(self, sender: TelemetrySender, reader: LeaseReader, registry: CollectorRegistry | None = None):
        self.registry = registry or CollectorRegistry()
        self._sender, self._reader = sender, reader

        def counter(name: str, text: str, labels: Sequence[str] = ("class",)) -> Counter:
            return Counter(f"lenity_worker_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests served, by arm", ("class", "arm"))
        self.failed = counter("failed_requests", "Requests that ended in an error")
        self.tokens = counter("tokens", "Tokens served")
        self.passes = counter("target_passes", "Target passes of served branches")
        self.drafted = counter("drafted_tokens", "Draft tokens proposed")
        self.examined = counter("examined_tokens", "Draft tokens whose accept test was evaluated")
        self.accepted = counter("accepted_tokens", "Draft tokens accepted")
        self.touches = counter("touches", "Touches of served requests")
        self.seconds = counter("decode_seconds", "Seconds spent on served branches")
        self.fork_seconds = counter("fork_seconds", "Seconds spent on branches that were not served")
        self.fork_passes = counter("fork_target_passes", "Target passes of branches that were not served")
        self.forks = counter("forks", "Drawn forks, by whether they ran", ("class", "done"))
        self.scores = counter("scores", "Scores sent, by branch", ("class", "branch"))
        self.scores_failed = counter("scores_failed", "Scores that could not be made")
        self.registry.register(self)

    def served(self, c: Completion) -> None:
        """Count one served request."""
        name = c.request.traffic_class
        self.requests.labels(name, c.arm).inc()
        for metric, amount in (
            (self.tokens, len(c.token_ids)),
            (self.passes, c.target_passes),
            (self.drafted, c.drafted),
            (self.examined, c.examined),
            (self.accepted, c.accepted),
            (self.touches, c.touches),
            (self.seconds, c.total_s),
        ):
            metric.labels(name).inc(amount)

    def collect(self) -> Iterator[Metric]:
        """What the sender and the lease reader count themselves."""
        fallbacks = CounterMetricFamily(
            "lenity_worker_lossless_fallbacks", "Turns to lossless that no lease asked for", labels=["reason"]
        )
        for reason, count in self._reader.fallbacks.items():
            fallbacks.add_metric([reason], count)
        yield fallbacks
        info = GaugeMetricFamily("lenity_worker_info", "1, with the pool that the worker serves", labels=["pool"])
        info.add_metric([self._reader.pool], 1.0)
        yield info
        leased = GaugeMetricFamily("lenity_worker_leased", "1 while a lease is obeyed", labels=["class"])
        for name, state in self._reader.state.items():
            leased.add_metric([name], float(state == LEASED))
        yield leased
        dropped = CounterMetricFamily("lenity_worker_telemetry_dropped", "Telemetry dropped", labels=["what"])
        dropped.add_metric(["positions"], self._sender.dropped_positions)
        dropped.add_metric(["records"], self._sender.dropped_records)
        yield dropped
        sent = CounterMetricFamily("lenity_worker_telemetry_sent", "Telemetry entries sent", labels=["what"])
        sent.add_metric(["blocks"], self._sender.sent_blocks)
        sent.add_metric(["records"], self._sender.sent_records)
        yield sent
        yield CounterMetricFamily(
            "lenity_worker_telemetry_failed_appends",
            "Appends that the stream refused or did not answer",
            value=self._sender.failed_appends,
        )


class Reporter:
    """Says what happened to requests: records to the stream, counts to the metrics. ``wall()`` is Unix seconds."""

    def __init__(
        self,
        sender: TelemetrySender,
        metrics: WorkerMetrics,
        *,
        pool: str,
        worker: str,
        boot: str,
        wall: Callable[[], float] = time.time,
    ):
        self.sender, self.metrics = sender, metrics
        self._pool, self._worker, self._boot = pool, worker, boot
        self.wall = wall

    def served(self, c: Completion, started: float, strategy: str = "speculative") -> None:
        """Report a finished request that was begun at ``started``."""
        self.metrics.served(c)
        k = c.knobs
        self.sender.send(
            RequestRecord(
                request_id=c.request.request_id,
                pool=self._pool,
                traffic_class=c.request.traffic_class,
                worker=self._worker,
                boot=self._boot,
                epoch=k.epoch,
                lease_seq=k.lease_seq,
                rule=k.rule,
                theta=k.theta,
                rho=k.rho,
                arm=c.arm,
                holdback_prob=c.holdback_prob,
                fork_prob=c.fork_prob,
                label_prob=c.label_prob,
                fork_drawn=c.fork_drawn,
                label_drawn=c.label_drawn,
                touches=c.touches,
                first_touch_at=c.first_touch_at,
                started=started,
                prompt_tokens=len(c.request.prompt_ids),
                tokens=len(c.token_ids),
                target_passes=c.target_passes,
                first_token_s=c.first_token_s,
                total_s=c.total_s,
                finish_reason=c.finish_reason,
                strategy=strategy,
                confidence=c.confidence,
                draft_s=c.draft_s,
            )
        )

    def forked(self, c: Completion, result: ForkResult | None) -> None:
        """Report how the drawn fork of a request ended; None: it never ran."""
        name = c.request.traffic_class
        self.metrics.forks.labels(name, str(result is not None).lower()).inc()
        if result is not None:
            self.metrics.fork_seconds.labels(name).inc(result.total_s)
            self.metrics.fork_passes.labels(name).inc(result.target_passes)
        self.sender.send(
            ForkRecord(
                request_id=c.request.request_id,
                pool=self._pool,
                traffic_class=name,
                worker=self._worker,
                boot=self._boot,
                done=result is not None,
                touches=result.touches if result is not None else 0,
                tokens=len(result.token_ids) if result is not None else 0,
                target_passes=result.target_passes if result is not None else 0,
                total_s=result.total_s if result is not None else 0.0,
            )
        )

    def scored(self, c: Completion, scoring: Scoring, branch: Branch, token_ids: Sequence[int]) -> None:
        """Score one branch and report it; a score that cannot be made is counted and not sent."""
        name = c.request.traffic_class
        try:
            value = float(scoring.score(token_ids))
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise ValueError(f"scorer {scoring.scorer} gave {value}, expected a score in [0, 1]")
        except Exception:
            self.metrics.scores_failed.labels(name).inc()
            log.exception("worker: no score", request_id=c.request.request_id, branch=branch)
            return
        self.metrics.scores.labels(name, branch).inc()
        self.sender.send(
            QualityScore(
                request_id=c.request.request_id,
                pool=self._pool,
                traffic_class=name,
                branch=branch,
                metric=scoring.metric,
                score=value,
                scorer=scoring.scorer,
                scorer_version=scoring.version,
                time=self.wall(),
            )
        )


class Worker:
    """Decodes the tasks of ``source`` one after another until it is stopped or the source ends."""

    def __init__(
        self,
        models: Models,
        source: Source,
        sender: TelemetrySender,
        reader: LeaseReader,
        *,
        pool: str,
        worker: str,
        boot: str,
        max_requests: int | None = None,
        metrics: WorkerMetrics | None = None,
        stop: threading.Event | None = None,
        wall: Callable[[], float] = time.time,
    ):
        self._models, self._source, self._sender, self._reader = models, source, sender, reader
        self._worker, self._boot = worker, boot
        self._max_requests = max_requests
        self.metrics = metrics or WorkerMetrics(sender, reader)
        self._report = Reporter(sender, self.metrics, pool=pool, worker=worker, boot=boot, wall=wall)
        self._stop = stop or threading.Event()
        self._begun = 0
        self.served = 0

    def stop(self) -> None:
        """Finish the request in hand and return from `run`; safe in a signal handler and from other threads."""
        self._stop.set()

    def run(self) -> int:
        """Serve until stopped; returns the number of requests served. Does not close the sender or the reader.

        A request that fails is logged and counted; `MAX_FAILURES_IN_A_ROW` of them end the run with the last error.
        """
        in_a_row = 0
        while not self._stop.is_set() and (self._max_requests is None or self.served < self._max_requests):
            task = self._source.next(self._stop)
            if task is None:
                break
            try:
                self.serve(task)
                in_a_row = 0
            except Exception:
                in_a_row += 1
                self.metrics.failed.labels(task.traffic_class).inc()
                log.exception("worker: a request failed", traffic_class=task.traffic_class, in_a_row=in_a_row)
                if in_a_row >= MAX_FAILURES_IN_A_ROW:
                    raise
        return self.served

    def serve(self, task: Task) -> Completion:
        """Decode one task and report it."""
        self._begun += 1
        request = Request(
            request_id=f"{self._worker}.{self._boot}.{self._begun}",
            prompt_ids=task.prompt_ids,
            params=task.params,
            traffic_class=task.traffic_class,
            pinned=task.pinned,
        )
        name = task.traffic_class
        terms = self._reader.admit(name, ANY, task.params.seed)
        strategy = terms.strategy or "speculative"
        started = self._report.wall()
        completion = decode(self._models, request, lambda: self._reader.knobs(name, 1, terms), strategy, self._sender)
        self.served += 1
        self._report.served(completion, started, strategy)
        fork_ids = self._fork(completion) if completion.fork_drawn else None
        scoring = task.scoring
        if scoring is not None and (fork_ids is not None or completion.label_drawn or scoring.always):
            self._report.scored(completion, scoring, "served", completion.token_ids)
            if fork_ids is not None:
                self._report.scored(completion, scoring, "fork", fork_ids)
        return completion

    def _fork(self, c: StrategyCompletion) -> Sequence[int] | None:
        """Run the drawn fork, unless the worker is stopping; None when it did not run, which is said in the record."""
        result = None
        if not self._stop.is_set():
            try:
                result = fork(self._models, c)
            except Exception:
                log.exception("worker: a fork failed", request_id=c.request.request_id)
        self._report.forked(c, result)
        return None if result is None else result.token_ids
