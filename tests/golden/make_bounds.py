"""Writes bounds.json: empirical-Bernstein bounds evaluated from their defining equation in 50-digit arithmetic.

Two kinds of case: bounds on the running mean of raw observations (the lower one is the better of two processes at half
the significance), and radii with a scale and with a mixture that is tuned to one l.

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
AIMED = {Decimal("1"): Decimal("0.56"), Decimal("2.5"): Decimal("0.12"), Decimal("6"): Decimal("0.12")}


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
        elif kind == "heavy":
            out.append(Decimal(1 if u < 0.9 else 0))
        else:  # eighths in [-1, 1], which floats hold exactly
            out.append(Decimal(round(u * 16) - 8) / 8)
    return out


def radius(variance: Decimal, significance: Decimal, scale: Decimal, aim: Decimal | None = None) -> Decimal:
    """The s of the defining equation, for differences from their guesses of at most ``scale``."""
    pairs = list(zip(LAMBDAS, WEIGHTS, strict=True))
    if aim is not None:
        pairs = [(aim * x, w) for x, w in AIMED.items()] + [(l, (1 - sum(AIMED.values())) * w) for l, w in pairs]
    pairs = [(l, w) for l, w in pairs if l * scale < 1]

    def wealth(s: Decimal) -> Decimal:
        psi = [-(1 - l * scale).ln() - l * scale for l, _ in pairs]
        return sum(
            (w * (l * s - p * variance / scale**2).exp() for (l, w), p in zip(pairs, psi, strict=True)), Decimal(0)
        )

    low, high = Decimal(0), 10 * (variance + scale) + 100
    while wealth(high) < 1 / significance:
        high *= 2
    for _ in range(120):
        middle = (low + high) / 2
        low, high = (middle, high) if wealth(middle) < 1 / significance else (low, middle)
    return (low + high) / 2


def spread(z: list[Decimal], side: int) -> Decimal:
    """Sum of squared differences from guesses that are clipped to their side of 0."""
    variance, total = Decimal(0), Decimal(0)
    for i, x in enumerate(z):
        guess = total / (i + 1)
        variance += (x - (max(guess, Decimal(0)) if side > 0 else min(guess, Decimal(0)))) ** 2
        total += x
    return variance


def bound(z: list[Decimal], significance: Decimal, side: int) -> Decimal:
    """Upper (side 1) or lower (side -1) bound on the running mean."""
    mean = sum(z, Decimal(0)) / len(z)
    if side > 0:
        return min(Decimal(1), mean + radius(spread(z, 1), significance, Decimal(1)) / len(z))
    clipped = radius(spread(z, -1), significance / 2, Decimal(1))
    rescaled = radius(spread(z, 1), significance / 2, Decimal(2))
    return max(Decimal(-1), mean - min(clipped, rescaled) / len(z))


def main() -> None:
    """Write every case."""
    cases = [
        {
            "z": [float(x) for x in z],
            "significance": significance,
            "upper": float(bound(z, Decimal(significance), 1)),
            "lower": float(bound(z, Decimal(significance), -1)),
        }
        for kind in ("zeros", "ties", "losses", "heavy", "eighths")
        for n in (1, 30, 400)
        for z in [observations(kind, n)]
        for significance in ("0.05", "0.004")
    ]
    radii = [
        {
            "variance": float(variance),
            "significance": 0.05,
            "scale": float(scale),
            "aim": None if aim is None else float(aim),
            "radius": float(radius(Decimal(variance), Decimal("0.05"), Decimal(scale), aim)),
        }
        for variance in ("0", "12.5", "640")
        for scale, aim in (("1", None), ("2", None), ("18", None), ("1", Decimal("0.25")), ("4.5", Decimal("0.03125")))
    ]
    provenance = "tests/golden/make_bounds.py: the defining equation, 50-digit decimals, bisection"
    document = {"provenance": provenance, "cases": cases, "radii": radii}
    Path(__file__).with_name("bounds.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
