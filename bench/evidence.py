"""How many requests buy the same bound on the loss: ``python -m bench.evidence [--quick] --json``.

Three ways of measuring, at three shares P of touched requests, with the same true loss per request:

- *two-arm*: a tenth of all requests is decoded losslessly, every request is scored once;
- *holdback*: a tenth of the touched requests is, from the first touch on, and touched requests are scored once;
- *fork*: both continuations of every touched request are scored.

Each estimate is centred on a predictable mean, each bound is the anytime-valid one at 95 %. ``requests`` is the median
number of requests until the upper bound on the loss per request is below the target, ``labels`` how many scores that
took. Simulated: scores are right or wrong, `BASE` of them right without leniency.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.bounds import mixture_radius

BASE, LOSS, TARGET, HOLDBACK, SIGNIFICANCE, TIES = 0.95, 0.002, 0.01, 0.1, 0.05, 0.25
SHARES = (0.05, 0.2, 0.8)
CHUNK, MOST = 500, 2_000_000

F = npt.NDArray[np.float64]


def arms(rng: np.random.Generator, n: int, loss: float) -> F:
    """Differences by assignment, centred on the mean score (`controller.arms`)."""
    held = rng.random(n) < HOLDBACK
    score = (rng.random(n) < np.where(held, BASE, BASE - loss)).astype(float)
    return np.where(held, (score - BASE) / HOLDBACK, -(score - BASE) / (1 - HOLDBACK))


def forks(rng: np.random.Generator, n: int, loss: float) -> F:
    """Differences of pairs: lost, and ties of wrong answers that leniency moved about."""
    u = rng.random(n)
    swaps = TIES * loss
    return np.where(u < loss + swaps, 1.0, np.where(u > 1 - swaps, -1.0, 0.0))


def needed(way: str, share: float, rng: np.random.Generator) -> tuple[int, int]:
    """(requests, labels) until the bound on the loss per request is below the target."""
    part = 1.0 if way == "two-arm" else share  # the share of requests that is measured
    loss = LOSS / part
    requests = n = 0
    total = squares = 0.0
    while requests < MOST:
        requests += CHUNK
        count = int(rng.binomial(CHUNK, part))
        x = forks(rng, count, loss) if way == "fork" else arms(rng, count, loss)
        n, total, squares = n + count, total + float(x.sum()), squares + float((x * x).sum())
        scale = 1.0 if way == "fork" else 1 / (1 - HOLDBACK)
        if n and part * (total + mixture_radius(squares, SIGNIFICANCE, scale)) / n <= TARGET:
            break
    return requests, 2 * n if way == "fork" else n


def bench(runs: int) -> dict[str, Any]:
    """Medians over seeded runs."""
    result: dict[str, Any] = {"loss": LOSS, "target": TARGET, "holdback": HOLDBACK, "confidence": 1 - SIGNIFICANCE}
    for share in SHARES:
        row = {}
        for i, way in enumerate(("two-arm", "holdback", "fork")):
            found = [needed(way, share, np.random.default_rng([i, round(share * 100), run])) for run in range(runs)]
            requests, labels = (int(v) for v in np.median(np.array(found), axis=0))
            row[way] = {"requests": requests, "labels": labels}
        row["two-arm over holdback"] = round(row["two-arm"]["requests"] / row["holdback"]["requests"], 1)
        row["holdback over fork"] = round(row["holdback"]["requests"] / row["fork"]["requests"], 1)
        result[f"P(touched) {share:g}"] = row
    return result


def main() -> None:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="few runs")
    args = parser.parse_args()
    print(json.dumps(bench(3 if args.quick else 21)))


if __name__ == "__main__":
    main()
