"""Is the budget kept, and how much speed is left? ``python -m bench.governor [--quick] --json``.

The real `Governor` steers traffic whose loss per touch only the benchmark knows (`bench.governor_plant`), 20,000
requests a window, ``fork_cold`` 1, ``fork_warm`` 0.05, a label for every drawn fork unless the scenario says otherwise,
with ``max_loss`` 0.01 and 0.05 and a loss per touch of 0.002 and 0.02. Keys, per scenario and overall:

- ``p_budget_exceeded``: share of windows whose true mean loss is above ``max_loss``;
- ``speed_kept``: speed gained over lossless decoding, over that of an oracle that knows the loss per touch and spends
  the same plan, after the first window; ``windows_to_80`` is the time to get to 0.8 of it;
- ``false_pullbacks_per_window``: holds, and halvings of the touches, while nothing is wrong;
- ``budget_spent_by_regression``: share of a window's budget spent from a sudden x10 of the loss until the knob fits it;
- ``recovery_time``: windows from the end of the regression until 0.8 of the oracle's gain is back;
- ``forks_per_request``: what the certainty costs; forks are capped in one case only, as by default.

Rivals on the same traffic: a plain burn-rate controller and a fixed knob, both set by the loss measured offline.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from bench.governor_plant import MOST, TICKS, F, Pilot, Scenario, gain, held_back, play
from bench.governor_rivals import CONFIDENCE, START, BurnRate, Fixed, Lenity
from bench.governor_rules import contest

LOSSES, KAPPAS = (0.01, 0.05), (0.002, 0.02)
FULL, QUICK = 125, 4  # windows for each max_loss and loss per touch, so 500 and 16 a scenario
GOALS = {
    "p_budget_exceeded": 1 - CONFIDENCE,
    "speed_kept": 0.8,
    "false_pullbacks_per_window": 0.1,
    "budget_spent_by_regression": 0.25,
}
DAY = 86_400.0


def rot(t: float) -> float:
    """Loss per touch that grows tenfold over ten windows."""
    return float(10 ** min(1.0, max(0.0, (t - 3) / 10)))


SCENARIOS = (
    Scenario("stationary good", 1.0),
    Scenario("stationary bad", 1.0, kappa=0.5, quiet=lambda t: False),
    Scenario("slow rot", 16.0, factor=rot, quiet=lambda t: t < 3 and t > 1.5),
    Scenario(
        "sudden x10",
        12.0,
        factor=lambda t: 10.0 if 5.5 <= t < 7.5 else 1.0,
        quiet=lambda t: 2.0 < t < 5.5,
        changed_at=5.5,
        ended_at=7.5,
    ),
    Scenario("labels 30 min late", 1.0, delay=1800 / DAY, deadline_s=3600.0),
    Scenario("scorer outage", 8.0, silent=lambda t: 4.0 <= t < 4.5, quiet=lambda t: 1.5 < t < 4.0),
    Scenario("traffic x10", 8.0, traffic=lambda t: 10.0 if 4 <= t < 6 else 1.0),
    # The loss does rise, so that no pull-back is false.
    Scenario("loss after loosening", 1.0, trigger=3.0, quiet=lambda t: False),
    Scenario("1 request a minute", 1.0, window_s=20_000 * 60.0),
    Scenario("forks capped as by default", 1.0, fork_passes_max=0.5),
)
PILOTS: dict[str, Callable[[Scenario, float, float], Pilot]] = {
    "lenity": lambda scenario, max_loss, kappa: Lenity(scenario, max_loss),
    "burn rate": BurnRate,
    "fixed": Fixed,
}


def measure(scenario: Scenario, log: dict[str, F], max_loss: float) -> dict[str, Any]:
    """Sums and lists of one run, from which `summary` makes the keys."""
    windows = len(log["tau"]) // TICKS
    loss = log["loss"][: windows * TICKS].reshape(windows, TICKS).sum(1)
    requests = log["requests"][: windows * TICKS].reshape(windows, TICKS).sum(1)
    plan = max_loss * (1 - START)
    tau = log["tau"]
    ours = gain(tau) * (1 - held_back(tau))
    oracle = gain(np.minimum(MOST, plan / log["kappa"]))
    settled = log["time"] >= 1
    smooth = np.convolve(ours / oracle, np.ones(TICKS // 10) / (TICKS // 10), mode="valid")
    there = np.flatnonzero(smooth >= 0.8)
    quiet = np.array([scenario.quiet(t % scenario.cycle) for t in log["time"]]) & settled
    drops, spent, recovery = false_pullbacks(tau, log["held"], quiet), [], []
    for start in range(0, windows, round(scenario.cycle)) if scenario.changed_at is not None else ():
        found = regression(scenario, log, start, ours / oracle, plan, max_loss)
        if found is not None:
            spent.append(found[0])
            recovery.append(found[1])
    return {
        "windows": windows,
        "exceeded": int((loss > max_loss * requests).sum()),
        "worst": float((loss / requests).max() / max_loss),
        "gain": float(ours[settled].sum()),
        "oracle": float(oracle[settled].sum()),
        "pullbacks": drops,
        "quiet": float(quiet.sum() / TICKS),
        "to_80": float((there[0] + TICKS // 10) / TICKS) if len(there) else None,
        "spent": spent,
        "recovery": recovery,
        "forks": float(log["forks"].sum()),
        "requests": float(log["requests"].sum()),
    }


def false_pullbacks(tau: F, held: F, quiet: F) -> int:
    """Times that leniency was held, or fell below half of its mean over the last fifth of a window, without cause."""
    count, calm, mean, back = 0, True, 0.0, TICKS // 5
    for i in range(back, len(tau)):
        mean = float(tau[i - back : i].mean())
        low = bool(held[i]) or tau[i] < 0.5 * mean
        if low and calm and quiet[i] and quiet[i - back]:
            count += 1
        calm = (calm and not low) or (tau[i] > 0.8 * mean and not held[i])
    return count


def regression(
    scenario: Scenario, log: dict[str, F], start: int, kept: F, plan: float, max_loss: float
) -> tuple[float, float] | None:
    """(share of a window's budget spent before the knob fitted, windows to recover) of one sudden regression."""
    assert scenario.changed_at is not None and scenario.ended_at is not None
    first, last = round((start + scenario.changed_at) * TICKS), round((start + scenario.ended_at) * TICKS)
    end = min(len(kept), round((start + scenario.cycle) * TICKS))
    if end - last < 2 * TICKS or kept[first - TICKS : first].mean() < 0.2:
        return None
    fits = np.flatnonzero(log["tau"][first:last] * log["kappa"][first:last] <= plan)
    reacted = int(fits[0]) if len(fits) else last - first
    budget = max_loss * log["requests"][first - TICKS : first].sum()
    back = np.flatnonzero(kept[last:end] >= 0.8)
    return float(log["loss"][first : first + reacted].sum() / budget), float(
        (back[0] if len(back) else end - last) / TICKS
    )


def run(job: tuple[str, int, float, float, int]) -> tuple[tuple[str, int, float, float], dict[str, Any]]:
    """One pilot on one scenario with one budget and loss per touch."""
    pilot, which, max_loss, kappa, windows = job
    scenario = SCENARIOS[which]
    rng = np.random.default_rng([which, round(max_loss * 1000), round(kappa * 1000)])
    base = kappa if scenario.kappa is None else scenario.kappa
    made = PILOTS[pilot](scenario, max_loss, base)
    return (pilot, which, max_loss, kappa), measure(scenario, play(scenario, kappa, made, rng, windows), max_loss)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The keys, over several runs."""
    windows, quiet = sum(r["windows"] for r in rows), sum(r["quiet"] for r in rows)
    spent, recovery = [v for r in rows for v in r["spent"]], [v for r in rows for v in r["recovery"]]
    to_80 = [r["to_80"] for r in rows]
    made = {
        "windows": windows,
        "p_budget_exceeded": round(sum(r["exceeded"] for r in rows) / windows, 5),
        "worst_window": round(max(r["worst"] for r in rows), 3),
        "speed_kept": round(sum(r["gain"] for r in rows) / max(1e-9, sum(r["oracle"] for r in rows)), 4),
        "windows_to_80": None if None in to_80 else round(float(np.mean([v for v in to_80 if v is not None])), 3),
        "false_pullbacks_per_window": round(sum(r["pullbacks"] for r in rows) / quiet, 4) if quiet else None,
        "forks_per_request": round(sum(r["forks"] for r in rows) / sum(r["requests"] for r in rows), 4),
    }
    if spent:
        made |= {
            "budget_spent_by_regression": round(float(np.mean(spent)), 4),
            "budget_spent_by_regression_worst": round(max(spent), 4),
            "recovery_time": round(float(np.mean(recovery)), 3),
        }
    return made


def bench(windows: int, rule_windows: int) -> dict[str, Any]:
    """Every pilot on every scenario."""
    began = time.perf_counter()
    jobs = [
        (pilot, which, max_loss, kappa, windows if pilot == "lenity" else max(4, windows // 5))
        for which, scenario in enumerate(SCENARIOS)
        for max_loss in LOSSES
        for kappa in (KAPPAS if scenario.kappa is None else KAPPAS[:1])
        for pilot in PILOTS
    ]
    jobs = [
        (p, w, m, k, max(n, round(SCENARIOS[w].cycle)) * (1 + (SCENARIOS[w].kappa is not None)))
        for p, w, m, k, n in jobs
    ]
    jobs.sort(key=lambda job: (job[0] != "lenity", -job[4] * (10 if job[1] == 6 else 1)))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rules = pool.submit(contest, rule_windows)
        found = dict(pool.map(run, jobs))
        raced = rules.result()
    result: dict[str, Any] = {"requests_a_window": 20_000, "goals": GOALS}
    for pilot in PILOTS:
        by_name = {}
        for which, scenario in enumerate(SCENARIOS):
            rows = {key: row for key, row in found.items() if key[:2] == (pilot, which)}
            by_name[scenario.name] = summary(list(rows.values()))
            if pilot == "lenity":
                cases = {f"max_loss {m:g}, loss per touch {k:g}": summary([row]) for (_, _, m, k), row in rows.items()}
                by_name[scenario.name]["cases"] = cases
        every = summary([row for key, row in found.items() if key[0] == pilot])
        result[pilot] = {"overall": every, "scenarios": by_name}
    result["rules"] = raced
    result["missed"] = missed(result["lenity"])
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def missed(lenity: dict[str, Any]) -> list[str]:
    """Goals that were not reached, in words."""
    out = []
    for name, row in lenity["scenarios"].items():
        if row["p_budget_exceeded"] > GOALS["p_budget_exceeded"]:
            out.append(f"{name}: p_budget_exceeded {row['p_budget_exceeded']}")
        if (row["false_pullbacks_per_window"] or 0.0) > GOALS["false_pullbacks_per_window"]:
            out.append(f"{name}: false_pullbacks_per_window {row['false_pullbacks_per_window']}")
        if row.get("budget_spent_by_regression", 0.0) > GOALS["budget_spent_by_regression"]:
            out.append(f"{name}: budget_spent_by_regression {row['budget_spent_by_regression']}")
    good = lenity["scenarios"]["stationary good"]["cases"]
    out += [f"stationary good, {n}: speed_kept {r['speed_kept']}" for n, r in good.items() if r["speed_kept"] < 0.8]
    return out


def main() -> None:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="a few windows of each scenario")
    parser.add_argument("--windows", type=int, help="windows of each case (default 125, quick 4)")
    args = parser.parse_args()
    windows = args.windows or (QUICK if args.quick else FULL)
    result = bench(windows, 12 if args.quick else 100)
    if not args.json:
        for name, row in result["lenity"]["scenarios"].items():
            print(f"{name:22} " + "  ".join(f"{k} {v}" for k, v in row.items() if k != "cases"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
