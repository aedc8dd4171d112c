"""The serving loop: a bounded queue of requests in front of a batch that one thread decodes.

`Serving.submit`, `Serving.cancel` and `Serving.drain` may be called from any thread; `Serving.turn` is one step of the
decoding thread: cancel what was given up, admit what waits, decode one round of every row, report what finished. A
request gets its strategy when it arrives here; strategies that decode one request at a time have a lane beside the
batch (`decoder.lane`), one step of which follows every round. Forks that were drawn run, a step at a time, when nothing
else is there to do, or in a free row once half of their time has gone; one whose deadline has passed, or that is left
when the worker stops, is reported as never run.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decoder.batch import Batch, OnTokens
from decoder.branches import BranchStore
from decoder.knobs import LeaseReader, Terms
from decoder.lane import Lane
from decoder.request import Completion, ForkResult, Knobs, Observer, Request, TokenLogprob
from decoder.strategies import BATCHED, get_strategy
from decoder.strategies.base import lossless, may_be_lenient
from decoder.worker import MAX_FAILURES_IN_A_ROW, Reporter, Scoring

log = structlog.get_logger(__name__)

MAX_FORKS = 256  # forks that wait; the oldest is given up for a newer one

ROUND_S = 30.0  # no round lasts longer


class Busy(Exception):
    """The queue is full; try again after ``retry_after`` seconds."""

    def __init__(self, retry_after: int):
        super().__init__(f"the worker is busy; try again in {retry_after} s")
        self.retry_after = retry_after


class Draining(Exception):
    """The worker is stopping and takes nothing new."""


class Listener(Protocol):
    """Who waits for a request. Called from the decoding thread: must neither block nor raise."""

    def tokens(self, ids: list[int], logprobs: list[TokenLogprob], /) -> None:
        """What a round emitted, and its log-probabilities if they were asked for."""
        ...

    def finished(self, completion: Completion, /) -> None:
        """The request is done: completed, or cancelled for want of time."""
        ...

    def failed(self, error: Exception, /) -> None:
        """It could not be served: ValueError if the request is at fault, Draining if the time was too short."""
        ...


class Branch(Protocol):
    """A fork at work, as `decoder.forks.ForkRun`."""

    def step(self) -> ForkResult | None:
        """One round; the result when the branch has ended."""
        ...


@dataclass(frozen=True)
class Job:
    """One request with its caller's terms, and what it gets of them once it was taken.

    ``streaming`` asks for tokens as they come.
    """

    request: Request
    terms: Terms
    listener: Listener
    scoring: Scoring | None = None
    streaming: bool = False
    arrived: float = field(default_factory=time.monotonic)

    @property
    def strategy(self) -> str:
        """How it is decoded; known once it was taken."""
        return self.terms.strategy or "speculative"


@dataclass(eq=False)
class _Place:
    """Where requests decode, and those that wait for it."""

    decoder: Batch | Lane
    add: Callable[[Job, Callable[[], Knobs], OnTokens | None], None]
    waiting: deque[Job] = field(default_factory=deque)
    failures: int = 0  # in a row


@dataclass
class _Running:
    job: Job
    place: _Place
    started: float


@dataclass
class _Fork:
    completion: Completion
    scoring: Scoring | None
    deadline: float
    urgent: float  # from when on it does not wait for a worker without requests
    branch: Branch | None = None  # begun


class ServingMetrics:
    """Prometheus metrics of the queue in front of the batch."""

    def __init__(self, registry: CollectorRegistry):
        self.queued = Gauge("lenity_worker_queued_requests", "Requests that wait for a row", registry=registry)
        self.running = Gauge("lenity_worker_running_requests", "Requests in the batch", registry=registry)
        self.refused = Counter(
            "lenity_worker_refused_requests", "Requests refused before decoding", ["reason"], registry=registry
        )
        self.cancelled = Counter("lenity_worker_cancelled_requests", "Requests given up by callers", registry=registry)
        self.wait = Histogram("lenity_worker_queue_seconds", "Time from arrival to the batch", registry=registry)
        self.first = Histogram(
            "lenity_worker_first_token_seconds", "Time from the batch to the first token", registry=registry
        )
        self.total = Histogram("lenity_worker_request_seconds", "Time from the batch to the end", registry=registry)


class Serving:
    """Requests that wait, the batch with the lane beside it, and the forks. ``capacity`` is rows and queue together.

    ``branches`` keeps both texts of forked requests for a judge; without one forks are run only where they are scored.
    """

    def __init__(
        self,
        batch: Batch,
        lane: Lane,
        begin_fork: Callable[[Completion], Branch],
        reader: LeaseReader,
        reporter: Reporter,
        observer: Observer | None = None,
        *,
        queue_size: int = 64,
        branches: BranchStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if queue_size < 0:
            raise ValueError(f"queue_size must be at least 0, not {queue_size!r}")
        self._batch = _Place(batch, lambda job, knobs, listen: batch.add(job.request, knobs, observer, listen))
        self._lane = _Place(
            lane, lambda job, knobs, listen: lane.add(job.request, knobs, observer, listen, job.strategy)
        )
        self._begin_fork = begin_fork
        self._reader, self._report = reader, reporter
        self._branches, self._clock = branches, clock
        self.rows = batch.rows + batch.free
        self.capacity = self.rows + queue_size
        self.metrics = ServingMetrics(reporter.metrics.registry)
        self._wake = threading.Condition(threading.Lock())
        self._arrived: deque[Job] = deque()
        self._given_up: set[str] = set()
        self._taken = 0  # requests that wait or run
        self._draining = self._stop_now = self._ended = False
        self._running: dict[str, _Running] = {}  # only the decoding thread touches these two
        self._forks: deque[_Fork] = deque()
        self._mean_s = 0.5

    # Any thread.

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of ``jobs`` or none; raises Busy, Draining, or ValueError for more than ever fit."""
        if len(jobs) > self.capacity:
            raise ValueError(f"{len(jobs)} outputs were asked for; this worker takes at most {self.capacity} at once")
        with self._wake:
            if self._draining:
                self.metrics.refused.labels("draining").inc(len(jobs))
                raise Draining("the worker is stopping")
            if self._taken + len(jobs) > self.capacity:
                self.metrics.refused.labels("busy").inc(len(jobs))
                ahead = self._taken + len(jobs) - self.capacity
                raise Busy(max(1, math.ceil(ahead / self.rows * self._mean_s)))
            self._taken += len(jobs)
            self._arrived.extend(jobs)
            self.metrics.queued.inc(len(jobs))
            self._wake.notify_all()

    def cancel(self, request_ids: Sequence[str]) -> None:
        """The callers of these requests are gone: drop them. Unknown and finished ones are ignored."""
        with self._wake:
            self._given_up.update(request_ids)
            self._wake.notify_all()

    def drain(self, grace_s: float) -> bool:
        """Take nothing new, finish what was taken within ``grace_s``, give up the rest; True if nothing was given up.

        Returns when the decoding thread has ended `run`, or hangs in a round for ``ROUND_S``.
        """
        with self._wake:
            self._draining = True
            self._wake.notify_all()
            in_time = self._wake.wait_for(lambda: self._taken == 0 or self._ended, timeout=grace_s)
            self._stop_now = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._ended, timeout=ROUND_S)
        return in_time

    # The decoding thread.

    def run(self) -> None:
        """Decode until drained. Ends with the last error after `MAX_FAILURES_IN_A_ROW` failed rounds in a row."""
        try:
            while not self._stop_now:
                if self.turn():
                    continue
                with self._wake:
                    self._wake.wait_for(lambda: self._arrived or self._given_up or self._stop_now, timeout=1.0)
        finally:
            try:
                self._end_all()
            finally:
                with self._wake:
                    self._draining = self._ended = True
                    self._wake.notify_all()

    def turn(self) -> bool:
        """One step; False when there was nothing to do."""
        with self._wake:
            given_up, self._given_up = self._given_up, set()
            arrived, self._arrived = self._arrived, deque()
        for job in arrived:
            self._route(job)
        for name in given_up:
            self._cancel(name)
        places = [self._batch, self._lane]
        for place in places:
            self._admit(place)
        for place in (busy := [place for place in places if place.decoder.rows]):
            self._round(place)
        if busy and not self._urgent():
            return True
        return self._fork() or bool(busy)

    def _route(self, job: Job) -> None:
        """Settle the strategy of a request, and send it to the batch or, where that takes one at a time, to the lane.

        One that its strategy would decode by lossless rounds from the start has them in the batch.
        """
        request = job.request
        terms = self._reader.admit(request.traffic_class, job.terms, request.params.seed)
        place = self._batch
        if terms.strategy is not None and terms.strategy not in BATCHED:
            knobs = self._reader.knobs(request.traffic_class, 1, terms)
            if may_be_lenient(request, knobs, get_strategy(terms.strategy).rules):
                place = self._lane
        place.waiting.append(replace(job, terms=terms))

    def _admit(self, place: _Place) -> None:
        while place.decoder.free and place.waiting:
            job = place.waiting.popleft()
            self.metrics.queued.dec()
            listen = job.listener.tokens if job.streaming else None
            try:
                place.add(job, self._knobs(job, place), listen)
            except ValueError as e:
                self.metrics.refused.labels("invalid").inc()
                self._leave(job, e)
                continue
            self._running[job.request.request_id] = _Running(job, place, self._report.wall())
            self.metrics.running.set(len(self._running))
            self.metrics.wait.observe(max(0.0, time.monotonic() - job.arrived))

    def _knobs(self, job: Job, place: _Place) -> Callable[[], Knobs]:
        name, terms, decoder, reader = job.request.traffic_class, job.terms, place.decoder, self._reader
        if place is self._batch and job.strategy not in BATCHED:
            return lambda: lossless(reader.knobs(name, decoder.rows, terms))
        return lambda: reader.knobs(name, decoder.rows, terms)

    def _round(self, place: _Place) -> None:
        """One round of the batch, or one step in the lane."""
        try:
            done = place.decoder.step()
        except Exception as e:
            place.failures += 1
            log.exception("serving: a round failed; its requests are lost", rows=place.decoder.rows)
            for name in [name for name, running in self._running.items() if running.place is place]:
                place.decoder.cancel(name)
                job = self._running.pop(name).job
                self._report.metrics.failed.labels(job.request.traffic_class).inc()
                self._leave(job, e)
            if place.failures >= MAX_FAILURES_IN_A_ROW:
                raise
            return
        place.failures = 0
        for completion in done:
            running = self._running.pop(completion.request.request_id)
            self.metrics.first.observe(completion.first_token_s)
            self.metrics.total.observe(completion.total_s)
            self._mean_s += 0.05 * (completion.total_s - self._mean_s)
            self._finish(running, completion)

    def _cancel(self, name: str) -> None:
        for place in (self._batch, self._lane):
            for job in [job for job in place.waiting if job.request.request_id == name]:
                place.waiting.remove(job)
                self.metrics.queued.dec()
                self.metrics.cancelled.inc()
                self._leave(job)
        running = self._running.pop(name, None)
        if running is None:
            return
        self.metrics.cancelled.inc()
        completion = running.place.decoder.cancel(name)
        if completion is None:
            self._leave(running.job)
        else:
            self._finish(running, completion)

    def _finish(self, running: _Running, completion: Completion) -> None:
        """Report a completion, and remember its fork; a cancelled one has none, which takes the worst case."""
        job = running.job
        self._report.served(completion, running.started, job.strategy)
        scoring = job.scoring
        wanted = (scoring is not None or self._branches is not None) and completion.finish_reason != "cancelled"
        if completion.fork_drawn and not wanted:
            self._report.forked(completion, None)
        elif completion.fork_drawn:
            if len(self._forks) >= MAX_FORKS:
                self._report.forked(self._forks.popleft().completion, None)
            deadline, now = self._deadline(completion), self._clock()
            self._forks.append(_Fork(completion, scoring, deadline, urgent=now + (deadline - now) / 2))
        elif scoring is not None and (completion.label_drawn or scoring.always):
            self._report.scored(completion, scoring, "served", completion.token_ids)
        self._leave(job, completion=completion)

    def _deadline(self, completion: Completion) -> float:
        """When its fork and labels are worth nothing any more, on our clock; the touch was on the clock of the wall."""
        since = self._report.wall() - (completion.first_touch_at or 0.0)
        return self._clock() - min(max(0.0, since), completion.total_s) + completion.knobs.label_deadline

    def _urgent(self) -> bool:
        """Whether the oldest fork has waited for half of its time and there is a free row: it runs beside requests."""
        return bool(self._forks and self._batch.decoder.free and self._clock() >= self._forks[0].urgent)

    def _fork(self) -> bool:
        """One step of the oldest fork; False if there is none."""
        if not self._forks:
            return False
        fork = self._forks[0]
        result = None
        if self._clock() < fork.deadline:
            try:
                fork.branch = fork.branch or self._begin_fork(fork.completion)
                result = fork.branch.step()
            except Exception:
                log.exception("serving: a fork failed", request_id=fork.completion.request.request_id)
            else:
                if result is None:
                    return True
        self._forks.popleft()
        self._report.forked(fork.completion, result)
        if result is not None and fork.scoring is not None:
            self._report.scored(fork.completion, fork.scoring, "served", fork.completion.token_ids)
            self._report.scored(fork.completion, fork.scoring, "fork", result.token_ids)
        if result is not None and self._branches is not None:
            self._branches.put(fork.completion, result, fork.deadline)
        return True

    def _leave(self, job: Job, error: Exception | None = None, completion: Completion | None = None) -> None:
        """A request is over: make room, then tell who waits for it."""
        with self._wake:
            self._taken -= 1
            self._wake.notify_all()
        self.metrics.running.set(len(self._running))
        try:
            if error is not None:
                job.listener.failed(error)
            elif completion is not None:
                job.listener.finished(completion)
        except Exception:
            log.exception("serving: a listener failed", request_id=job.request.request_id)

    def _end_all(self) -> None:
        """Give up what is left when the loop ends."""
        with self._wake:
            waiting = [*self._batch.waiting, *self._lane.waiting, *self._arrived]
            self._arrived.clear()
        self._batch.waiting.clear()
        self._lane.waiting.clear()
        self.metrics.queued.set(0)
        gone = Draining("the worker stopped before this request was finished")
        for job in waiting:
            self._leave(job, gone)
        for name, running in list(self._running.items()):
            completion = running.place.decoder.cancel(name)
            if completion is not None:
                self._report.served(completion, running.started, running.job.strategy)
                if completion.fork_drawn:
                    self._report.forked(completion, None)
            self._leave(running.job, gone)
        self._running.clear()
        while self._forks:
            self._report.forked(self._forks.popleft().completion, None)
