"""One pool's control loop: everything that happens in one `tick(now)`.

    policy edits -> telemetry in -> orders -> for each class: estimate, govern, solve -> save -> lease -> acknowledge

Saving comes before leasing. Every few seconds the state is saved too, in one transaction with the stream position that
it has seen; after a crash the entries since then come again and nothing is counted twice. When the database is away or
slow the loop goes on from memory (`controller.saver`); when the stream is away no lease can be renewed and the workers
turn lossless by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import structlog

from controller.costs import CostModel
from controller.ingest import Deduplicator, Source, by_kind, drain
from controller.observe import Observer
from controller.orders import Orders
from controller.replay import significant
from controller.rollup import Rollup
from controller.saver import Saver, Tick
from controller.steer import ClassSteer, Fence, kept_at_age
from controller.tracing import traced
from controller.view import Board, PoolView, Wanted
from controller.views import class_view, point_of
from policies.errors import PolicyError
from policies.reload import Followed
from storage.errors import LeaseRefused, StorageError
from storage.history import Alert, History, Point
from storage.records import (
    ALL_CLASSES,
    Decision,
    ForkRecord,
    Lease,
    QualityScore,
    Record,
    RequestRecord,
    to_fields,
)
from storage.tables import to_json

log = structlog.get_logger(__name__)

MAX_CLASSES = 64
ENTRIES_PER_S = 4000  # taken from the stream at most, so that after an outage a tick does not outlast the leases
MAX_WANTED = 100  # requests per class shown as worth a label


class FencedOff(Exception):
    """A newer controller holds this pool; this one must stop."""


class Reader(Source, Protocol):
    """What the loop needs of `storage.stream.StreamReader` beyond reading."""

    lost: int

    def ack(self, ids: list[str]) -> None: ...
    def ack_up_to(self, entry_id: str) -> None: ...
    def lag(self) -> int: ...


class Leases(Protocol):
    """What the loop needs of `storage.stream.LeaseStore`."""

    def write(self, lease: Lease) -> None: ...


class FollowedPolicy(Protocol):
    """A policy that may change: `policies.reload.PolicyFile`, or a member of a `PolicySet`."""

    def poll(self) -> object: ...


@dataclass(frozen=True)
class LoopConfig:
    """Timing of one loop: seconds between ticks, lease ttl in seconds, and the estimator's memory in rounds.

    The state is saved every `snapshot_s`; entries read since then are acknowledged with it. A tick waits `patience_s`
    for the database at most (None: a fifth of the ttl).
    """

    tick_s: float = 1.0
    ttl_s: float = 5.0
    half_life_rounds: float = 4000.0
    meter_s: float = 10.0
    snapshot_s: float = 5.0
    patience_s: float | None = None

    @property
    def patience(self) -> float:
        """How long a tick waits for the database, in seconds."""
        return self.ttl_s / 5 if self.patience_s is None else self.patience_s


class Unsaved:
    """What has been observed or decided since the last tick was handed over for saving."""

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []
        self.forks: list[ForkRecord] = []
        self.scores: list[QualityScore] = []
        self.decisions: list[Decision] = []
        self.points: list[Point] = []
        self.alerts: list[Alert] = []


class PoolLoop:
    """The loop of one pool under one epoch."""

    def __init__(
        self,
        policy_file: Followed,
        reader: Reader,
        leases: Leases,
        history: History,
        board: Board,
        *,
        epoch: int,
        config: LoopConfig,
        now: float,
        saver: Saver,
        holder: str = "",
        cpu_clock: Callable[[], float] = time.perf_counter,
    ):
        self._file, self._reader, self._leases, self._history, self._board = policy_file, reader, leases, history, board
        self.config, self.epoch, self.holder, self._cpu_clock = config, epoch, holder, cpu_clock
        self._saver = saver
        self.policy, sha = policy_file.current
        self.pool = self.policy.pool
        self.costs = CostModel(self.policy.block.max)
        self.classes: dict[str, ClassSteer] = {}
        self._seen = Deduplicator()
        self._rollup = Rollup(self.pool)
        self._seq = 0
        self._last_id: str | None = None  # newest entry observed
        self._saved_id: str | None = None  # newest entry in a state that was handed over
        self._ids: list[str] = []  # observed since that state
        self._next_state = 0.0
        self._unsaved = Unsaved()
        self._stored: dict[str, Decision] = {}  # the newest decision of each class that was stored
        self._slices: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
        self._firing: dict[tuple[str, str], bool] = {}
        self._last_telemetry: float | None = None
        self.dead_letters = 0
        self._observer = Observer(self.pool, self._set_aside)
        self.ticks_missed = self.tick_failures = 0  # of the process; whoever ticks says so
        self.controllers = 1
        self.degraded: dict[str, str] = {}
        self.wanted: tuple[Wanted, ...] = ()
        self._unrecorded: list[tuple[Any, ...]] = []
        saved = history.load_snapshot(self.pool)
        self.orders = Orders(history, saver, self.pool, None if saved is None else saved[0].get("orders"))
        if saved is not None:
            self._restore(*saved, now)
        self.revision = history.add_policy_revision(
            self.pool, policy_file.text, sha, str(policy_file.path), now, accepted=True, error=None
        )
        self._note_refusal(None, now)
        self._steer("default", now)
        for name in self.policy.classes:
            self._steer(name, now)

    # -- one tick ------------------------------------------------------------------------------------------------------

    @traced("tick")
    def tick(self, now: float) -> None:
        """Observe what has come, decide, save, lease, show. Raises FencedOff when a newer controller has taken over."""
        started = self._cpu_clock()
        self.degraded.clear()
        self.orders.ask()
        self._poll_policy(now)
        self._ingest(now)
        self._obey(now)
        decisions = self._decide(now)
        self._save(now)
        self._lease(decisions)
        self._acknowledge()
        self._show(now, self._cpu_clock() - started)

    def finish(self, now: float, seconds: float) -> bool:
        """Save what was observed and acknowledge it, within so many seconds; whether everything was saved."""
        self._next_state = now
        self._save(now)
        saved = self._saver.finish(seconds)
        self._acknowledge()
        return saved

    @traced("policy")
    def _poll_policy(self, now: float) -> None:
        before = self._file.rejected
        change = cast("FollowedPolicy", self._file).poll()
        self._note_refusal(before, now)
        if change is not None:
            self.policy, sha = self._file.current
            self._unrecorded.append((self._file.text, sha, str(self._file.path), now, True, None))
        self._record_revisions()
        if change is None:
            return
        for name, steer in self.classes.items():
            steer.set_policy(self.policy.for_class(name), now)
        for name in self.policy.classes:
            self._steer(name, now)
        log.info("policy revision active", pool=self.pool, revision=self.revision)

    def _note_refusal(self, before: PolicyError | None, now: float) -> None:
        """Say and write down what speaks against the newest edit, where it is not what was said `before`."""
        rejected = self._file.rejected
        if rejected is not None and rejected is not before:
            log.warning("policy edit refused, the last good revision stays active", pool=self.pool, error=str(rejected))
            text, sha = self._file.rejected_text, self._file.rejected_revision
            self._unrecorded.append((text, sha, str(self._file.path), now, False, str(rejected)))

    def _record_revisions(self) -> None:
        """Write down the edits; while the database is away an accepted one has the next number until it has its own."""
        while self._unrecorded:
            edit = self._unrecorded[0]
            number = self._saver.ask(partial(self._history.add_policy_revision, self.pool, *edit), 0)
            if not number:
                self.degraded["policy"] = "a policy revision is not recorded yet: the database is away"
                return
            if edit[4]:
                self.revision = number
            del self._unrecorded[0]

    @traced("ingest")
    def _ingest(self, now: float) -> None:
        try:
            limit = max(1000, int(ENTRIES_PER_S * self.config.tick_s))
            batch = drain(self._reader, self._seen, self.pool, limit=limit)
        except StorageError as e:
            self.degraded["stream"] = f"stream unreachable: {e}"
            return
        if batch.trouble is not None:
            self.degraded["stream"] = f"stream unreachable: {batch.trouble}"
        self.dead_letters += len(batch.dead)
        for reason in batch.dead[:5]:
            log.warning("entry set aside", pool=self.pool, reason=reason)
        if batch.last_id is not None:
            self._last_id, self._last_telemetry = batch.last_id, now
        self._ids += batch.ids
        self._observer.take_in(batch, lambda name: self._steer(name, now), self._rollup, now)
        _, requests, forks, scores = by_kind(batch.records)
        self._unsaved.requests += requests
        self._unsaved.forks += forks
        self._unsaved.scores += scores

    def _set_aside(self, entry_id: str, record: Record, reason: str) -> None:
        try:
            self._reader.dead_letter(entry_id, to_fields(record), reason)
        except StorageError as e:
            self.degraded["stream"] = f"could not set an entry aside: {e}"

    def _obey(self, now: float) -> None:
        """Pass operators' orders on to the classes that they are for."""
        for action in self.orders.take(self.config.patience):
            log.warning("order", pool=self.pool, action=action.action, cls=action.traffic_class, who=action.who)
            if action.traffic_class != ALL_CLASSES:
                self._steer(action.traffic_class, now).act(action, now)
                continue
            for steer in self.classes.values():
                steer.act(action, now)

    @traced("decide")
    def _decide(self, now: float) -> list[Decision]:
        decisions = []
        for name, steer in self.classes.items():
            self._seq += 1
            fence = Fence(self.epoch, self._seq, self.revision, self.config.ttl_s)
            try:
                decision = steer.decide(now, fence)
                self._unsaved.points.append(point_of(steer, decision, now))
            except Exception as e:  # the other classes go on; this one turns lossless when its lease ends
                log.exception("no decision", pool=self.pool, cls=name)
                self.degraded[f"class {name}"] = f"class {name} has no decision: {type(e).__name__}: {e}"
                continue
            decisions.append(decision)
            self._keep(name, decision)
            self._note_alerts(steer, now)
        return decisions

    def _keep(self, name: str, decision: Decision) -> None:
        """Store a decision that says something new, and the first one after a minute of the same."""
        if significant(self._stored.get(name), decision):
            self._stored[name] = decision
            self._unsaved.decisions.append(decision)

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
    def _save(self, now: float) -> None:
        values: dict[str, Any] = {"pool": self.pool, "epoch": self.epoch, "now": now, **vars(self._unsaved)}
        self._unsaved = Unsaved()
        ids: list[str] = []
        if now >= self._next_state:
            self._next_state = now + self.config.snapshot_s
            # As text, since the loop goes on changing its state while a slow database still saves it.
            values["rollups"] = self._rollup.take(now)
            values["slices"] = self._changed_slices()
            values |= {"snapshot": to_json(self.to_state(now)), "last_id": self._last_id}
            ids, self._ids = self._ids, []
            self._saved_id = self._last_id
        self._saver.save(Tick(values, ids, self._saved_id))
        self._check_saved()

    def _changed_slices(self) -> list[dict[str, Any]]:
        """Rows of the budgets' accounts that are not as they were when they were saved last."""
        changed: list[dict[str, Any]] = []
        for name, steer in self.classes.items():
            rows = {(row["start"], row["evidence_epoch"], row["level"]): row for row in steer.slices()}
            saved = self._slices.get(name, {})
            changed += [row for key, row in rows.items() if saved.get(key) != row]
            self._slices[name] = rows
        return changed

    def _check_saved(self) -> None:
        try:
            self._done = self._saver.settled()
        except LeaseRefused as e:
            raise FencedOff(str(e)) from e
        if self._done.trouble is not None:
            self.degraded["database"] = f"decisions wait on this machine: {self._done.trouble}"

    @traced("lease")
    def _lease(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            try:
                self._leases.write(decision.lease)
            except LeaseRefused as e:
                raise FencedOff(str(e)) from e
            except StorageError as e:
                self.degraded["lease"] = f"lease not renewed, workers turn lossless when it ends: {e}"

    def _acknowledge(self) -> None:
        done = self._done
        try:
            self._reader.ack(done.ids)
            if done.up_to is not None:
                self._reader.ack_up_to(done.up_to)
        except StorageError as e:  # they come again after a restart, and the saved position skips them
            self.degraded["stream"] = f"could not acknowledge: {e}"

    @traced("show")
    def _show(self, now: float, seconds: float) -> None:
        try:
            lag = self._reader.lag()
        except StorageError as e:
            lag = 0
            self.degraded.setdefault("stream", f"stream unreachable: {e}")
        steers = [steer for steer in self.classes.values() if steer.decision is not None]
        self.wanted = tuple(w for s in steers for w in s.wanted(now, MAX_WANTED))
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
                last_telemetry_age_s=None if self._last_telemetry is None else now - self._last_telemetry,
                stream_lag=lag,
                dead_letters=self.dead_letters,
                classes=tuple(class_view(s, self.epoch, self._seq, self.config.ttl_s) for s in steers),
                degraded=tuple(self.degraded.values()),
                holder=self.holder,
                controllers=self.controllers,
                entries_lost=self._reader.lost,
                blocks_missing=self._seen.gaps,
                handler_failures=self._observer.failures,
                ticks_missed=self.ticks_missed,
                tick_failures=self.tick_failures,
                database_away=self._saver.away,
                spooled_ticks=self._saver.spooled,
                rows_lost=self._saver.rows_lost,
            )
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    def _steer(self, name: str, now: float) -> ClassSteer:
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
            for action in self.orders.standing:
                self.classes[name].act(action, now)
        return self.classes[name]

    def to_state(self, now: float) -> dict[str, Any]:
        """Everything a successor needs, JSON-able; saved with the stream position it belongs to."""
        return {
            "time": now,
            "g_max": self.policy.block.max,
            "costs": self.costs.to_state(),
            "classes": {name: steer.to_state() for name, steer in self.classes.items()},
            "seen": self._seen.to_state(),
            "rollup": self._rollup.to_state(),
            "orders": self.orders.to_state(),
            "dead_letters": self.dead_letters,
            "firing": [[*key, value] for key, value in self._firing.items()],
        }

    def _restore(self, state: Mapping[str, Any], last_id: str, now: float) -> None:
        self._last_id = self._saved_id = last_id
        age_s = now - state["time"]
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
        self._rollup = Rollup.from_state(self.pool, state.get("rollup", {}))
        self.dead_letters = state["dead_letters"]
        self._firing = {(cls, name): value for cls, name, value in state["firing"]}
        log.info("state restored", pool=self.pool, age_s=round(age_s, 1), last_id=last_id)

    @property
    def last_id(self) -> str | None:
        """The stream position that the current state includes."""
        return self._last_id
