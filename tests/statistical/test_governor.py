"""The closed loop in simulation: a governor steers a plant whose loss per touch it does not know."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import controller.evidence
from controller.governor import Allowance, Governor
from policies.model import ClassPolicy, PageRule
from storage.records import ForkRecord, QualityScore, RequestRecord

DEMO = ClassPolicy(
    pool="p",
    traffic_class="default",
    metric="correct",
    max_loss=0.2,
    window_s=60.0,
    confidence=0.95,
    rules=("token_v3",),
    max_theta=1.0,
    structured="lossless",
    holdback=0.1,
    fork_cold=1.0,
    fork_warm=1.0,
    label_deadline_s=10.0,
    min_labels=80,
    g_max=8,
    explore=0.0,
    start=0.2,
    stop=0.05,
    cooldown_s=10.0,
    max_step_up=0.1,
    page=(PageRule(10.0, 3.0, 0.4),),
)


class Plant:
    """Workers, traffic and a scorer. ``loss(t)`` is the true loss per touch, ``label(t, z)`` a label's delay or None.

    A touched request with T touches is lost (z = 1) with probability ``min(1, T loss)``; ``ties`` adds differences of
    -1 and +1 with that probability each, which cancel. Requests arrive at a steady rate and take one second.
    """

    def __init__(
        self,
        policy: ClassPolicy,
        rng: np.random.Generator,
        *,
        rate: float,
        loss: Callable[[float], float],
        ties: float = 0.02,
        label: Callable[[float, float], float | None] = lambda t, z: 1.0,
        tick_s: float = 1.0,
        tau_max: float = 8.0,
    ):
        self.policy, self.rng, self.rate, self.loss, self.ties, self.label = policy, rng, rate, loss, ties, label
        self.tick_s, self.tau_max = tick_s, tau_max
        self.governor = Governor(policy, "token_v3")
        self.window: deque[tuple[float, int, float]] = deque()  # per tick: time, requests, true loss
        self.lost = self.requests = 0.0
        self._number = self._seq = 0
        self._due: list[tuple[float, int, str, float, float, int]] = []
        self._carry = 0.0

    def run(self, until: float, start: float = 0.0) -> Iterator[tuple[float, Allowance, float]]:
        """Yields (time, allowance, true loss per request over the last window) after every tick."""
        now = start
        while now < until:
            now += self.tick_s
            allowance = self.governor.decide(now)
            tau = min(allowance.tau_allowed, self.tau_max)
            self._seq += 1
            self.governor.leased(1, self._seq, tau)
            self._serve(now, tau, allowance)
            self._label(now)
            while self.window[0][0] <= now - self.policy.window_s:
                _, requests, lost = self.window.popleft()
                self.requests, self.lost = self.requests - requests, self.lost - lost
            yield now, allowance, self.lost / max(1.0, self.requests)

    def _serve(self, now: float, tau: float, allowance: Allowance) -> None:
        self._carry += self.rate * self.tick_s
        n, self._carry = int(self._carry), self._carry % 1
        touches = self.rng.poisson(tau, n)
        per_touch = self.loss(now)
        lost = 0.0
        for t in touches:
            holdback = t > 0 and self.rng.random() < allowance.holdback
            fork = t > 0 and self.rng.random() < allowance.fork
            chance = min(1.0, t * per_touch)
            lost += 0.0 if holdback else chance
            u = self.rng.random()
            z = 1.0 if u < chance + self.ties else -1.0 if u < chance + 2 * self.ties else 0.0
            self._request(now, int(t), holdback, fork, allowance, z)
        self.requests, self.lost = self.requests + n, self.lost + lost
        self.window.append((now, n, lost))

    def _request(self, now: float, t: int, holdback: bool, fork: bool, allowance: Allowance, z: float) -> None:
        self._number += 1
        arm = "untouched" if t == 0 else "holdback" if holdback else "lenient"
        self.governor.observe_request(
            request(
                f"r{self._number}",
                arm=arm,
                touches=min(t, 1) if holdback else t,
                fork=fork,
                fork_prob=allowance.fork,
                seq=self._seq,
            ),
            now,
        )
        if fork:
            delay = self.label(now, z)
            if delay is not None:
                heapq.heappush(self._due, (now + delay, self._number, arm, z, now, t))

    def _label(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, number, arm, z, _, t = heapq.heappop(self._due)
            lossless, lenient = {1.0: (1.0, 0.0), 0.0: (1.0, 1.0), -1.0: (0.0, 1.0)}[z]
            served, other = (lenient, lossless) if arm == "lenient" else (lossless, lenient)
            self.governor.observe_fork(fork(f"r{number}", touches=t), now)
            self.governor.observe_score(score(f"r{number}", "served", served), now)
            self.governor.observe_score(score(f"r{number}", "fork", other), now)


def request(key: str, *, arm: str, touches: int, fork: bool, fork_prob: float, seq: int) -> RequestRecord:
    """A served request of the plant."""
    return RequestRecord(
        request_id=key, pool="p", traffic_class="default", worker="w", boot="b", epoch=1, lease_seq=seq,
        rule="token_v3", theta=0.5, rho=1.0, arm=arm, holdback_prob=0.1, fork_prob=fork_prob, label_prob=1.0,  # type: ignore[arg-type]
        fork_drawn=fork, label_drawn=fork, touches=touches, first_touch_at=0.5 if touches else None, started=0.0,
        prompt_tokens=10, tokens=40, target_passes=10, first_token_s=0.1, total_s=1.0, finish_reason="stop",
    )  # fmt: skip


def fork(key: str, touches: int) -> ForkRecord:
    """A fork that ran."""
    return ForkRecord(key, "p", "default", "w", "b", True, touches, 30, 8, 0.8)


def score(key: str, branch: str, value: float, version: str = "1") -> QualityScore:
    """One branch's score."""
    return QualityScore(key, "p", "default", branch, "correct", value, "exact", version, 0.0)  # type: ignore[arg-type]


def harmless(_: float) -> float:
    """No touch loses anything."""
    return 0.0


def test_leniency_climbs_within_a_window_when_touches_are_harmless() -> None:
    """8 requests a second and a budget of 0.2: from 0.16 certified touches a request to about 4 in one minute."""
    plant = Plant(DEMO, np.random.default_rng(1), rate=8.0, loss=harmless)
    tau = {now: a.tau_allowed for now, a, _ in plant.run(75.0)}
    assert tau[3.0] == pytest.approx(0.16)
    assert tau[20.0] < 1.0
    assert 3.0 <= tau[62.0] <= 8.0
    assert 4.0 <= tau[75.0] <= 10.0


def test_a_small_budget_widens_by_about_doubling() -> None:
    """20,000 requests a window and a budget of 0.01: no decision more than quadruples the touches, and they grow."""
    policy = dataclasses.replace(
        DEMO, max_loss=0.01, window_s=3600.0, label_deadline_s=60.0, min_labels=200, page=(PageRule(600, 60, 0.3),)
    )
    plant = Plant(policy, np.random.default_rng(2), rate=20_000 / 3600, loss=harmless, ties=0.0, tick_s=5.0)
    taus = [a.tau_allowed for _, a, _ in plant.run(1500.0)]
    first = next(i for i, tau in enumerate(taus) if tau > 0)
    assert taus[first] == pytest.approx(0.008)
    ratios = [b / a for a, b in itertools.pairwise(taus[first:])]
    assert max(ratios) < 4.0
    assert taus[-1] > 0.2


def exceeded(
    loss: Callable[[np.random.Generator], Callable[[float], float]], runs: int, seed: int, **plant: object
) -> float:
    """Share of windows (four to a run) whose true mean loss exceeds the policy's."""
    bad = 0
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        p = Plant(DEMO, rng, rate=8.0, loss=loss(rng), **plant)  # type: ignore[arg-type]
        bad += sum(true > DEMO.max_loss for now, _, true in p.run(240.0) if now % 60 == 0)
    return bad / (4 * runs)


def constant(per_touch: float) -> Callable[[np.random.Generator], Callable[[float], float]]:
    """The same loss per touch at all times."""
    return lambda rng: lambda t: per_touch


def regression(rng: np.random.Generator) -> Callable[[float], float]:
    """Ten times the loss per touch from a random time on."""
    at = rng.uniform(40.0, 180.0)
    return lambda t: 0.01 if t < at else 0.1


# At most 2 of 40 windows may exceed the budget. A governor that exceeded it in exactly 5 % of them would fail this in
# about a third of seeds; this one exceeds it in none of 100 windows per case, and the seeds are fixed.
@pytest.mark.parametrize(
    ("name", "loss"),
    [("stationary good", constant(0.01)), ("stationary bad", constant(0.2)), ("sudden regression", regression)],
)
def test_true_loss_stays_within_the_budget(
    name: str, loss: Callable[[np.random.Generator], Callable[[float], float]]
) -> None:
    """Certified, measured and pulled back, the users' loss stays under the policy's in at least 95 % of windows."""
    assert exceeded(loss, 10, 7) <= 0.05, name


def lost_labels(t: float, z: float) -> float | None:
    """Labels that go missing exactly when the lenient answer was bad."""
    return None if z > 0 else 0.5


def test_labels_missing_when_bad_do_not_open_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the worst-case fill the budget holds; without it (negative control) most windows exceed it."""
    assert exceeded(constant(0.3), 6, 11, label=lost_labels, ties=0.0) <= 0.05
    monkeypatch.setattr(controller.evidence, "WORST", 0.0)
    monkeypatch.setattr(Governor, "_overdue", lambda self, now: 0)
    assert exceeded(constant(0.3), 6, 11, label=lost_labels, ties=0.0) > 0.3


def test_a_fast_burn_goes_lossless_and_recovers_in_steps() -> None:
    """Quality breaks, leniency stops within seconds and holds; when the cause is gone it opens again from certified."""
    plant = Plant(
        dataclasses.replace(DEMO, page=(PageRule(10.0, 3.0, 0.15),), fork_passes_max=10.0),
        np.random.default_rng(3),
        rate=8.0,
        loss=lambda t: 0.3 if 80 <= t < 100 else 0.0,
    )
    seen: list[tuple[float, Allowance, float]] = list(plant.run(240.0))
    breached = [now for now, a, _ in seen if a.state == "breached"]
    assert any(a.reason == "fast_burn" for _, a, _ in seen)
    assert 82 <= breached[0] <= 95
    assert all(a.tau_allowed == 0 for _, a, _ in seen if a.state == "breached")
    assert breached == [now for now, _, _ in seen if breached[0] <= now <= breached[-1]], "one hold, not several"
    after = [a for now, a, _ in seen if now > breached[-1]]
    assert after[0].evidence_epoch == 1 and after[0].tau_allowed <= 0.1601 and after[0].u_kappa == 1.0
    assert max(a.tau_allowed for a in after) > 1.0
    assert max(true for _, _, true in seen) <= DEMO.max_loss
