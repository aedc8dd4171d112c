"""What steers in the governor's benchmark: the real `Governor`, a plain burn-rate controller, and a fixed knob."""

from __future__ import annotations

from collections import deque

from bench.governor_plant import HOLDBACK, MOST, TICKS, Batch, Scenario, fork_passes
from controller.governor import Governor
from policies.class_policy import highest_burn
from policies.model import ClassPolicy, PageRule, default_page

START, STOP, CONFIDENCE = 0.2, 0.05, 0.95


def policy_for(scenario: Scenario, max_loss: float, rules: tuple[str, ...] = ("token_v3",)) -> ClassPolicy:
    """The default policy over the scenario's window; forks may cost what the scenario allows them."""
    window_s = scenario.window_s
    page = default_page(window_s, highest_burn(max_loss, START))
    return ClassPolicy(
        pool="bench",
        traffic_class="default",
        metric="correct",
        max_loss=max_loss,
        window_s=window_s,
        confidence=CONFIDENCE,
        rules=rules,
        max_theta=0.9,
        structured="lossless",
        holdback=HOLDBACK,
        fork_cold=1.0,
        fork_warm=0.05,
        label_deadline_s=scenario.deadline_s,
        min_labels=200,
        g_max=8,
        explore=0.0,
        start=START,
        stop=STOP,
        cooldown_s=1800.0,
        max_step_up=0.1,
        page=tuple(PageRule(e.long, e.short, e.budget) for e in page),
        fork_passes_max=scenario.fork_passes_max,
    )


class Lenity:
    """The governor as it ships, fed by the tick."""

    def __init__(self, scenario: Scenario, max_loss: float):
        self.governor = Governor(policy_for(scenario, max_loss), "token_v3")
        self._seq, self._fork, self._tau, self.held = 0, 1.0, 0.0, False

    def decide(self, now: float) -> tuple[float, float]:
        """As `bench.governor_plant.Pilot`."""
        allowance = self.governor.decide(now)
        self._seq += 1
        self._fork, self.held = allowance.fork, allowance.state == "breached"
        self._tau = min(allowance.tau_allowed, MOST)
        self.governor.leased(1, self._seq, self._tau)
        return allowance.tau_allowed, allowance.fork

    def serve(self, now: float, batch: Batch, key: str) -> None:
        """Count what was served, and announce its forks."""
        lease = 1, self._seq
        self.governor.observe_requests(
            now,
            lease,
            requests=batch.requests,
            tokens=100 * batch.requests,
            touched=batch.touched,
            touches=batch.touches,
            fork_prob=self._fork,
            passes=batch.requests,
        )
        if batch.forks:
            weight = (1 - HOLDBACK) / self._fork
            self.governor.observe_forks(
                key,
                now,
                lease,
                count=batch.forks,
                touches=batch.fork_touches,
                weight=weight,
                passes=batch.forks * fork_passes(self._tau),
            )

    def label(self, now: float, batch: Batch, key: str) -> None:
        """The labels of a tick's forks."""
        self.governor.observe_labels(key, batch.lost, batch.lost, now)


class BurnRate:
    """A knob that was right for the loss measured offline; lossless for a cooldown when 1h/5m burn 14.4 (of 30 days).

    Burn is the plain share of forks that lost, over the plan; forks are drawn with the warm probability.
    """

    LONG, SHORT, FACTOR, COOLDOWN = 1 / 720, 1 / 8640, 14.4, 1 / 48

    def __init__(self, scenario: Scenario, max_loss: float, kappa: float):
        self._plan = max_loss * (1 - START)
        self._tau = min(MOST, self._plan / kappa)
        self._window_s, self._until = scenario.window_s, -1.0
        self._seen: deque[tuple[float, int, int, float]] = deque()  # time, requests, forks, lost
        self.held = False

    def decide(self, now: float) -> tuple[float, float]:
        """As `bench.governor_plant.Pilot`."""
        if min(self._burn(now, self.LONG), self._burn(now, self.SHORT)) > self.FACTOR:
            self._until = now + self.COOLDOWN * self._window_s
        self.held = now < self._until
        return (0.0 if self.held else self._tau), 0.05

    def _burn(self, now: float, window: float) -> float:
        since = now - max(window, 1.0 / TICKS) * self._window_s  # at least the last tick
        rows = [row for row in self._seen if row[0] > since]
        requests, lost = sum(r[1] for r in rows), sum(r[3] for r in rows)
        return lost / 0.05 / max(1, requests) / self._plan

    def serve(self, now: float, batch: Batch, key: str) -> None:
        """Nothing to count before the labels come."""

    def label(self, now: float, batch: Batch, key: str) -> None:
        """Remember the last labels."""
        self._seen.append((now, batch.requests, batch.forks, batch.lost))
        while len(self._seen) > 4:
            self._seen.popleft()


class Fixed:
    """The same knob always, right for the loss measured offline."""

    held = False

    def __init__(self, scenario: Scenario, max_loss: float, kappa: float):
        self._tau = min(MOST, max_loss * (1 - START) / kappa)

    def decide(self, now: float) -> tuple[float, float]:
        """As `bench.governor_plant.Pilot`."""
        return self._tau, 0.05

    def serve(self, now: float, batch: Batch, key: str) -> None:
        """Not looked at."""

    def label(self, now: float, batch: Batch, key: str) -> None:
        """Not looked at."""
