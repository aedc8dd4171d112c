"""Whether leniency gains by position: ``python -m bench.positions [--quick] --json`` (bundled pair, one thread).

At one knob theta, so with touches of one kind, an allowance of touches per token is spent in two ways: at every
position with the same mixing weight rho, or at the first positions in full and at later ones not at all. Tokens per
round are predicted from recorded rounds for the best of either, and checked by decoding with both. The controller's own
path (theta rises with full weight) is shown beside them; its touches are of a milder kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.offpolicy import IN_USE, G, curve_of, play
from controller.solve import plan_for
from decoder.demo.pair import load_pair
from decoder.demo.simulation import fresh_problems
from policies.rules import Scalars, accept_prob, get_rule, lossless_accept

F = npt.NDArray[np.float64]
RULE = "token_v3"
ALLOWED = (0.0025, 0.005, 0.01, 0.02, 0.04)
THETAS = (0.8, 0.9)


def outcome(a0: F, a: F, weights: F) -> tuple[float, float]:
    """(tokens per round, touches per token) of rounds [rounds, G] with mixing weights by position."""
    accept = a0 + weights * (a - a0)
    alive = np.cumprod(accept, axis=1)
    before = np.column_stack((np.ones(len(alive)), alive[:, :-1]))
    tokens = 1 + float(alive.sum(axis=1).mean())
    return tokens, float((before * (accept - a0)).sum(axis=1).mean()) / tokens


def uniform(x: float) -> F:
    """The same weight everywhere, for x in [0, 1]."""
    return np.full(G, x)


def front(x: float) -> F:
    """Full weight at the first x G positions, what is left over at the next."""
    return np.clip(x * G - np.arange(G), 0.0, 1.0)


def spend(a0: F, a: F, allowed: float, shape: Callable[[float], F]) -> tuple[float, F]:
    """(tokens per round, weights) where touches per token reach what is allowed; bisection, since they rise with x."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if outcome(a0, a, shape(middle))[1] <= allowed else (low, middle)
    return outcome(a0, a, shape(low))[0], shape(low)


def measure(recorded: int, decoded: int, check: bool) -> dict[str, Any]:
    """All figures; ``recorded`` and ``decoded`` are numbers of problems."""
    pair = load_pair()
    played = play(pair, fresh_problems(271828, recorded, "easy"), *IN_USE, record=True)
    blocks = Scalars(*(np.concatenate(columns) for columns in zip(*played.recorded, strict=True)))
    curve = curve_of(RULE, played.recorded)
    a0 = np.asarray(lossless_accept(blocks), dtype=float)
    lossless = outcome(a0, a0, uniform(0))[0]
    fresh = fresh_problems(141421, decoded, "easy")
    rows = []
    for theta in THETAS:
        a = np.asarray(accept_prob(get_rule(RULE), blocks, theta), dtype=float)
        for allowed in ALLOWED:
            even, even_weights = spend(a0, a, allowed, uniform)
            early, early_weights = spend(a0, a, allowed, front)
            plan = plan_for(curve, d_allowed=allowed, pessimism=0.0)
            row = {
                "theta": theta,
                "allowed": allowed,
                "uniform": round(even, 4),
                "front": round(early, 4),
                "path": round(float(plan.front.tokens[G]), 4),
                "path_theta": float(curve.settings.theta[plan.front.level[G]]),
                "gain": round(early / even - 1, 5),
            }
            if check and theta == THETAS[0] and allowed in (0.01, 0.04):
                for name, weights in (("uniform", even_weights), ("front", early_weights)):
                    run = play(pair, fresh, RULE, theta, weights=weights.tolist(), seed=1000)
                    row[f"{name}_decoded"] = round(run.tokens_per_round, 4)
                    row[f"{name}_decoded_touches"] = round(run.touches_per_token, 5)
            rows.append(row)
    return {
        "largest_gain": max(row["gain"] for row in rows),
        "lossless_tokens_per_round": round(lossless, 4),
        "rounds": len(a0),
        "rows": rows,
    }


def main() -> None:
    """Print the figures, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer problems, no check by decoding")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(60, 0, check=False) if args.quick else measure(150, 220, check=True)
    print(json.dumps(found, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
