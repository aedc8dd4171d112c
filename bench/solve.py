"""How many class tables the solver makes per second: ``python -m bench.solve [--quick] --json`` (one core).

A class table is what one tick computes for one traffic class: from a curve of blocks up to 16 tokens, the best block
length and knob for six batch buckets. Goal: 400 a second, that is 100 pools of 4 classes each, every second.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from controller.costs import BUCKETS
from controller.curve import Curve, settings_path
from controller.solve import plan_for

G_MAX, GOAL = 16, 400.0


def curves(count: int, seed: int = 0) -> list[Curve]:
    """Curves as the estimator makes them: a rule that jumps at other places in other contexts, with noise."""
    rng = np.random.default_rng(seed)
    settings = settings_path()
    made = []
    for _ in range(count):
        contexts = 16
        a0 = rng.beta(rng.uniform(1, 6), 1, size=(contexts, G_MAX))
        jump = rng.uniform(0, 1.2, size=(contexts, G_MAX))
        full = np.where((settings.theta[:, None, None] >= jump) & (settings.theta > 0)[:, None, None], 1.0, a0)
        accept = np.maximum(a0, full)
        after = np.cumprod(accept, axis=2)
        before = np.concatenate((np.ones_like(after[:, :, :1]), after[:, :, :-1]), axis=2)
        reach = np.concatenate((np.ones((len(settings), 1)), after.mean(axis=1)), axis=1)
        touched = np.cumsum((before * (accept - a0)).mean(axis=1), axis=1)
        touches = np.concatenate((np.zeros((len(settings), 1)), touched), axis=1)
        by_depth = np.ones((len(settings), G_MAX + 1, G_MAX + 1))
        for k in range(G_MAX + 1):
            mixed = np.where(np.arange(G_MAX) < k, accept, a0)
            by_depth[:, k, 1:] = np.cumprod(mixed, axis=2).mean(axis=1)
        made.append(Curve(settings, reach, touches, 0.02 * reach, 0.1 * touches, by_depth, np.full(G_MAX + 1, 500.0)))
    return made


def measure(seconds: float, seed: int = 0) -> dict[str, float]:
    """Tables per CPU second over at least ``seconds``, each of a curve that was not solved before."""
    rng = np.random.default_rng(seed)
    g = np.arange(G_MAX + 1)
    load = [(0.001 * g * (1 + b / 32), 0.02 * (1 + (0.02 + b / 64) * g), 0.001) for b in BUCKETS]
    allowed = 10 ** rng.uniform(-3.5, -1, size=64)
    tables = certified = answers = 0
    spent = 0.0
    while spent < seconds:
        fresh = curves(8, seed=seed + tables)
        began = time.process_time()
        for curve in fresh:
            plan = plan_for(curve, d_allowed=float(allowed[tables % len(allowed)]), max_theta=0.9)
            for parts in load:
                certified += plan.pick(*parts).certified
                answers += 1
            tables += 1
        spent += time.process_time() - began
    return {"solves_per_s": round(tables / spent, 1), "certified": certified / answers, "tables": tables, "goal": GOAL}


def main() -> None:
    """Print the figures, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about two seconds instead of twenty")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    found = measure(2.0 if args.quick else 20.0)
    print(json.dumps(found) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
