"""Why products within the round, and no averages per position: ``python -m bench.mixture --json`` (seconds of CPU).

Half of the requests are easy for the draft and half are hard: the recorded texts of the bundled pair
(`bench/data/bundled.npz`), as a plant whose drafts are accepted with the recorded probabilities. Blocks are `G` long
and the knob in use is 0. Then a late position is examined in easy requests mostly; a lenient knob would get there in
hard ones too. Two estimates of accepted tokens and touches at other knobs are compared with counts at the same round
starts: the products of the whole drafted block, and, as the negative control, acceptance per position averaged over
examined tokens and multiplied up. Deviations are in standard errors of the counts, by request;
the products see the counted drafts, but not their coins (`bench.offpolicy` drafts afresh).

Only the lossless probability is recorded, so the rules are those that read nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]
G = 12
KNOBS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RULES = ("threshold", "lenience")
FEW = 0.01  # touches a round below which a relative deviation means nothing
DATA = Path(__file__).with_name("data") / "bundled.npz"


def accept(rule: str, a0: F, theta: float) -> F:
    """Acceptance under a rule that reads only ``min(1, p/q)``, which is ``a0``."""
    return np.where(a0 >= 1 - theta, 1.0, a0) if rule == "threshold" else np.minimum(1.0, a0 / (1 - theta))


def round_starts(kinds: tuple[str, ...] = ("easy", "hard")) -> tuple[F, npt.NDArray[np.int64]]:
    """Lossless acceptance [rounds, G] of the blocks of a lossless run of length G, and the request of each."""
    blocks, requests, count = [], [], 0
    with np.load(DATA) as data:
        for kind in kinds:
            first = np.flatnonzero(data[f"{kind}_first"])
            ends = np.append(first[1:], len(data[f"{kind}_first"]))
            length, a0 = data[f"{kind}_length"], data[f"{kind}_accept"].astype(float)
            for start, end in zip(first.tolist(), ends.tolist(), strict=True):
                i = start
                while i + G < end:  # whole blocks only
                    blocks.append(a0[i : i + G])
                    requests.append(count)
                    i += min(G, int(length[i])) + 1
                count += 1
    return np.clip(np.array(blocks), 0.0, 1.0), np.array(requests)


def deviations(a0: F, requests: npt.NDArray[np.int64], rule: str, rng: np.random.Generator) -> dict[str, list[float]]:
    """(prediction - count) in standard errors at each knob, accepted tokens and touches: products and the control.

    ``relative`` is the control's deviation as a share of the count.
    """
    seen = np.cumprod(np.column_stack((np.ones(len(a0)), rng.random(a0.shape) <= a0))[:, :-1], axis=1)
    u = rng.random(a0.shape)
    found: dict[str, list[float]] = {"products": [], "control": [], "relative": []}
    for theta in KNOBS:
        a = accept(rule, a0, theta)
        alive = np.cumprod(u <= a, axis=1)
        reach = np.cumprod(a, axis=1)
        before = np.column_stack((np.ones(len(a)), reach[:, :-1]))
        rate, drift = ((v * seen).sum(axis=0) / seen.sum(axis=0) for v in (a, a - a0))
        naive = np.cumprod(np.concatenate(([1.0], rate)))
        rows = (
            (alive.sum(axis=1), reach.sum(axis=1), naive[1:].sum()),
            (((u > a0) & (alive > 0)).sum(axis=1), (before * (a - a0)).sum(axis=1), naive[:-1] @ drift),
        )
        for counted, product, control in rows:
            # Given the starts and what was drafted there, counts vary about the products: clusters are requests.
            error = float(np.sqrt((np.bincount(requests, counted - product) ** 2).sum()) / len(a0))
            if error > 0:
                found["products"].append(float((product - counted).mean()) / error)
                found["control"].append(float(control - counted.mean()) / error)
                if counted.mean() > FEW:
                    found["relative"].append(float(control / counted.mean() - 1))
    return found


def measure() -> dict[str, Any]:
    """Worst deviations by rule, in standard errors."""
    a0, requests = round_starts()
    rules = {}
    for rule in RULES:
        z = deviations(a0, requests, rule, np.random.default_rng(1))
        rules[rule] = {name: round(max(map(abs, values)), 3) for name, values in z.items()}
    return {
        "products_worst_standard_errors": max(row["products"] for row in rules.values()),
        "control_least_worst_standard_errors": min(row["control"] for row in rules.values()),
        "rounds": len(a0),
        "requests": len(np.unique(requests)),
        "rules": rules,
    }


def main() -> None:
    """Print the figures, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    print(json.dumps(measure(), indent=None if args.json else 1))


if __name__ == "__main__":
    main()
