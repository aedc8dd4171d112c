"""One pool on this controller: waits beside the leader, or leads.

    standby: look at the seat -> claim it when the leader is gone -> lead
    leading: keep the heartbeat -> tick -> step back when a newer epoch shows, or hand over to the member preferred

Claiming asks the database and may hang, so it is done at a desk of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis
import structlog

from controller.desk import Desk, Task
from controller.loop import FencedOff, LoopConfig, PoolLoop
from controller.saver import Saver
from controller.seating import Settled, Watch, is_predecessor
from controller.view import Board, PoolView
from policies.reload import Member, PolicyFile
from storage.errors import StorageError
from storage.history import History
from storage.leases import LeaseStore
from storage.seats import Seat, SeatStore
from storage.spool import Spool
from storage.stopped import end_stopped_writes
from storage.stream import StreamReader

log = structlog.get_logger(__name__)

PAUSE_TTLS = (1.0, 12.0)  # heartbeats to wait before claiming again after stepping back: at first, and at most


@dataclass(frozen=True)
class Parts:
    """What all pools of a controller share."""

    client: redis.Redis
    history: History
    board: Board
    name: str
    spool: Path
    config: LoopConfig
    saving: Desk
    claiming: Desk
    clock: Callable[[], float]


class PoolRunner:
    """A pool that this controller has the policy of; `tick` is to be called every `config.tick_s` or more often."""

    def __init__(self, policy: Member | PolicyFile, parts: Parts):
        self.policy, self._parts = policy, parts
        self.pool = policy.current[0].pool
        self.loop: PoolLoop | None = None
        self.seat: Seat | None = None
        self.trouble: str | None = None  # why this controller neither leads nor waits as it should
        self.ticks_missed = self.tick_failures = 0
        self._seats = SeatStore(parts.client)
        self._ttl = parts.config.ttl_s
        self._watch = Watch(self.pool, parts.name, self._ttl)
        self._settled = Settled(self.pool, parts.name, self._ttl)
        self._claim: Task[PoolLoop | None] | None = None
        self._claim_after, self._pause = 0.0, PAUSE_TTLS[0]
        self._first_look = True

    @property
    def leads(self) -> bool:
        """Whether this controller steers the pool."""
        return self.loop is not None

    def tick(self, now: float, *, patient: bool = False) -> None:
        """Lead or wait for one tick. With `patient` a claim gets some time at once."""
        self._attend(now)
        if self.loop is None:
            self._stand_by(now, patient)
        if self.loop is not None:
            self._lead(self.loop, now)
        if self.loop is None:
            self._show(now)

    def close(self, now: float, seconds: float) -> None:
        """Save what can be saved within so many seconds, and let another controller take the pool."""
        if self.loop is not None:
            self._finish(self.loop, now, seconds)
        try:
            self._seats.release(self.pool, self._parts.name, self._ttl)
            self._seats.leave(self.pool, self._parts.name)
        except StorageError as e:
            log.info("left without a word: the stream server is away", pool=self.pool, error=str(e))

    # -- leading -------------------------------------------------------------------------------------------------------

    def _lead(self, loop: PoolLoop, now: float) -> None:
        seat = self.seat
        try:
            if seat is not None and seat.epoch > loop.epoch:
                raise FencedOff(f"epoch {seat.epoch} of {seat.holder or 'another controller'} leads the pool")
            loop.ticks_missed, loop.tick_failures = self.ticks_missed, self.tick_failures
            loop.controllers = 1 if seat is None else max(1, len(seat.members))
            loop.tick(now)
        except FencedOff as e:
            log.error("a newer controller holds the pool; this one steps back", pool=self.pool, error=str(e))
            self.trouble = str(e)
            self._step_back(now)
            return
        self.trouble = None
        if now - self._claim_after > PAUSE_TTLS[1] * self._ttl:
            self._pause = PAUSE_TTLS[0]
        if seat is not None and not loop.degraded and self._settled.should_move(seat, now):
            log.info("pool handed over", pool=self.pool, epoch=loop.epoch)
            if self._finish(loop, now, self._parts.config.patience):
                self.loop = None
                self._seats.release(self.pool, self._parts.name, self._ttl)
                self._watch = Watch(self.pool, self._parts.name, self._ttl)

    @staticmethod
    def _finish(loop: PoolLoop, now: float, seconds: float) -> bool:
        try:
            return loop.finish(now, seconds)
        except FencedOff as e:
            log.error("a newer controller holds the pool already", pool=loop.pool, error=str(e))
            return True

    def _step_back(self, now: float) -> None:
        """Wait beside the new leader. Two that cannot see each other, by mistake, must not chase one another."""
        self.loop = None
        self._watch = Watch(self.pool, self._parts.name, self._ttl)
        self._claim_after = now + self._pause * self._ttl
        self._pause = min(2 * self._pause, PAUSE_TTLS[1])

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _attend(self, now: float) -> None:
        epoch = 0 if self.loop is None else self.loop.epoch
        try:
            self.seat = self._seats.attend(self.pool, self._parts.name, self._ttl, epoch)
        except StorageError as e:
            self.seat = None
            self._watch.lost_sight()
            if self.loop is None:
                self.trouble = f"stream unreachable: {e}"

    def _stand_by(self, now: float, patient: bool) -> None:
        self.policy.poll()
        if self._claim is None and self.seat is not None:
            gone, self._first_look = self._predecessor(self.seat), False
            may = self._watch.may_claim(self.seat, now) or gone is not None
            if may and now >= self._claim_after:
                seat = self.seat
                self._claim = self._parts.claiming.submit(lambda: self._take(seat, gone, now))
            else:
                self.trouble = None
        if self._claim is not None and patient:
            self._claim.wait(self._parts.config.patience)
        if self._claim is not None and self._claim.done:
            claim, self._claim = self._claim, None
            try:
                self.loop = claim.result()
            except Exception as e:
                self.trouble = f"cannot take the pool: {e}"
                self._claim_after = now + self._parts.config.tick_s
                log.warning("the pool cannot be taken", pool=self.pool, error=f"{type(e).__name__}: {e}")
            if self.loop is not None:
                log.info("pool taken", pool=self.pool, epoch=self.loop.epoch, policy=str(self.policy.path))
                self._attend(now)

    def _predecessor(self, seat: Seat) -> str | None:
        """At the first look: the holder, where it was this controller's own earlier life."""
        if not self._first_look or not seat.holder:
            return None
        return seat.holder if is_predecessor(seat.holder, self._parts.name, _running) else None

    def _take(self, seat: Seat, gone: str | None, now: float) -> PoolLoop | None:
        """Claim the pool and rebuild its loop; None where another was quicker. Runs at the claiming desk."""
        parts = self._parts
        if not self._seats.acquire(self.pool, parts.name, self._ttl, gone):
            return None
        try:
            return self._rebuild(seat, now)
        except Exception:
            self._seats.release(self.pool, parts.name, self._ttl)
            raise

    def _rebuild(self, seat: Seat, now: float) -> PoolLoop:
        parts, leases = self._parts, LeaseStore(self._parts.client)
        spool = Spool(parts.spool / f"{self.pool}.ticks")
        if len(spool):
            log.info("ticks of an earlier life are saved", pool=self.pool, ticks=spool.replay(parts.history.save_tick))
        # The stream server remembers what was leased, also when the database was lost.
        classes = ("default", *self.policy.current[0].classes)
        leased = [fence[0] for name in classes if (fence := leases.fence(self.pool, name)) is not None]
        at_least = 1 + max([seat.highest, *leased])
        if end_stopped_writes(parts.history.database, self.pool):
            log.warning("a write that the last leader had left open was ended", pool=self.pool)
        epoch = parts.history.claim_epoch(self.pool, parts.name, now, at_least=at_least)
        reader = StreamReader(parts.client, self.pool)
        loop = PoolLoop(
            self.policy,
            reader,
            leases,
            parts.history,
            parts.board,
            epoch=epoch,
            config=parts.config,
            now=now,
            saver=Saver(parts.history, spool, parts.saving, patience_s=parts.config.patience),
            holder=parts.name,
        )
        if loop.last_id is not None:
            reader.resume_from(loop.last_id)
        return loop

    def _show(self, now: float) -> None:
        """What is seen of a pool by who waits for it."""
        seat, rejected = self.seat, self.policy.rejected
        self._parts.board.publish(
            PoolView(
                pool=self.pool,
                policy_revision=0,
                policy_source=str(self.policy.path),
                policy_rejected=None if rejected is None else str(rejected),
                epoch=0 if seat is None else seat.highest,
                leader=False,
                time=now,
                tick_seconds=0.0,
                interval_s=self._parts.config.tick_s,
                last_telemetry_age_s=None,
                stream_lag=0,
                dead_letters=0,
                classes=(),
                degraded=() if self.trouble is None else (self.trouble,),
                holder="" if seat is None else seat.holder or "",
                controllers=0 if seat is None else len(seat.members),
                ticks_missed=self.ticks_missed,
                tick_failures=self.tick_failures,
            )
        )


def _running(process: int) -> bool:
    """Whether a process of that id exists on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
