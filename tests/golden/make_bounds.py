"""Writes bounds.json: empirical-Bernstein bounds evaluated from their defining equation in 50-digit arithmetic.

Independent of `controller.bounds`: decimals instead of floats, bisection instead of Brent, no factoring out of the
largest exponent, guesses and variance recomputed from the raw observations. Run `python tests/golden/make_bounds.py`.
"""

from __future__ import annotations

import json
from decimal import Decimal, getcontext
from pathlib import Path

getcontext().prec = 50
LAMBDAS = [Decimal("0.95") * Decimal("0.8") ** k for k in range(24)]
HARMONIC = sum(Decimal(1) / (k + 1) for k in range(24))
WEIGHTS = [Decimal(1) / (k + 1) / HARMONIC for k in range(24)]


def observations(kind: str, n: int) -> list[Decimal]:
    """A fixed sequence in [-1, 1]."""
    state, out = 12345, []
    for _ in range(n):
        state = (1103515245 * state + 12345) % 2**31
        u = state / 2**31
        if kind == "zeros":
            out.append(Decimal(0))
        elif kind == "ties":
            out.append(Decimal(1 if u < 0.08 else -1 if u < 0.13 else 0))
        elif kind == "losses":
            out.append(Decimal(1 if u < 0.3 else 0))
        else:  # eighths in [-1, 1], which floats hold exactly
            out.append(Decimal(round(u * 16) - 8) / 8)
    return out


def bound(z: list[Decimal], significance: Decimal, side: int) -> Decimal:
    """Upper (side 1) or lower (side -1) bound on the running mean."""
    variance, total = Decimal(0), Decimal(0)
    for i, x in enumerate(z):
        guess = total / (i + 1)
        guess = max(guess, Decimal(0)) if side > 0 else min(guess, Decimal(0))
        variance += (x - guess) ** 2
        total += x

    def wealth(s: Decimal) -> Decimal:
        psi = [-(1 - l).ln() - l for l in LAMBDAS]
        return sum(
            (w * (l * s - p * variance).exp() for w, l, p in zip(WEIGHTS, LAMBDAS, psi, strict=True)), Decimal(0)
        )

    low, high = Decimal(0), Decimal(10 * len(z) + 100)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if wealth(middle) < 1 / significance else (low, middle)
    edge = total / len(z) + side * (low + high) / 2 / len(z)
    return min(edge, Decimal(1)) if side > 0 else max(edge, Decimal(-1))


def main() -> None:
    """Write every case."""
    cases = [
        {
            "z": [float(x) for x in z],
            "significance": significance,
            "upper": float(bound(z, Decimal(significance), 1)),
            "lower": float(bound(z, Decimal(significance), -1)),
        }
        for kind in ("zeros", "ties", "losses", "eighths")
        for n in (1, 30, 400)
        for z in [observations(kind, n)]
        for significance in ("0.05", "0.004")
    ]
    provenance = "tests/golden/make_bounds.py: the defining equation, 50-digit decimals, bisection"
    Path(__file__).with_name("bounds.json").write_text(json.dumps({"provenance": provenance, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
