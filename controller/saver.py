"""One pool's way into the history: ticks go in order to a desk that may hang, or to a spool while the database is away.

    loop:  save(tick) -> wait a little -> go on leasing -> settled(): what may be acknowledged, and what is wrong
    desk:  replay what was spooled -> History.save_tick -> or the spool

Entries are acknowledged when a state that includes them is in the database. Until then they stay pending, spooled or
not: the spool lies on this machine, and a successor on another one must get them again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from controller.desk import Desk, Task
from storage.errors import LeaseRefused, StorageError
from storage.history import History
from storage.spool import Spool

log = structlog.get_logger(__name__)
T = TypeVar("T")

RETRY_S = (1.0, 15.0)  # first and longest pause between attempts while the database is away
_MOST_WAITING = 500  # ticks in memory while the desk hangs; the oldest lose their rows, never their state
_MOST_UNSETTLED = 1000  # ticks remembered one by one
_MOST_IDS = 50_000  # entries remembered one by one; beyond, all up to a position are acknowledged


@dataclass(eq=False)
class Tick:
    """The arguments of one `History.save_tick`; the stream entries that may be acknowledged when it is saved, and the
    newest entry handled by then."""

    values: dict[str, Any]
    ids: list[str] = field(default_factory=list)
    position: str | None = None


@dataclass(frozen=True)
class Settled:
    """What has come of the ticks so far: entries to acknowledge (and, with `up_to`, all others up to that one), and
    what keeps the rest waiting (None: nothing)."""

    ids: list[str]
    up_to: str | None = None
    trouble: str | None = None


class Saver:
    """Saves the ticks of `pool`. The loop's thread calls the methods; only the desk's touches history and spool."""

    def __init__(self, history: History, spool: Spool, desk: Desk, *, patience_s: float = 1.0):
        self._history, self._spool, self._desk, self._patience_s = history, spool, desk, patience_s
        self._lock = threading.Lock()
        self._waiting: deque[Tick] = deque()
        self._unsettled: deque[Tick] = deque()  # handed over and not in the database
        self._saved = 0  # how many of these are by now, from the left, up to one with a state
        self._put_state: Tick | None = None  # the newest whose state is on the spool
        self._epoch: int | None = None  # under which they are saved
        self._unwritten = 0  # ticks of which it is not known what came
        self._by_range = False
        self._refused: str | None = None
        self._trouble: str | None = None
        self._next_try, self._pause = 0.0, RETRY_S[0]
        self.rows_lost = 0  # ticks whose rows found no place

    @property
    def away(self) -> bool:
        """Whether the last attempt failed, or one hangs."""
        return self._trouble is not None or self._desk.busy_s() > self._patience_s

    @property
    def spooled(self) -> int:
        """Ticks on the spool."""
        return len(self._spool)

    def save(self, tick: Tick) -> None:
        """Hand a tick over and wait for it, as long as patience lasts and nothing hangs. Nothing in it may change."""
        with self._lock:
            if tick.values.get("snapshot") is not None:
                for earlier in self._waiting:  # this state includes theirs
                    earlier.values["snapshot"] = earlier.values["last_id"] = None
            self._waiting.append(tick)
            self._unsettled.append(tick)
            self._unwritten += 1
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self._unwritten -= 1
                self.rows_lost += 1
            self._shorten()
        self._wait(self._desk.submit(self._flush))

    def ask(self, call: Callable[[], T], otherwise: T) -> T:
        """What the database says to `call`; `otherwise` when it is away or takes too long. Raises nothing of it."""
        if self.away:
            return otherwise
        task = self._desk.submit(call)
        if not self._wait(task):
            return otherwise
        try:
            return task.result()
        except StorageError as e:
            log.warning("the database did not answer", error=str(e))
            return otherwise

    def begin(self, call: Callable[[], T]) -> Task[T] | None:
        """Start asking the database something, to be looked at later; None when it is away."""
        return None if self.away else self._desk.submit(call)

    def settled(self) -> Settled:
        """What may be acknowledged now. Raises LeaseRefused once a newer epoch was found."""
        with self._lock:
            if self._refused is not None:
                raise LeaseRefused(self._refused)
            done = [self._unsettled.popleft() for _ in range(self._saved)]
            self._saved = 0
            up_to = done[-1].position if done and self._by_range else None
            self._by_range = self._by_range and not done
            trouble = self._trouble
            if trouble is None and self._unwritten:
                trouble = "the database has not answered yet"
        return Settled([i for tick in done for i in tick.ids], up_to, trouble)

    def finish(self, seconds: float) -> bool:
        """Wait until everything is in the database, for so many seconds, asking it once more; whether it is."""
        self._desk.submit(self._catch_up).wait(seconds)
        with self._lock:
            return self._saved == len(self._unsettled)

    def _shorten(self) -> None:
        """Remember fewer of the ticks and entries of a long outage one by one; the lock is held."""
        while len(self._unsettled) > _MOST_UNSETTLED and self._saved == 0:
            first = self._unsettled.popleft()
            self._unsettled[0].ids = first.ids + self._unsettled[0].ids
        if sum(len(t.ids) for t in self._unsettled) > _MOST_IDS:
            self._by_range = True
            for tick in self._unsettled:
                tick.ids = []

    # -- in the desk's thread ------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Save what waits, in order."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                tick = self._waiting.popleft()
            self._write(tick)
            with self._lock:
                self._unwritten -= 1

    def _catch_up(self) -> None:
        """Save what waits, and what is on the spool."""
        self._next_try = 0.0
        self._flush()
        if self.spooled:
            try:
                self._replay()
            except StorageError as e:
                log.warning("ticks stay on the spool until the next start", ticks=self.spooled, error=str(e))
                return
            with self._lock:
                self._trouble = None

    def _replay(self) -> None:
        """Save what is on the spool. Its state counts only when it was taken: not under a newer epoch than its own."""

        def save(**values: Any) -> None:
            try:
                self._history.save_tick(**values)
            except LeaseRefused as e:
                if values["epoch"] == self._epoch:  # and not what a crash left of an earlier life
                    with self._lock:
                        self._refused = str(e)
                raise
            if values.get("snapshot") is not None and self._put_state is not None:
                self._settle(self._put_state)

        count = self._spool.replay(save)
        self._put_state = None
        log.info("ticks of the outage are saved", ticks=count)

    def _settle(self, tick: Tick) -> None:
        """The state of this tick is in the database, and includes what was observed before."""
        with self._lock:
            if tick in self._unsettled:
                self._saved = max(self._saved, self._unsettled.index(tick) + 1)

    def _write(self, tick: Tick) -> None:
        now, self._epoch = float(tick.values["now"]), tick.values["epoch"]
        if self._trouble is not None and now < self._next_try:
            self._put_by(tick)
            return
        try:
            if self.spooled:
                self._replay()
            self._history.save_tick(**tick.values)
        except LeaseRefused as e:
            with self._lock:
                self._refused = str(e)
        except StorageError as e:
            if self._trouble is None:
                log.warning("the database is away; decisions go to the spool", error=str(e))
                self._pause = RETRY_S[0]
            self._next_try = now + self._pause
            self._pause = min(2 * self._pause, RETRY_S[1])
            self._trouble = str(e)
            self._put_by(tick)
        except Exception:  # a row that no database takes: the next tick's state includes what was observed
            self.rows_lost += 1
            log.exception("a tick cannot be saved")
        else:
            if self._trouble is not None:
                log.info("the database is back")
            self._trouble = None
            if tick.values.get("snapshot") is not None:
                self._settle(tick)

    def _put_by(self, tick: Tick) -> None:
        try:
            if not self._spool.append(tick.values):
                self.rows_lost += 1
            if tick.values.get("snapshot") is not None:
                self._put_state = tick
        except StorageError as e:
            self.rows_lost += 1
            log.warning("the spool cannot be written", error=str(e))
        tick.values = {}

    def _wait(self, task: Task[Any]) -> bool:
        """Give a task the time that patience allows; none while another one hangs."""
        left = self._patience_s - self._desk.busy_s()
        began = time.monotonic()
        while not task.done and left > 0:
            task.wait(min(left, 0.05))
            left = self._patience_s - max(self._desk.busy_s(), time.monotonic() - began)
        return task.done
