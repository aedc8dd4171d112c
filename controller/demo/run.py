"""The phases of the demo, each of which must be seen to happen. Exit code 0 only if every one did."""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from controller.demo.plot import plot_run
from controller.demo.show import Phase, Screen
from controller.demo.stage import POOL, TICK_S, TTL_S, Stage
from controller.demo.summary import print_summary
from storage.errors import StorageError
from storage.history import History
from storage.records import RequestRecord

T = TypeVar("T")

DEMO_POLICY = Path(__file__).parents[2] / "policies" / "defaults" / "demo.yaml"

WIDENING = ("steady", "step_up", "waiting_for_labels")  # reasons that come and go while leniency widens
REPEAT_S = 12.0
SETTLED_S = 6.0
IN_USE = 5.0  # touches per request before quality is made to drop: few of them would do too little harm for an alert

PHASES = (
    ("a", "Lossless baseline: no controller yet, so the worker decodes losslessly"),
    ("b", "Leniency opens: certified first, then measured; speed rises"),
    ("c", "Traffic shifts to longer sums: acceptance falls, g* is re-solved"),
    ("d", "Quality regression: the budget burns, leniency is pulled back, an alert fires"),
    ("e", "The cause is gone: leniency recovers in steps"),
    ("f", "The policy file is edited while it runs: a bad edit is refused, a good one obeyed"),
    ("g", "The controller is killed: the worker turns lossless by itself; a new one takes over"),
)


@dataclass(frozen=True)
class Sizes:
    """How much each phase waits for."""

    baseline_requests: int
    opened_touches: float
    fewer_passes: float
    recovered_touches: float
    hold_s: float


FULL = Sizes(baseline_requests=150, opened_touches=6.0, fewer_passes=0.1, recovered_touches=1.0, hold_s=4.0)
SHORT = Sizes(baseline_requests=40, opened_touches=6.0, fewer_passes=0.05, recovered_touches=0.2, hold_s=2.0)


class PhaseFailed(Exception):
    """What a phase is about was not seen in time."""


class Run:
    """One run of the demo on a stage."""

    def __init__(self, stage: Stage, screen: Screen, phases: dict[str, Phase], sizes: Sizes, policy_text: str):
        self.stage, self.screen, self.phases, self.sizes = stage, screen, phases, sizes
        self.policy_text = policy_text
        self.lossless_records: list[RequestRecord] = []
        self._last_topic, self._said = "", 0.0
        self._lengths: list[tuple[float, float]] = []  # when, and the block length then

    # -- phases --------------------------------------------------------------------------------------------------------

    def baseline(self, phase: Phase) -> None:
        """(a) Workers alone: lossless, and measured."""
        self.stage.world({"domain": "easy", "scorer": "exact"})
        self.stage.start_workers()
        records = self.wait(
            lambda: self._at_least(phase.started, self.sizes.baseline_requests), 90, "the worker serves requests"
        )
        if any(r.theta > 0 or r.touches for r in records):
            raise PhaseFailed("a request was served leniently without a lease")
        self.lossless_records = records
        phase.seen.append(f"{len(records)} requests, all lossless, {_pace(records)}")

    def opening(self, phase: Phase) -> None:
        """(b) The controller starts, certified leniency opens, evidence widens it."""
        self.stage.start_controller()
        self.wait(self.stage.ready, 30, "the controller is ready")
        c = self.wait_class(lambda c: c["theta"] > 0, 40, "leniency opens")
        phase.seen.append(f"{c['state']}: {c['touches_per_request_allowed']:.2f} touches per request allowed")
        c = self.wait_class(
            lambda c: c["state"] == "measured" and c["touches_per_request_allowed"] >= self.sizes.opened_touches,
            200,
            "evidence widens leniency",
        )
        phase.seen.append(
            f"measured: {c['forks_matured']} paired answers bound the loss per touch at {c['u_kappa']:.3f}, "
            f"{c['touches_per_request_allowed']:.1f} touches per request allowed"
        )
        since = time.time()
        # Target passes are what leniency saves; seconds also show whatever else the machine is doing.
        goal = _passes(self.lossless_records) * (1 - self.sizes.fewer_passes)

        def faster() -> list[RequestRecord] | None:
            records = self.stage.served_since(since)
            enough = len(records) >= 0.3 * self.sizes.baseline_requests
            return records if enough and _passes(records) <= goal else None

        records = self.wait(faster, 60, "fewer target passes per token than the baseline")
        phase.seen.append(f"{_pace(records)}; the baseline had {_pace(self.lossless_records)}")

    def shift(self, phase: Phase) -> None:
        """(c) Harder traffic: acceptance falls and another block length is best."""
        acceptance = self._class()["acceptance"]
        lengths = [self._mean_length(SETTLED_S)]
        self.stage.world({"domain": "hard"})

        def resolved(c: dict[str, Any]) -> bool:
            lengths.append(self._mean_length(SETTLED_S))
            return (c["acceptance"] or 1) < acceptance - 0.05 and lengths[-1] <= max(lengths) - 0.6

        c = self.wait_class(resolved, 60, "acceptance falls and g is re-solved")
        phase.seen.append(
            f"acceptance {acceptance:.2f} → {c['acceptance']:.2f}, "
            f"g {max(lengths):.1f} → {lengths[-1]:.1f} (means over {SETTLED_S:g} s)"
        )
        self._hold(self.sizes.hold_s)

    def regression(self, phase: Phase) -> None:
        """(d) The usual traffic is back, and what used to be harmless now hurts."""
        self.stage.world({"domain": "easy"})
        before = self.wait_class(
            lambda c: c["theta"] > 0 and (c["touches_per_request_seen"] or 0) >= IN_USE, 45, "leniency is in full use"
        )
        since = time.time()
        self.stage.world({"scorer": "strict"})
        c = self.wait_class(
            lambda c: c["theta"] == 0 and any(a["firing"] for a in c["alerts"]),
            120,
            "leniency is pulled back and an alert fires",
        )
        seconds = time.time() - since
        firing = ", ".join(a["name"] for a in c["alerts"] if a["firing"])
        phase.seen.append(
            f"theta {before['theta']:.2f} → 0 within {seconds:.1f} s, alert {firing}, "
            f"budget left {before['remaining']:.0%} → {c['remaining']:.0%}"
        )
        records = self.wait(lambda: self._lossless_since(time.time() - 2 * TTL_S, 5), 30, "requests are lossless again")
        phase.seen.append(f"{len(records)} requests since are lossless")

    def recovery(self, phase: Phase) -> None:
        """(e) Steps up on fresh evidence."""
        self.stage.world({"scorer": "exact"})
        levels: list[float] = []

        def recovered(c: dict[str, Any]) -> bool:
            allowed = c["touches_per_request_allowed"]
            if allowed > 0 and (not levels or abs(allowed - levels[-1]) > 0.01):
                levels.append(allowed)
            enough = allowed >= max(2 * levels[0], self.sizes.recovered_touches) if levels else False
            return c["theta"] > 0 and c["state"] == "measured" and len(levels) >= 3 and enough

        c = self.wait_class(recovered, 200, "leniency recovers in steps")
        shown = " → ".join(f"{x:.2f}" for x in _thin(levels, 5))
        phase.seen.append(f"touches per request allowed {shown} on {c['forks_matured']} fresh paired answers")

    def edit(self, phase: Phase) -> None:
        """(f) A typo is refused with its place; a stricter policy takes effect."""
        revision = self._pool()["policy_revision"]
        max_loss = self._class()["max_loss"]
        self.stage.edit_policy(self.policy_text.replace("max_theta:", "max_thetta:"))
        pool = self.wait_pool(lambda p: p["policy_rejected"], 15, "the bad edit is refused")
        phase.seen.append(f"refused: {pool['policy_rejected'].splitlines()[0]}")
        if self._class()["max_loss"] != max_loss:
            raise PhaseFailed("a refused edit changed the policy")
        stricter = 0.9 * max_loss
        self.stage.edit_policy(re.sub(r"max_loss: [^,}\s]+", f"max_loss: {stricter:g}", self.policy_text, count=1))
        pool = self.wait_pool(
            lambda p: (
                not p["policy_rejected"]
                and p["policy_revision"] > revision
                and abs(p["classes"][0]["max_loss"] - stricter) < 1e-9
            ),
            15,
            "the good edit is obeyed",
        )
        phase.seen.append(f"revision {pool['policy_revision']} active: max_loss {max_loss:g} → {stricter:g}")

    def crash(self, phase: Phase) -> None:
        """(g) SIGKILL, lossless within the ttl, takeover."""
        self.wait_class(lambda c: c["theta"] > 0, 60, "leniency is in use before the crash")
        before = self._pool()
        killed = self.stage.kill_controller()
        self.screen.say("controller killed (SIGKILL)")
        records = self.wait(
            lambda: self._lossless_since(killed + TTL_S + 0.5, 10),
            40,
            "the worker serves losslessly without a controller",
        )
        lenient = [r.started for r in self.stage.served_since(killed) if r.theta > 0]
        latest = max(lenient, default=killed) - killed
        if latest > TTL_S + 0.5:
            raise PhaseFailed(f"a request began leniently {latest:.1f} s after the kill; the lease lasts {TTL_S:g} s")
        phase.seen.append(
            f"the last lenient request began {latest:.1f} s after the kill (lease {TTL_S:g} s), "
            f"{len(records)} lossless requests served meanwhile"
        )
        self.stage.start_controller()
        self.wait(self.stage.ready, 30, "the new controller is ready")
        pool = self.wait_pool(lambda p: p["epoch"] > before["epoch"], 20, "the new controller takes over")
        c = self.wait_class(lambda c: c["theta"] > 0, 60, "leniency is leased again")
        phase.seen.append(
            f"epoch {before['epoch']} → {pool['epoch']}, {c['forks_matured']} paired answers kept, "
            f"{c['touches_per_request_allowed']:.2f} touches per request allowed"
        )

    # -- seeing --------------------------------------------------------------------------------------------------------

    def run(self, phase: Phase, action: Callable[[Phase], None]) -> bool:
        """Run one phase; False when it was not seen to happen."""
        phase.state, phase.started = "running", time.time()
        self.screen.say(f"({phase.key}) {phase.title}")
        try:
            action(phase)
            phase.state = "done"
        except (PhaseFailed, RuntimeError, StorageError) as e:
            phase.state = "failed"
            phase.seen.append(str(e))
        phase.ended = time.time()
        self.screen.say(f"({phase.key}) {'seen' if phase.ok else 'FAILED'}: {'; '.join(phase.seen)}")
        return phase.ok

    def wait(self, look: Callable[[], T | None], seconds: float, what: str) -> T:
        """Look until there is something; raises PhaseFailed that says what was not seen."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.stage.check_alive()
            self._watch()
            if found := look():
                return found
            time.sleep(TICK_S / 2)
        raise PhaseFailed(f"not seen within {seconds:g} s: {what}")

    def wait_pool(self, good: Callable[[dict[str, Any]], Any], seconds: float, what: str) -> dict[str, Any]:
        """Wait until the pool as the API shows it is as wanted."""

        def look() -> dict[str, Any] | None:
            pool = self.stage.pool()
            return pool if pool is not None and good(pool) else None

        return self.wait(look, seconds, what)

    def wait_class(self, good: Callable[[dict[str, Any]], bool], seconds: float, what: str) -> dict[str, Any]:
        """Wait until the traffic class as the API shows it is as wanted."""
        pool = self.wait_pool(lambda p: good(p["classes"][0]), seconds, what)
        found: dict[str, Any] = pool["classes"][0]
        return found

    def _watch(self) -> None:
        pool = self.stage.pool()
        self.screen.update(pool)
        if pool is not None:
            c = pool["classes"][0]
            self._lengths = [*self._lengths[-199:], (time.monotonic(), float(c["g"]))]
            topic = c["state"] if c["reason"] in WIDENING else f"{c['state']}: {c['reason']}"
            if topic != self._last_topic or time.monotonic() > self._said + REPEAT_S:
                self._last_topic, self._said = topic, time.monotonic()
                self.screen.say(f"{c['state']}, g = {c['g']}, theta = {c['theta']:.2f}: {c['explanation']}")

    def _pool(self) -> dict[str, Any]:
        return self.wait_pool(lambda p: True, 10, "the controller answers")

    def _class(self) -> dict[str, Any]:
        found: dict[str, Any] = self._pool()["classes"][0]
        return found

    def _hold(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until, seconds + 5, "time passes")

    def _mean_length(self, seconds: float) -> float:
        """Mean block length leased over the last seconds."""
        recent = [g for at, g in self._lengths if at >= time.monotonic() - seconds]
        return statistics.fmean(recent or [g for _, g in self._lengths[-1:]])

    def _at_least(self, since: float, count: int) -> list[RequestRecord] | None:
        records = self.stage.served_since(since)
        return records if len(records) >= count else None

    def _lossless_since(self, since: float, count: int) -> list[RequestRecord] | None:
        """The newest requests since then, when at least `count` of the last ones in a row were lossless."""
        records = self.stage.served_since(since)
        tail = records[-count:]
        return records if len(tail) >= count and all(r.theta == 0 and r.touches == 0 for r in tail) else None


def run_demo(directory: Path, *, keep: bool, short: bool, port: int, workers: int, seed: int) -> int:
    """Run the demo below `directory` (emptied first); returns 0 when every phase was seen, else 1."""
    console = Console()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    policy_text = DEMO_POLICY.read_text()
    phases = [Phase(key, title) for key, title in PHASES]
    by_key = {p.key: p for p in phases}
    started = time.time()
    with Stage(directory.resolve(), policy_text, workers=workers, port=port, seed=seed) as stage:
        with Screen(phases, stage.url, console) as screen:
            screen.say(f"logs, database and picture go to {directory}; the page is at {stage.url}")
            run = Run(stage, screen, by_key, SHORT if short else FULL, policy_text)
            actions = (run.baseline, run.opening, run.shift, run.regression, run.recovery, run.edit, run.crash)
            for phase, action in zip(phases, actions, strict=True):
                if not run.run(phase, action):
                    break
            counts = settle(run, stage) if all(p.ok for p in phases) else None
        history = History(stage.database_url)
        try:
            picture = plot_run(history, POOL, phases, started, directory / "demo.png")
            ok = print_summary(console, history, POOL, phases, counts, picture, directory)
        finally:
            history.close()
        if keep:
            stage.start_workers()
            console.print(f"The page stays open at {stage.url}; Ctrl-C ends it.")
            wait_for_interrupt(stage)
    return 0 if ok else 1


def settle(run: Run, stage: Stage) -> tuple[int, int] | None:
    """Stop the workers, let the controller read the rest; (requests on the stream, requests in the database)."""
    stage.stop_workers()
    history = History(stage.database_url)
    try:

        def equal() -> tuple[int, int] | None:
            sent = stage.count_requests()
            kept = int(history.requests_between(POOL, 0.0, time.time() + 60)["requests"])
            return (sent, kept) if sent == kept else None

        return run.wait(equal, 20, "every request on the stream is in the database once")
    except PhaseFailed:
        return stage.count_requests(), int(history.requests_between(POOL, 0.0, time.time() + 60)["requests"])
    finally:
        history.close()


def wait_for_interrupt(stage: Stage) -> None:
    """Keep everything running until Ctrl-C."""
    try:
        while True:
            stage.check_alive()
            time.sleep(1)
    except KeyboardInterrupt:
        pass


def _passes(records: list[RequestRecord]) -> float:
    """Target passes per emitted token."""
    return sum(r.target_passes for r in records) / sum(r.tokens for r in records)


def _pace(records: list[RequestRecord]) -> str:
    """Passes per token, and tokens per second of request time (the median over requests)."""
    speed = statistics.median(r.tokens / r.total_s for r in records if r.total_s > 0)
    return f"{_passes(records):.3f} target passes per token, {speed:.0f} tokens/s"


def _thin(values: list[float], count: int) -> list[float]:
    if len(values) <= count:
        return values
    step = (len(values) - 1) / (count - 1)
    return [values[round(i * step)] for i in range(count)]
