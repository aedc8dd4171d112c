"""When things run: the control loop's tick, and jobs beside it.

The tick has a thread that waits on the monotonic clock: APScheduler decides what is due by wall time, and after a step
of an hour back it would not tick for an hour. Jobs that are due every few minutes run by APScheduler, in threads of
their own, so that none of them holds up a tick. Whatever is late runs once, however many times were missed; how many
were is logged and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC

import structlog
from apscheduler.schedulers.background import BackgroundScheduler

from controller.clock import elapsed_seconds
from controller.desk import Desk, Task

log = structlog.get_logger(__name__)

STOP_WITHIN_S = 10.0


class Ticker:
    """Calls `tick` every `interval_s`, never twice at a time. `missed` counts the ticks that did not run in time.

    A tick that raises is logged and counted, and the next one comes as planned; `stop_on` names the exceptions after
    which ticking makes no sense, for which `on_stop` is called once. `elapsed` is a clock that runs during suspend.
    """

    def __init__(
        self,
        tick: Callable[[float], None],
        now: Callable[[], float],
        interval_s: float,
        *,
        stop_on: tuple[type[Exception], ...] = (),
        on_stop: Callable[[Exception], None] = lambda _: None,
        elapsed: Callable[[], float] = elapsed_seconds,
    ):
        self._tick, self._now, self._stop_on, self._on_stop = tick, now, stop_on, on_stop
        self._elapsed = elapsed
        self.interval_s = interval_s
        self.ticks = 0
        self.missed = 0
        self.failures = 0
        self.last_failure: str | None = None
        self.last_success: float | None = None
        self._due: float | None = None  # on the `elapsed` clock
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lenity-tick", daemon=True)

    def start(self) -> None:
        """Tick once now, in the caller's thread, then go on by itself."""
        self.run_once()
        self._thread.start()

    def stop(self, seconds: float = STOP_WITHIN_S) -> bool:
        """Tick no more; waits for a running tick, for so many seconds, and says whether it ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def run_once(self) -> None:
        """One tick at the clock's time."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._count_missed()
            now = self._now()
            try:
                self._tick(now)
            except self._stop_on as e:
                self._stopping.set()
                self._on_stop(e)
            except Exception as e:
                self.failures += 1
                self.last_failure = f"{type(e).__name__}: {e}"
                log.exception("tick failed", failures=self.failures)
            else:
                self.ticks += 1
                self.last_success = now
                self.last_failure = None

    @property
    def next_due(self) -> float | None:
        """When the next tick is due, on the `elapsed` clock; None before the first."""
        return self._due

    def late(self, now: float) -> bool:
        """True when no tick has succeeded for two intervals (and at least two seconds)."""
        return self.last_success is None or now - self.last_success > max(2 * self.interval_s, 2.0)

    def _count_missed(self) -> None:
        """Plan the next tick a whole number of intervals after this one was due."""
        began = self._elapsed()
        due = began if self._due is None else self._due
        missed = max(0, int((began - due) / self.interval_s))
        if missed:
            self.missed += missed
            log.warning("ticks missed", missed=missed, late_s=round(began - due, 3))
        self._due = due + (missed + 1) * self.interval_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            # In short steps, since the wait stands still while the machine sleeps and `elapsed` does not.
            left = (self._due or 0.0) - self._elapsed()
            if left <= 0:
                self.run_once()
            else:
                self._stopping.wait(min(left, self.interval_s))


class Jobs:
    """Work beside the loop, each kind on a period of its own, one after the other in a thread of their own.

    `turn` says whether a job is this controller's to do now: of several controllers one gets the turn. A job that is
    still going on when it is due again, or was not started in time, is `missed`; counts are by name.
    """

    def __init__(
        self,
        turn: Callable[[str, float], bool] = lambda name, period_s: True,
        *,
        elapsed: Callable[[], float] = elapsed_seconds,
        desk: Desk | None = None,
    ):
        self._turn, self._elapsed = turn, elapsed
        self._desk = desk or Desk("lenity-jobs")
        self._last: dict[str, float] = {}
        self._running: dict[str, Task[None]] = {}
        self.runs: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self.failures: dict[str, int] = {}
        self._stopping = threading.Event()
        self._scheduler = BackgroundScheduler(daemon=True, timezone=UTC)

    def add(self, name: str, period_s: float, work: Callable[[], object]) -> None:
        """Do `work` every `period_s` seconds."""
        self._scheduler.add_job(
            self.due,
            "interval",
            (name, period_s, work),
            seconds=period_s,
            id=name,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
        )

    def due(self, name: str, period_s: float, work: Callable[[], object]) -> None:
        """Start a job, unless it is still going on, or another controller has the turn."""
        if self._stopping.is_set():
            return
        now = self._elapsed()
        late = int((now - self._last.get(name, now)) / period_s - 0.5)
        self._last[name] = now
        running = self._running.get(name)
        if running is not None and not running.done:
            late += 1
        if late > 0:
            self.missed[name] = self.missed.get(name, 0) + late
            log.warning("job missed its time", job=name, times=late)
        if running is None or running.done:
            self._running[name] = self._desk.submit(lambda: self._do(name, period_s, work))

    def start(self) -> None:
        """Start the schedule."""
        self._scheduler.start()

    @property
    def stopping(self) -> bool:
        """Whether work that can be interrupted should end."""
        return self._stopping.is_set()

    def stop(self, seconds: float = STOP_WITHIN_S) -> bool:
        """Start nothing more, and wait for what is under way, for so many seconds; whether it ended."""
        self._stopping.set()
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        return self._desk.close(seconds)

    def _do(self, name: str, period_s: float, work: Callable[[], object]) -> None:
        try:
            if not self._turn(name, period_s):
                return
            work()
        except Exception as e:
            self.failures[name] = self.failures.get(name, 0) + 1
            log.warning("job failed", job=name, error=f"{type(e).__name__}: {e}")
        else:
            self.runs[name] = self.runs.get(name, 0) + 1
