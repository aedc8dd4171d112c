"""One pool's control loop: everything that happens in one `tick(now)`.

    policy edits -> telemetry in -> for each class: estimate, govern, solve -> save -> lease -> acknowledge -> show

Saving comes before leasing, so that every lease a worker may act on is in the database together with the state that
led to it and the stream position it had seen; after a crash the entries since then come again and nothing is counted
twice. When the database is away the loop goes on from memory and saves what has collected later; when the stream is
away no lease can be renewed and the workers turn lossless by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from controller.costs import CostModel
from controller.ingest import Batch, Deduplicator, Source, by_kind, drain
from controller.steer import ClassSteer, Fence, kept_at_age
from controller.tracing import traced
from controller.view import Board, PoolView
from controller.views import class_view, point_of
from policies.reload import PolicyFile
from storage.errors import LeaseRefused, StorageError
from storage.history import Alert, History, Point
from storage.records import Decision, ForkRecord, Lease, QualityScore, Record, RequestRecord

log = structlog.get_logger(__name__)

MAX_CLASSES = 64
_MAX_UNSAVED = 200_000


class FencedOff(Exception):
    """A newer controller holds this pool; this one must stop."""


class Reader(Source, Protocol):
    """What the loop needs of `storage.stream.StreamReader` beyond reading."""

    def ack(self, ids: list[str]) -> None: ...
    def lag(self) -> int: ...


class Leases(Protocol):
    """What the loop needs of `storage.stream.LeaseStore`."""

    def write(self, lease: Lease) -> None: ...


@dataclass(frozen=True)
class LoopConfig:
    """Timing of one loop: seconds between ticks, lease ttl in seconds, and the estimator's memory in rounds."""

    tick_s: float = 1.0
    ttl_s: float = 5.0
    half_life_rounds: float = 4000.0
    meter_s: float = 10.0


class Unsaved:
    """What has been observed or decided and is not in the database yet."""

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []
        self.forks: list[ForkRecord] = []
        self.scores: list[QualityScore] = []
        self.decisions: list[Decision] = []
        self.points: list[Point] = []
        self.alerts: list[Alert] = []
        self.ids: list[str] = []

    def __len__(self) -> int:
        return len(self.requests) + len(self.forks) + len(self.scores) + len(self.decisions) + len(self.points)


class PoolLoop:
    """The loop of one pool under one epoch."""

    def __init__(
        self,
        policy_file: PolicyFile,
        reader: Reader,
        leases: Leases,
        history: History,
        board: Board,
        *,
        epoch: int,
        config: LoopConfig,
        now: float,
        cpu_clock: Callable[[], float] = time.perf_counter,
    ):
        self._file, self._reader, self._leases, self._history, self._board = policy_file, reader, leases, history, board
        self.config, self.epoch, self._cpu_clock = config, epoch, cpu_clock
        self.policy, sha = policy_file.current
        self.pool = self.policy.pool
        self.costs = CostModel(self.policy.block.max)
        self.classes: dict[str, ClassSteer] = {}
        self._seen = Deduplicator()
        self._seq = 0
        self._last_id: str | None = None
        self._unsaved = Unsaved()
        self._firing: dict[tuple[str, str], bool] = {}
        self._last_telemetry: float | None = None
        self.dead_letters = 0
        self.degraded: dict[str, str] = {}
        self._restore(now)
        self.revision = history.add_policy_revision(
            self.pool, policy_file.text, sha, str(policy_file.path), now, accepted=True, error=None
        )
        self._steer("default")

    # -- one tick ------------------------------------------------------------------------------------------------------

    @traced("tick")
    def tick(self, now: float) -> None:
        """Observe what has come, decide, save, lease, show. Raises FencedOff when a newer controller has taken over."""
        started = self._cpu_clock()
        self.degraded.clear()
        self._poll_policy(now)
        batch = self._ingest(now)
        decisions = self._decide(now)
        self._save(now, batch)
        self._lease(decisions)
        self._show(now, self._cpu_clock() - started)

    @traced("policy")
    def _poll_policy(self, now: float) -> None:
        before = self._file.rejected
        change = self._file.poll()
        rejected = self._file.rejected
        if rejected is not None and rejected is not before:
            log.warning("policy edit refused, the last good revision stays active", pool=self.pool, error=str(rejected))
            self._revision(now, accepted=False, error=str(rejected))
        if change is None:
            return
        policy, _ = self._file.current
        if policy.pool != self.pool:
            self.degraded["policy"] = (
                f"the policy file now names pool {policy.pool!r}; {self.pool!r} keeps its last one"
            )
            return
        self.policy = policy
        self._revision(now, accepted=True, error=None)
        for name, steer in self.classes.items():
            steer.set_policy(policy.for_class(name), now)
        for name in policy.classes:
            self._steer(name)
        log.info("policy revision active", pool=self.pool, revision=self.revision)

    def _revision(self, now: float, *, accepted: bool, error: str | None) -> None:
        file = self._file
        text, sha = (file.text, file.current[1]) if accepted else (file.rejected_text, file.rejected_revision)
        try:
            revision = self._history.add_policy_revision(
                self.pool, text, sha, str(file.path), now, accepted=accepted, error=error
            )
        except StorageError as e:
            self.degraded["database"] = f"policy revision not recorded: {e}"
            revision = self.revision + 1
        if accepted:
            self.revision = revision

    @traced("ingest")
    def _ingest(self, now: float) -> Batch:
        try:
            batch = drain(self._reader, self._seen, self.pool)
        except StorageError as e:
            self.degraded["stream"] = f"stream unreachable: {e}"
            return Batch()
        self.dead_letters += len(batch.dead)
        for reason in batch.dead[:5]:
            log.warning("entry set aside", pool=self.pool, reason=reason)
        if batch.last_id is not None:
            self._last_id, self._last_telemetry = batch.last_id, now
        for record in batch.records:
            self._observe(record, now)
        _, requests, forks, scores = by_kind(batch.records)
        self._unsaved.requests += requests
        self._unsaved.forks += forks
        self._unsaved.scores += scores
        self._unsaved.ids += batch.ids
        return batch

    def _observe(self, record: Record, now: float) -> None:
        steer = self._steer(record.traffic_class)
        if isinstance(record, RequestRecord):
            steer.observe_request(record, now)
        elif isinstance(record, ForkRecord):
            steer.observe_fork(record, now)
        elif isinstance(record, QualityScore):
            steer.observe_score(record, now)
        else:
            steer.observe_block(record, now)

    @traced("decide")
    def _decide(self, now: float) -> list[Decision]:
        decisions = []
        for steer in self.classes.values():
            self._seq += 1
            fence = Fence(self.epoch, self._seq, self.revision, self.config.ttl_s)
            decision = steer.decide(now, fence)
            decisions.append(decision)
            self._unsaved.points.append(point_of(steer, decision, now))
            self._note_alerts(steer, now)
        self._unsaved.decisions += decisions
        return decisions

    def _note_alerts(self, steer: ClassSteer, now: float) -> None:
        """Record each alert when it starts and when it ends."""
        if steer.allowance is None:
            return
        name = steer.policy.traffic_class
        for alert in steer.allowance.alerts:
            key = (name, alert.name)
            if self._firing.get(key, False) != alert.firing:
                self._firing[key] = alert.firing
                log.warning("alert", pool=self.pool, name=alert.name, firing=alert.firing, detail=alert.detail)
                self._unsaved.alerts.append(Alert(self.pool, name, now, alert.name, alert.firing, alert.detail))

    @traced("save")
    def _save(self, now: float, batch: Batch) -> None:
        u = self._unsaved
        try:
            self._history.save_tick(
                self.pool,
                self.epoch,
                now,
                decisions=u.decisions,
                requests=u.requests,
                forks=u.forks,
                scores=u.scores,
                points=u.points,
                alerts=u.alerts,
                snapshot=self.to_state(now),
                last_id=self._last_id,
            )
        except LeaseRefused as e:
            raise FencedOff(str(e)) from e
        except StorageError as e:
            self.degraded["database"] = f"not saved, {len(u)} records wait in memory: {e}"
            if len(u) > _MAX_UNSAVED:
                del u.points[: len(u.points) // 2], u.decisions[: len(u.decisions) // 2]
            return
        ids, self._unsaved = u.ids, Unsaved()
        try:
            self._reader.ack(ids)
        except StorageError as e:  # they come again after a restart, and the saved position skips them
            self.degraded["stream"] = f"could not acknowledge: {e}"

    @traced("lease")
    def _lease(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            try:
                self._leases.write(decision.lease)
            except LeaseRefused as e:
                raise FencedOff(str(e)) from e
            except StorageError as e:
                self.degraded["lease"] = f"lease not renewed, workers turn lossless when it ends: {e}"

    @traced("show")
    def _show(self, now: float, seconds: float) -> None:
        try:
            lag = self._reader.lag()
        except StorageError as e:
            lag = 0
            self.degraded.setdefault("stream", f"stream unreachable: {e}")
        age = None if self._last_telemetry is None else now - self._last_telemetry
        rejected = self._file.rejected
        self._board.publish(
            PoolView(
                pool=self.pool,
                policy_revision=self.revision,
                policy_source=str(self._file.path),
                policy_rejected=None if rejected is None else str(rejected),
                epoch=self.epoch,
                leader=True,
                time=now,
                tick_seconds=seconds,
                interval_s=self.config.tick_s,
                last_telemetry_age_s=age,
                stream_lag=lag,
                dead_letters=self.dead_letters,
                classes=tuple(class_view(s, self.epoch, self._seq, self.config.ttl_s) for s in self.classes.values()),
                degraded=tuple(self.degraded.values()),
            )
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    def _steer(self, name: str) -> ClassSteer:
        """The class of that name, made on first sight; beyond the bound, traffic counts under `default`."""
        if name not in self.classes and len(self.classes) >= MAX_CLASSES:
            name = "default"
        if name not in self.classes:
            self.classes[name] = ClassSteer(
                self.policy.for_class(name),
                self.costs,
                half_life_rounds=self.config.half_life_rounds,
                meter_s=self.config.meter_s,
            )
        return self.classes[name]

    def to_state(self, now: float) -> dict[str, Any]:
        """Everything a successor needs, JSON-able; saved with the stream position it belongs to."""
        return {
            "time": now,
            "g_max": self.policy.block.max,
            "costs": self.costs.to_state(),
            "classes": {name: steer.to_state() for name, steer in self.classes.items()},
            "seen": self._seen.to_state(),
            "dead_letters": self.dead_letters,
            "firing": [[*key, value] for key, value in self._firing.items()],
        }

    def _restore(self, now: float) -> None:
        saved = self._history.load_snapshot(self.pool)
        if saved is None:
            return
        state, self._last_id = saved
        age_s = now - state["time"]
        self._take_over(state, age_s)
        log.info("state restored", pool=self.pool, age_s=round(age_s, 1), last_id=self._last_id)

    def _take_over(self, state: Mapping[str, Any], age_s: float) -> None:
        if state["g_max"] == self.policy.block.max:
            self.costs = CostModel.from_state(state["costs"])
            self.costs.forget(kept_at_age(age_s))
        for name, saved in state["classes"].items():
            self.classes[name] = ClassSteer.from_state(
                saved,
                self.policy.for_class(name),
                self.costs,
                half_life_rounds=self.config.half_life_rounds,
                meter_s=self.config.meter_s,
                age_s=age_s,
            )
        self._seen = Deduplicator.from_state(state["seen"])
        self.dead_letters = state["dead_letters"]
        self._firing = {(cls, name): value for cls, name, value in state["firing"]}

    @property
    def last_id(self) -> str | None:
        """The stream position that the current state includes."""
        return self._last_id
