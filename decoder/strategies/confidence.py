"""How sure a drafter was of a whole answer: one number in [0, 1] from the probabilities of its tokens.

All are functions of the log-probabilities of the drafted tokens, given back as a probability so that one threshold
fits them all (Gupta et al. 2024, *Language model cascades: token-level uncertainty and beyond*): the mean is the
geometric mean of the tokens' probabilities, which a long answer dilutes; the minimum asks about the worst token; a low
quantile lies between the two. No token at all is no confidence (0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Confidence = Callable[[Sequence[float]], float]

QUANTILE = 0.1


def mean_confidence(probs: Sequence[float]) -> float:
    """``exp(mean log q(x))``: the geometric mean."""
    if not len(probs) or min(probs) <= 0:
        return 0.0
    return min(1.0, math.exp(float(np.mean(np.log(probs)))))


def min_confidence(probs: Sequence[float]) -> float:
    """``min q(x)``."""
    return min(1.0, max(0.0, min(probs))) if len(probs) else 0.0


def quantile_confidence(probs: Sequence[float]) -> float:
    """The `QUANTILE` of ``log q(x)`` as a probability, interpolated between tokens (of their logarithms)."""
    if not len(probs):
        return 0.0
    # An impossible token stays impossible, also next to the interpolated place.
    logs = np.log(np.maximum(np.asarray(probs, dtype=np.float64), 1e-300))
    return min(1.0, math.exp(float(np.quantile(logs, QUANTILE))))


def certain(probs: Sequence[float]) -> float:
    """1 whatever the tokens were: the drafter is always believed."""
    return 1.0
