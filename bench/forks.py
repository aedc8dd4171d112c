"""What forks cost requests in latency: ``python -m bench.forks [--quick] [--wall] --json`` (bundled pair, one core).

The real serving loop answers word problems that arrive at random (open loop), in blocks with forks off and on in turn:
the same requests, seeds and times of arrival in both, so the same texts are served. One thread turns the loop. Its
clock is CPU time (``--wall``: wall time), put forward to the next arrival when there is nothing to do, so that what
else the machine does falls on neither. Latencies count from the arrival. ``load`` is a share of what full batches
answer a second; ``busy`` the share of time in which a request was there.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
import torch
from rich.console import Console
from rich.progress import Progress

from decoder.batch import Batch
from decoder.demo.pair import EOS, Pair, load_pair, prompt_ids
from decoder.demo.problems import Problem, make_problem
from decoder.demo.tasks import score_exact
from decoder.drafters import ModelDrafter
from decoder.forks import ForkRun
from decoder.generate import Completion, Engine, Request, SamplingParams
from decoder.knobs import LeaseReader, Terms
from decoder.lane import Lane
from decoder.request import TokenLogprob
from decoder.serving import Job, Serving
from decoder.strategies import Models, fork_steps
from decoder.telemetry import TelemetrySender
from decoder.worker import Reporter, Scoring, WorkerMetrics
from storage.records import ForkRecord, KnobRow, Lease, Record, RequestRecord

POOL, CLASS = "bench", "default"
ROWS, G, RULE, THETA, SEED, MAX_TOKENS = 8, 4, "token_v3", 0.8, 662607, 160
LOADS = (0.2, 0.6)
GOAL = 1.05  # p99 with forks over p99 without

F = npt.NDArray[np.float64]


class Clock:
    """Seconds of ``tick`` plus what was skipped."""

    def __init__(self, tick: Callable[[], float]):
        self._tick, self._skipped = tick, 0.0

    def __call__(self) -> float:
        """Now."""
        return self._tick() + self._skipped

    def skip_to(self, then: float) -> None:
        """Nothing happens until ``then``."""
        self._skipped += max(0.0, then - self())


class Store:
    """One lease for the reader, and a stream that keeps the records."""

    def __init__(self, fork: float):
        self.records: list[Record] = []
        self._lease = Lease(
            pool=POOL, traffic_class=CLASS, epoch=1, seq=1, policy_revision=1, issued=0.0, ttl=1e6,
            rule=RULE, table=(KnobRow(ROWS, G, THETA, 1.0),), fork=fork,
        )  # fmt: skip

    def read(self, pool: str, traffic_class: str) -> tuple[Lease, float] | None:
        """The lease."""
        return self._lease, self._lease.ttl

    def append(self, records: Sequence[Record]) -> int:
        """Keep requests and forks."""
        self.records += [r for r in records if isinstance(r, RequestRecord | ForkRecord)]
        return len(records)


@dataclass
class Caller:
    """Who waits for a request: when it arrived, when its first token and its end came."""

    clock: Clock
    arrived: float
    first: float | None = None
    ended: float | None = None

    def tokens(self, ids: list[int], logprobs: list[TokenLogprob]) -> None:
        """The first ones are noted."""
        if self.first is None:
            self.first = self.clock()

    def finished(self, completion: Completion) -> None:
        """The answer is there."""
        self.ended = self.clock()

    def failed(self, error: Exception) -> None:
        """No request of this benchmark may fail."""
        raise error


class Task(NamedTuple):
    """One request of a block."""

    request: Request
    scoring: Scoring


@dataclass
class Seen:
    """What blocks of one kind showed: seconds from arrival, target passes and forks."""

    total: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    passes: int = 0
    fork_passes: int = 0
    drawn: int = 0
    ran: int = 0  # before the block's last request was answered
    dropped: int = 0  # reported as never run
    spent: float = 0.0  # seconds from the first arrival to the last answer
    busy: float = 0.0  # of them with a request there


class Worker:
    """The pair behind serving loops of its own, a new one for every block."""

    def __init__(self, pair: Pair, clock: Clock):
        self.engine = Engine(pair.target, ModelDrafter(pair.draft), eos_ids=[EOS])
        self.models, self.tokenizer, self.clock = Models.of(self.engine), pair.tokenizer, clock

    def tasks(self, n: int, seed: int) -> list[Task]:
        """Word problems and what scores their answers."""
        rng = random.Random(seed)
        return [self._task(f"{seed}-{i}", make_problem(rng, "easy"), seed * 10_000 + i) for i in range(n)]

    def _task(self, name: str, problem: Problem, seed: int) -> Task:
        def score(ids: Sequence[int]) -> float:
            return score_exact(self.tokenizer.decode([t for t in ids if t != EOS]), problem.answer)

        params = SamplingParams(seed=seed, max_tokens=MAX_TOKENS)
        request = Request(name, prompt_ids(self.tokenizer, problem.prompt), params)
        return Task(request, Scoring("exact", "exact", "1", score))

    def block(self, tasks: Sequence[Task], arrivals: Sequence[float], fork: float, seen: Seen) -> None:
        """Answer ``tasks``, which arrive so many seconds after the block's beginning; adds to ``seen``."""
        store, clock = Store(fork), self.clock
        reader = LeaseReader(store, POOL)
        reader.knobs(CLASS)
        reader.poll_once()
        sender = TelemetrySender(store, POOL, "w", "b", start=False)
        reporter = Reporter(sender, WorkerMetrics(sender, reader), pool=POOL, worker="w", boot="b")
        serving = Serving(
            Batch(self.engine, ROWS),
            Lane(self.models),
            lambda completion: ForkRun(fork_steps(self.models, completion)),
            reader,
            reporter,
            sender,
            queue_size=len(tasks),
            clock=clock,
        )
        gc.collect()
        began = clock()
        callers = [Caller(clock, began + after) for after in arrivals]
        coming = ended = 0
        while ended < len(tasks):
            now = clock()
            while coming < len(tasks) and callers[coming].arrived <= now:
                task = tasks[coming]
                serving.submit([Job(task.request, Terms(), callers[coming], task.scoring, streaming=True)])
                coming += 1
            worked = serving.turn()
            if ended < coming:
                seen.busy += clock() - now
                ended = sum(caller.ended is not None for caller in callers[:coming])
            elif not worked:
                clock.skip_to(callers[coming].arrived)
        seen.spent += clock() - began
        sender.flush_once()  # forks that wait now are left out: they are nobody's latency
        for record in store.records:
            if isinstance(record, RequestRecord):
                seen.passes += record.target_passes
                seen.drawn += record.fork_drawn
            elif isinstance(record, ForkRecord):
                seen.fork_passes += record.target_passes
                seen.ran += record.done
                seen.dropped += not record.done
        seen.total += [caller.ended - caller.arrived for caller in callers if caller.ended is not None]
        seen.first += [caller.first - caller.arrived for caller in callers if caller.first is not None]


def compare(off: Sequence[float], on: Sequence[float]) -> dict[str, Any]:
    """Median and 99th percentile in milliseconds of both, and the ratio with its 95 % interval.

    The interval is by resampling requests, which are the same in both.
    """
    a, b = np.asarray(off), np.asarray(on)
    picks = np.random.default_rng(SEED).integers(len(a), size=(2000, len(a)))
    found: dict[str, Any] = {}
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        ratios = np.quantile(b[picks], q, axis=1) / np.quantile(a[picks], q, axis=1)
        low, high = np.quantile(ratios, (0.025, 0.975))
        values = float(np.quantile(a, q)), float(np.quantile(b, q))
        found[f"{name}_off_ms"], found[f"{name}_on_ms"] = (round(1000 * v, 2) for v in values)
        found[f"{name}_ratio"] = [round(float(v), 4) for v in (values[1] / values[0], low, high)]
    return found


def arrivals_of(n: int, rate: float, seed: int) -> list[float]:
    """``n`` arrivals of a Poisson process of ``rate`` a second, from 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, n)
    return np.cumsum(gaps).tolist()


def figures(off: Seen, on: Seen) -> dict[str, Any]:
    """What is said of one load."""
    return {
        "requests": len(off.total),
        "busy": round(off.busy / off.spent, 3),
        "total": compare(off.total, on.total),
        "first_token": compare(off.first, on.first),
        "target_passes": on.passes,
        "extra_target_passes": on.fork_passes,
        "forks_drawn": on.drawn,
        "forks_run": on.ran,
        "forks_dropped": on.dropped,
        "same_work_served": off.passes == on.passes,
    }


def bench(blocks: int, requests: int, loads: Sequence[float], tick: Callable[[], float]) -> dict[str, Any]:
    """Every load, ``blocks`` pairs of blocks of so many requests."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("capacity", total=2 + 2 * blocks * len(loads))
        worker = Worker(load_pair(), Clock(tick))
        full = Seen()
        for i in range(2):  # the first warms up
            full = Seen()
            worker.block(worker.tasks(requests, SEED + i), [0.0] * requests, 0.0, full)
            progress.advance(bar)
        capacity = requests / full.spent
        found: dict[str, Any] = {"rows": ROWS, "rule": RULE, "theta": THETA, "capacity_per_s": round(capacity, 2)}
        for load in loads:
            off, on = Seen(), Seen()
            for i in range(blocks):
                progress.update(bar, description=f"load {load:g}")
                tasks = worker.tasks(requests, i)
                arrivals = arrivals_of(requests, load * capacity, SEED + i)
                for fork in (0.0, 1.0) if i % 2 else (1.0, 0.0):
                    worker.block(tasks, arrivals, fork, on if fork else off)
                    progress.advance(bar)
            found[f"load {load:g}"] = figures(off, on)
    ratios = [found[f"load {load:g}"]["total"]["p99_ratio"][0] for load in loads]
    return found | {"worst_p99_ratio": max(ratios), "goal_met": max(ratios) <= GOAL}


def main() -> None:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="two pairs of short blocks")
    parser.add_argument("--wall", action="store_true", help="wall time instead of CPU time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    blocks, requests = (2, 25) if args.quick else (6, 100)
    print(json.dumps(bench(blocks, requests, LOADS, time.perf_counter if args.wall else time.process_time)))


if __name__ == "__main__":
    main()
