"""The scheduler: it only calls `tick(clock.now())`, once per interval and never twice at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
from apscheduler.schedulers.background import BackgroundScheduler

log = structlog.get_logger(__name__)


class Ticker:
    """Calls `tick` every `interval_s`. A late tick runs once, however many were missed (`coalesce`).

    A tick that raises is logged and counted, and the next one comes as planned; `stop_on` names the exceptions after
    which ticking makes no sense, for which `on_stop` is called once.
    """

    def __init__(
        self,
        tick: Callable[[float], None],
        now: Callable[[], float],
        interval_s: float,
        *,
        stop_on: tuple[type[Exception], ...] = (),
        on_stop: Callable[[Exception], None] = lambda _: None,
    ):
        self._tick, self._now, self._stop_on, self._on_stop = tick, now, stop_on, on_stop
        self.interval_s = interval_s
        self.ticks = 0
        self.failures = 0
        self.last_failure: str | None = None
        self.last_success: float | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._scheduler = BackgroundScheduler(daemon=True)
        self._scheduler.add_job(
            self.run_once, "interval", seconds=interval_s, coalesce=True, max_instances=1, misfire_grace_time=None
        )

    def start(self) -> None:
        """Tick once now, in the caller's thread, then start the schedule."""
        self.run_once()
        self._scheduler.start()

    def stop(self) -> None:
        """Stop the schedule; returns when a running tick has ended."""
        self._stopped = True
        if self._scheduler.running:
            self._scheduler.shutdown(wait=True)

    def run_once(self) -> None:
        """One tick at the clock's time."""
        with self._lock:
            if self._stopped:
                return
            now = self._now()
            try:
                self._tick(now)
            except self._stop_on as e:
                self._stopped = True
                self._on_stop(e)
            except Exception as e:
                self.failures += 1
                self.last_failure = f"{type(e).__name__}: {e}"
                log.exception("tick failed", failures=self.failures)
            else:
                self.ticks += 1
                self.last_success = now
                self.last_failure = None

    def late(self, now: float) -> bool:
        """True when no tick has succeeded for two intervals (and at least two seconds)."""
        return self.last_success is None or now - self.last_success > max(2 * self.interval_s, 2.0)
