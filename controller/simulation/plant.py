"""The simulated pool: workers that decode requests under leases and send what real workers send.

Every request is decoded in full, position by position, with the coupling of both rules; what is reported of its rounds
is a representative part (`PlantSpec.report_positions` a tick and worker), everything else is a record each. Times are
seconds since the scenario began; on the wire they are Unix-like.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from controller.simulation.document import PlantSpec, WorkerSpec
from controller.simulation.machine import Machine
from controller.simulation.records import Decoded, Knobs, report
from controller.simulation.rounds import Rounds, Texts, chop, chop_deep, first_per_request, per_request
from controller.simulation.signals import inside
from controller.simulation.source import Atoms, Bools, F, Ints, Source
from storage.records import Branch, Flat, ForkRecord, Lease, QualityScore, Record, RequestRecord, TokenBlock

ORIGIN = 1_800_000_000.0  # the Unix time of second 0
DEFAULT_G = 4  # block length before any lease was read, as in the decoder
FIRST_DURATION_S = 1.0


@dataclass
class LeaseStore:
    """The one lease of the class and when it ends, as a store with a ttl keeps it."""

    lease: Lease | None = None
    ends: float = 0.0

    def write(self, lease: Lease, t: float) -> None:
        """Keep a lease from ``t`` on."""
        self.lease, self.ends = lease, t + lease.ttl


@dataclass
class Worker:
    """One worker's state."""

    name: str
    spec: WorkerSpec
    outbox: deque[Record]
    boot: int = 0
    seq: int = 0
    served: int = 0
    lease: Lease | None = None
    deadline: float = 0.0
    good: Lease | None = None
    duration_s: float | None = None  # of a request, over the last ones

    def poll(self, store: LeaseStore, t: float) -> None:
        """Ask the store; what it does not have or says no more runs out by itself."""
        if store.lease is not None and store.ends > t:
            self.lease = self.good = store.lease
            self.deadline = store.ends

    def knobs(self, rows: int, *, leased: bool) -> Knobs:
        """The knobs for a batch of ``rows``: the lease's, or lossless with the last good block length."""
        if leased and self.lease is not None:
            row = self.lease.knobs(rows)
            lenient = row.theta > 0 and row.rho > 0 and row.depth > 0
            knobs = (row.theta, row.rho, self.lease, row.depth) if lenient else (0.0, 0.0, self.lease)
            return Knobs(row.g, *knobs)
        return Knobs(self.good.knobs(rows).g if self.good is not None else DEFAULT_G, 0.0, 0.0, None)


@dataclass
class Tick:
    """What truly happened in one tick: sums, and the knobs in use."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    knobs: Knobs | None = None
    rows: int = 0

    def add(self, **amounts: float) -> None:
        """Add to the sums."""
        for name, amount in amounts.items():
            self.sums[name] += amount


class Plant:
    """Workers, traffic, scorer and network of one scenario; every draw comes from ``seed``."""

    def __init__(self, spec: PlantSpec, pool: str, metric: str, seed: int, directory: Path = Path()):
        self.spec, self.pool, self.metric = spec, pool, metric
        self.source = Source(spec.kinds, directory)
        streams = np.random.SeedSequence(seed).spawn(4)
        self._traffic, self._text, self._quality, self._measure = (np.random.default_rng(s) for s in streams)
        self.workers = {name: Worker(name, w, deque(maxlen=spec.links.buffer)) for name, w in spec.workers.items()}
        self._due: list[tuple[float, int, str, Flat]] = []
        self._count = itertools.count()

    def step(self, t: float, until: float, store: LeaseStore) -> tuple[list[Record], Tick]:
        """Serve the traffic of [t, until), and what has reached the stream by then."""
        tick, links = Tick(), self.spec.links
        up = [w for w in self.workers.values() if not inside(w.spec.down, t)]
        shares = np.array([w.spec.share.at(t) for w in up])
        rate = self.spec.rate.at(t)
        for worker, share in zip(up, shares / max(float(shares.sum()), 1e-9), strict=True):
            if not inside(links.leases_cut, t):
                worker.poll(store, t)
            self._serve(worker, rate * float(share), t, until, tick)
        while self._due and self._due[0][0] <= until:
            _, _, name, record = heapq.heappop(self._due)
            self.workers[name].outbox.append(record)
        arrived: list[Record] = []
        if not inside(links.telemetry_cut, t):
            for worker in self.workers.values():
                arrived += worker.outbox
                if worker.outbox and links.duplicates and self._measure.random() < links.duplicates:
                    arrived += list(worker.outbox)[-5:]  # an append whose answer was lost is tried again
                worker.outbox.clear()
        return arrived, tick

    def restart(self, name: str) -> None:
        """A worker dies and comes back under a new boot id: its lease, buffer and requests at work are gone."""
        worker = self.workers[name]
        worker.boot, worker.seq, worker.served = worker.boot + 1, 0, 0
        worker.lease = worker.good = None
        worker.deadline = 0.0
        worker.outbox.clear()
        self._due = [d for d in self._due if d[2] != name or isinstance(d[3], QualityScore)]
        heapq.heapify(self._due)

    def _serve(self, worker: Worker, rate: float, t: float, until: float, tick: Tick) -> None:
        load = rate * (FIRST_DURATION_S if worker.duration_s is None else worker.duration_s)
        rows = int(min(max(1, round(load)), self.spec.max_rows))
        count = int(self._traffic.poisson(rate * (until - t)))
        leased_share = float(np.clip((worker.deadline - t) / (until - t), 0.0, 1.0)) if worker.lease else 0.0
        leased = int(self._traffic.binomial(count, leased_share))
        for n, valid in ((leased, True), (count - leased, False)):
            if n:
                knobs = worker.knobs(rows, leased=valid)
                self._decode(worker, n, knobs, rows, t, until, tick)
        shown = worker.knobs(rows, leased=leased_share >= 0.5)
        if tick.knobs is None or tick.rows < rows:
            tick.knobs, tick.rows = shown, rows
        tick.add(requests=count, leased=leased)

    def _decode(self, worker: Worker, n: int, knobs: Knobs, rows: int, t: float, until: float, tick: Tick) -> None:
        kinds, tokens = self._requests(n, t)
        texts = Texts.of(tokens)
        which, atom = self.source.write(kinds, tokens, t, self._text)
        atoms = self.source.atoms(t)
        u = 1 - self._text.random(len(atom))
        explore = self._text.random(len(atom)) < (knobs.lease.explore if knobs.lease else 0.0)
        rounds, accept, lossless = _rounds(texts, atoms, atom, u, knobs, explore, None)
        touch = accept & ~lossless & rounds.examined_at
        outcome = self._outcome(knobs, texts, touch, atoms.slip[atom], t)
        if outcome.held.any():
            held = np.arange(len(atom)) >= outcome.held_from[texts.request]
            rounds, accept, _ = _rounds(texts, atoms, atom, u, knobs, explore, held)
        machine = Machine.at(self.spec.costs, worker.spec, t)
        seconds = machine.round(rounds.width, rows)
        busy = per_request(seconds, rounds.request, n)
        passes = np.bincount(rounds.request, minlength=n)
        began = np.sort(self._traffic.uniform(t, until, n))
        usual, mean = worker.duration_s, float(busy.mean())
        worker.duration_s = mean if usual is None else usual + min(1.0, n / 50) * (mean - usual)
        self._send_requests(worker, knobs, texts, outcome, busy, passes, began)
        block = report(
            Decoded(texts, rounds, which, atom, accept, touch, outcome.held_from),
            atoms,
            knobs,
            machine,
            self.spec.costs,
            rows=rows,
            at_most=self.spec.report_positions,
            prompt_tokens=self.spec.prompt_tokens,
            span_s=until - t,
            head=(self.pool, worker.name, f"b{worker.boot}", worker.seq),
            rng=self._measure,
        )
        if block is not None:
            worker.seq += 1
            worker.outbox.append(block)
        self._count_truth(tick, texts, rounds, outcome, seconds, machine.plain(rows), block)

    def _requests(self, n: int, t: float) -> tuple[Ints, Ints]:
        """Kind and length of ``n`` requests."""
        specs = list(self.spec.kinds.values())
        shares = np.array([k.share.at(t) for k in specs])
        kinds = self._traffic.choice(len(specs), n, p=shares / shares.sum()) if len(specs) > 1 else np.zeros(n, int)
        mean, spread = np.array([k.tokens.at(t) for k in specs])[kinds], np.array([k.spread for k in specs])[kinds]
        sigma = np.sqrt(np.log1p(spread**2))
        drawn = mean * np.exp(sigma * self._traffic.standard_normal(n) - sigma**2 / 2)
        return kinds, np.clip(np.rint(drawn), 2, 20_000).astype(np.int64)

    def _outcome(self, knobs: Knobs, texts: Texts, touch: Bools, slip: Bools, t: float) -> _Outcome:
        """Coins of touched requests, and the probability that their lenient answer goes bad."""
        n, quality = len(texts.tokens), self.spec.quality
        touches = per_request(touch, texts.request, n).astype(np.int64)
        first = first_per_request(touch, texts)
        touched = touches > 0
        coins = self._quality.random((3, n))
        lease = knobs.lease
        held, fork, label = (
            touched & (coin < p)
            for coin, p in zip(coins, (lease.holdback, lease.fork, lease.label) if lease else (0, 0, 0), strict=True)
        )
        kappa = quality.loss_per_touch.at(t)
        slip_kappa = kappa if quality.loss_per_slip is None else quality.loss_per_slip.at(t)
        harm = -np.log1p(-np.minimum(np.where(slip, slip_kappa, kappa), 1 - 1e-9))
        bad = -np.expm1(-per_request(touch * harm, texts.request, n))
        end = texts.first + texts.tokens
        return _Outcome(touches, first, held, fork, label, bad, np.where(held, first, end), quality.right.at(t))

    def _send_requests(
        self, worker: Worker, knobs: Knobs, texts: Texts, o: _Outcome, busy: F, passes: Ints, began: F
    ) -> None:
        lease = knobs.lease
        for i in range(len(busy)):
            worker.served += 1
            key = f"{worker.name}.b{worker.boot}.{worker.served}"
            touched = bool(o.touches[i])
            clock = ORIGIN + began[i] + worker.spec.clock.at(float(began[i]))
            where = (o.first[i] - texts.first[i]) / texts.tokens[i] if touched else 0.0
            finished = float(began[i] + busy[i])
            self._post(
                finished,
                worker,
                RequestRecord(
                    request_id=key,
                    pool=self.pool,
                    traffic_class="default",
                    worker=worker.name,
                    boot=f"b{worker.boot}",
                    epoch=0 if lease is None else lease.epoch,
                    lease_seq=0 if lease is None else lease.seq,
                    rule=knobs.rule,
                    theta=knobs.theta,
                    rho=knobs.rho,
                    arm="untouched" if not touched else "holdback" if o.held[i] else "lenient",
                    holdback_prob=lease.holdback if lease else 0.0,
                    fork_prob=lease.fork if lease else 0.0,
                    label_prob=lease.label if lease else 0.0,
                    fork_drawn=bool(o.fork[i]),
                    label_drawn=bool(o.label[i]),
                    touches=1 if o.held[i] else int(o.touches[i]),
                    first_touch_at=clock + where * float(busy[i]) if touched else None,
                    started=clock,
                    prompt_tokens=self.spec.prompt_tokens,
                    tokens=int(texts.tokens[i]),
                    target_passes=int(passes[i]),
                    first_token_s=float(busy[i] / passes[i]),
                    total_s=float(busy[i]),
                    finish_reason="stop",
                ),
            )
            if touched:
                share = float(texts.tokens[i] - (o.first[i] - texts.first[i])) / float(texts.tokens[i])
                self._judge(worker, key, o, i, finished, float(busy[i]) * share, int(texts.tokens[i]))

    def _judge(
        self, worker: Worker, key: str, o: _Outcome, i: int, finished: float, fork_s: float, tokens: int
    ) -> None:
        """Fork and scores of a touched request."""
        labels, rng = self.spec.labels, self._quality
        lossless = float(rng.random() < o.right)
        lenient = float(rng.random() < o.right) if rng.random() < self.spec.quality.luck else lossless
        bad = bool(rng.random() < o.bad[i])
        lenient = 0.0 if bad else lenient
        ran = bool(o.fork[i]) and rng.random() >= labels.fork_fails.at(finished)
        if o.fork[i]:
            fork = ForkRecord(
                key, self.pool, "default", worker.name, f"b{worker.boot}", ran, int(o.touches[i]), tokens, 1, fork_s
            )
            self._post(finished + fork_s, worker, fork)
        missing = labels.missing_when_bad.at(finished) if bad else 0.0
        if not (o.label[i] or ran) or rng.random() < max(missing, labels.missing.at(finished)):
            return
        version = f"{labels.version.at(finished):g}"
        served, other = (lossless, lenient) if o.held[i] else (lenient, lossless)
        branches: tuple[tuple[Branch, float], ...] = (("served", served), ("fork", other))
        for branch, value in branches[: 2 if ran else 1]:
            sigma = np.sqrt(np.log1p(labels.spread**2))
            wait = labels.delay.at(finished) * float(np.exp(sigma * rng.standard_normal() - sigma**2 / 2))
            due = finished + fork_s + wait
            if not inside(labels.outages, due):
                stamp = ORIGIN + due + worker.spec.clock.at(due)
                score = QualityScore(
                    key,
                    self.pool,
                    "default",
                    branch,
                    self.metric,
                    value,
                    "simulated",
                    version,
                    stamp,
                )
                self._post(due, worker, score)

    def _post(self, due: float, worker: Worker, record: Flat) -> None:
        heapq.heappush(self._due, (due, next(self._count), worker.name, record))

    def _count_truth(
        self,
        tick: Tick,
        texts: Texts,
        rounds: Rounds,
        o: _Outcome,
        seconds: F,
        plain_s: float,
        block: TokenBlock | None,
    ) -> None:
        tokens = float(texts.tokens.sum())
        tick.add(
            tokens=tokens,
            rounds=len(seconds),
            seconds=float(seconds.sum()),
            plain_seconds=tokens * plain_s,
            drafted=float(rounds.width.sum()),
            examined=float(rounds.examined.sum()),
            accepted=float(rounds.accepted.sum()),
            touches=float(o.touches[~o.held].sum()),
            touched=float(np.count_nonzero(o.touches)),
            forks=float(np.count_nonzero(o.fork)),
            loss=float((o.right * o.bad)[~o.held].sum()),
            reported=0.0 if block is None else float(len(block.theta)),
        )


def _rounds(
    texts: Texts, atoms: Atoms, atom: Ints, u: F, knobs: Knobs, explore: Bools, held: Bools | None
) -> tuple[Rounds, Bools, Bools]:
    """(rounds, accepted, lossless acceptance) of texts with these atoms and coins; lossless where ``held``."""

    def coins(rho: float) -> Bools:
        taken = u <= atoms.accept(knobs.rule, knobs.theta, rho)[atom] if knobs.lenient else lossless
        return np.asarray(taken if held is None else np.where(held, lossless, taken))

    lossless = u <= atoms.lossless[atom]
    lenient = coins(knobs.rho)
    whole = int(knobs.depth)
    if not knobs.lenient or knobs.depth >= knobs.g:
        return chop(texts, lenient, knobs.g, explore), lenient, lossless
    part = coins(knobs.rho * (knobs.depth - whole))
    return *chop_deep(texts, lenient, part, lossless, whole, knobs.g, explore), lossless


@dataclass(frozen=True)
class _Outcome:
    """Per request: touches of the lenient branch, index of the first (-1), coins, chance of a bad lenient answer."""

    touches: Ints
    first: Ints
    held: Bools
    fork: Bools
    label: Bools
    bad: F
    held_from: Ints
    right: float
