"""Rules that compete: ``[forgive, threshold, token_v3]``, starting at the worst, with the losses of the bundled pair.

Speed by touches per request and loss per touch of each rule are those measured on the pair's word problems
(docs/data/frontier.json); the contest and the governor are the real ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.governor_plant import HOLDBACK, REQUESTS, TICKS, Batch, F, Scenario, serve
from bench.governor_rivals import policy_for
from controller.contest import Contest
from controller.governor import Governor

RULES = ("forgive", "threshold", "token_v3")
# Touches per request -> speed over plain decoding, and loss per touch (sums over the sweep), of each rule.
PACES: dict[str, tuple[F, F]] = {
    "forgive": (
        np.array([0.0, 0.386, 0.774, 1.616, 3.312, 4.958, 6.588]),
        np.array([2.296, 2.340, 2.391, 2.481, 2.718, 2.980, 3.274]),
    ),
    "threshold": (
        np.array([0.0, 0.108, 0.702, 1.798, 5.632, 5.980]),
        np.array([2.296, 2.309, 2.394, 2.535, 3.139, 3.212]),
    ),
    "token_v3": (
        np.array([0.0, 0.098, 1.678, 1.846, 5.656, 5.958]),
        np.array([2.296, 2.310, 2.515, 2.542, 3.152, 3.206]),
    ),
}
LOSS_PER_TOUCH = {"forgive": 0.115, "threshold": 0.0038, "token_v3": 0.0019}
TOKENS = 100  # a request


def pace(rule: str, d_allowed: float) -> float:
    """Seconds per token, in passes of plain decoding, at ``d_allowed`` touches per token."""
    touches, speed = PACES[rule]
    return 1.0 / float(np.interp(d_allowed * TOKENS, touches, speed))


def contest(windows: int, max_loss: float = 0.01) -> dict[str, Any]:
    """Runs of up to 20 windows each: which rule they end at, after how many requests, and how often they overspend."""
    runs = [race(seed, 20 if windows >= 20 else windows, max_loss) for seed in range(max(1, windows // 20))]
    exceeded = [v for r in runs for v in r["exceeded"]]
    switched = [r["requests_to_last_switch"] for r in runs]
    return {
        "rules": list(RULES),
        "loss_per_touch": LOSS_PER_TOUCH,
        "max_loss": max_loss,
        "ends_at": sorted({r["ends_at"] for r in runs}),
        "ended_at_token_v3": round(sum(r["ends_at"] == "token_v3" for r in runs) / len(runs), 3),
        "path": runs[0]["path"],
        "requests_needed": round(float(np.mean(switched))),
        "windows": len(exceeded),
        "p_budget_exceeded": round(float(np.mean(exceeded)), 4),
    }


def race(seed: int, windows: int, max_loss: float) -> dict[str, Any]:
    """One run that starts at the first rule."""
    rng = np.random.default_rng([77, seed])
    scenario = Scenario("rules", 1.0)
    governor, rivals = Governor(policy_for(scenario, max_loss, RULES), RULES[0]), Contest()
    dt, path, requests, at_switch = scenario.window_s / TICKS, [RULES[0]], 0, 0
    loss, served = np.zeros(windows), np.zeros(windows)
    now = 0.0
    for i in range(windows * TICKS):
        allowance = governor.decide(now)
        verdict = rivals.decide(governor, RULES, allowance, pace, now)
        if verdict.reason == "rule_switched":
            allowance = governor.decide(now)
            path.append(governor.rule)
            at_switch = requests
        arms = [(governor.rule, allowance.tau_allowed, 1.0)]
        trial = None
        if verdict.trial is not None:
            trial = verdict.trial, verdict.tau
            arms = [(governor.rule, allowance.tau_allowed, 1 - verdict.share), (*trial, verdict.share)]
        governor.leased(1, i + 1, min(allowance.tau_allowed, most(governor.rule)), trial)
        now += dt
        for rule, tau, share in arms:
            count = int(rng.poisson(share * REQUESTS / TICKS))
            batch = serve(rng, count, min(tau, most(rule)), allowance.fork, LOSS_PER_TOUCH[rule])
            tell(governor, now, (1, i + 1), rule, allowance.fork, batch, f"{rule}{i}")
            loss[i // TICKS] += batch.expected_loss
            served[i // TICKS] += count
            requests += count
    return {
        "ends_at": governor.rule,
        "path": path,
        "requests_to_last_switch": at_switch,
        "exceeded": (loss > max_loss * served).tolist(),
    }


def most(rule: str) -> float:
    """Touches per request of a rule's widest knob."""
    return float(PACES[rule][0][-1])


def tell(
    governor: Governor, now: float, lease: tuple[int, int], rule: str, fork: float, batch: Batch, key: str
) -> None:
    """Hand a batch and its labels to the governor."""
    governor.observe_requests(
        now,
        lease,
        requests=batch.requests,
        tokens=TOKENS * batch.requests,
        touched=batch.touched,
        touches=batch.touches,
        fork_prob=fork,
        arm=rule,
    )
    if batch.forks:
        weight = (1 - HOLDBACK) / fork
        governor.observe_forks(key, now, lease, count=batch.forks, touches=batch.fork_touches, weight=weight, arm=rule)
        governor.observe_labels(key, batch.lost, batch.lost, now)
