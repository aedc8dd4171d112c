"""Run length to a false alarm, and delay, of the change detector: ``python -m bench.detect [--quick] --json``.

Streams are stationary with a mean near .8, in blocks of 256 examined tokens, several seeds each; a run length is all
tokens over all alarms, with its interval of 90 % (alarms as a Poisson count). Delays are of .8 to .6 after so many
tokens at .8: the median counts a change that is not found within `PATIENCE` tokens as found never.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from controller.detect import Detector

F = npt.NDArray[np.float64]
BLOCK, PATIENCE = 256, 3000
STEP = 8  # tokens looked at together after the change: a delay is known to within so many
LEARNT = (20_000, 2_000, 500)


def coins(rng: np.random.Generator, n: int) -> F:
    """Independent tokens at .8."""
    return (rng.random(n) < 0.8).astype(float)


def stretches(dwell: float, low: float, high: float) -> Callable[[np.random.Generator, int], F]:
    """Easy and hard stretches of a geometric number of tokens, in turn."""

    def values(rng: np.random.Generator, n: int) -> F:
        lengths = rng.geometric(1 / dwell, size=int(3 * n / dwell) + 10)
        level = np.where(np.arange(len(lengths)) % 2 == 0, low, high)
        return (rng.random(n) < np.repeat(level, lengths)[:n]).astype(float)

    return values


STREAMS: dict[str, Callable[[np.random.Generator, int], F]] = {
    "independent": coins,
    "stretches_20": stretches(20, 0.65, 0.95),
    "stretches_50": stretches(50, 0.65, 0.95),
    "stretches_200": stretches(200, 0.7, 0.9),
}


def run_length(name: str, runs: int, tokens: int) -> dict[str, Any]:
    """Tokens per false alarm over all runs, its interval, and alarms by run."""
    alarms = []
    for seed in range(runs):
        detector, values = Detector(), STREAMS[name](np.random.default_rng([5, seed]), tokens)
        for i in range(0, tokens, BLOCK):
            part = values[i : i + BLOCK]
            detector.add(np.ones(len(part)), part)
        alarms.append(detector.alarms)
    total, count = runs * tokens, sum(alarms)
    most, least = chi2.ppf(0.95, 2 * count + 2) / 2, chi2.ppf(0.05, 2 * count) / 2 if count else 0.0
    return {
        "run_length": round(total / count) if count else None,
        "at_least": round(total / most),
        "at_most": round(total / least) if least else None,
        "alarms": alarms,
        "tokens_a_run": tokens,
    }


def delay(learnt: int, runs: int) -> dict[str, Any]:
    """Median delay in examined tokens, and the share of changes not found in `PATIENCE`."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng([6, seed])
        detector, values = Detector(), coins(rng, learnt)
        for i in range(0, learnt, BLOCK):
            part = values[i : i + BLOCK]
            detector.add(np.ones(len(part)), part)
        at = math.inf
        for i in range(0, PATIENCE, STEP):
            if detector.add(np.ones(STEP), (rng.random(STEP) < 0.6).astype(float)) is not None:
                at = i + STEP
                break
        found.append(at)
    median = float(np.median(found))
    return {"median": median if math.isfinite(median) else None, "never": float(np.mean(np.isinf(found)))}


def measure(runs: int, tokens: int, changes: int) -> dict[str, Any]:
    """All figures."""
    lengths = {name: run_length(name, runs, tokens) for name in STREAMS}
    delays = {str(learnt): delay(learnt, changes) for learnt in LEARNT}
    known = [row["run_length"] for row in lengths.values() if row["run_length"]]
    return {
        "least_run_length": min(known, default=None),
        "median_delay": delays[str(LEARNT[0])]["median"],
        "run_lengths": lengths,
        "delays": delays,
    }


def main() -> None:
    """Print the figures, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    found = measure(3, 200_000, 20) if args.quick else measure(8, 1_000_000, 100)
    print(json.dumps(found, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
