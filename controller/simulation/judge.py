"""Whether what the controller did lies in the ranges that the scenario allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.simulation.document import Check, Scenario

Series = Mapping[str, npt.NDArray[Any]]

# quantity -> (numerator, denominator): ratios of sums, so that a mean over time weighs every request or second alike.
RATIOS = {
    "speed": ("plain_seconds", "seconds"),
    "true_acceptance": ("accepted", "examined"),
    "accepted_over_drafted": ("accepted", "drafted"),
    "block_efficiency": ("tokens", "rounds"),
    "true_loss": ("loss", "requests"),
    "touches_per_request": ("touches", "requests"),
    "touched_share": ("touched", "requests"),
    "fork_share": ("forks", "requests"),
    "tokens_per_request": ("tokens", "requests"),
    "leased_share": ("leased", "requests"),
    "reported_share": ("reported", "drafted"),
}
WORDS = ("state", "reason")


@dataclass(frozen=True)
class Verdict:
    """One check and what was found: a number, or the words that were seen."""

    check: Check
    found: float | tuple[str, ...]
    passed: bool
    detail: str

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        found = list(self.found) if isinstance(self.found, tuple) else None if math.isnan(self.found) else self.found
        c = self.check
        return {
            "quantity": c.quantity,
            "how": c.how,
            "during_s": c.during,
            "allowed": c.allowed,
            "found": found,
            "passed": self.passed,
            "detail": self.detail,
            "why": c.why,
        }


def judge(scenario: Scenario, series: Series) -> list[Verdict]:
    """A verdict on every check. A quantity nobody recorded, or a time without any value, is a failed check."""
    return [_verdict(check, series) for check in scenario.checks]


def quantities(series: Series) -> list[str]:
    """Every quantity that checks may name."""
    return sorted({*RATIOS, *series} - {"time"})


def values_of(series: Series, name: str) -> npt.NDArray[Any]:
    """A quantity per tick; not a number where it has no value."""
    if name not in RATIOS:
        return series[name]
    above, below = (series[part].astype(np.float64) for part in RATIOS[name])
    ratio = np.full(len(above), np.nan)
    ratio[below > 0] = above[below > 0] / below[below > 0]
    return ratio


def _verdict(check: Check, series: Series) -> Verdict:
    if check.quantity not in RATIOS and check.quantity not in series:
        return Verdict(check, math.nan, False, f"no such quantity; there are {', '.join(quantities(series))}")
    began, ended = check.during or (-math.inf, math.inf)
    here = (series["time"] > began) & (series["time"] <= ended)
    values = values_of(series, check.quantity)[here]
    if check.quantity in WORDS:
        return _words(check, [str(v) for v in values])
    known = values[np.isfinite(values.astype(float))].astype(float)
    if not len(known):
        return Verdict(check, math.nan, False, "no value in that time")
    low, high = _limits(check)
    if check.how in ("every", "some"):
        good = (known >= low) & (known <= high)
        passed = bool(good.all() if check.how == "every" else good.any())
        worst = float(known[np.argmax(np.maximum(low - known, known - high))])
        spread = f"{known.min():.4g} to {known.max():.4g}"
        return Verdict(check, worst, passed, f"{int(good.sum())} of {len(known)} ticks inside, {spread}")
    found = _number(check, series, here, known)
    return Verdict(check, found, low <= found <= high, f"{found:.4g}")


def _number(check: Check, series: Series, here: npt.NDArray[np.bool_], known: npt.NDArray[np.float64]) -> float:
    if check.how == "mean" and check.quantity in RATIOS:
        above, below = (float(series[part][here].sum()) for part in RATIOS[check.quantity])
        return above / below
    if check.how == "switches":
        return float(np.count_nonzero(np.diff(known)))
    found = {"mean": known.mean(), "max": known.max(), "min": known.min(), "total": known.sum(), "last": known[-1]}
    return float(found[check.how])


def _limits(check: Check) -> tuple[float, float]:
    low, high = check.allowed
    return (-math.inf if low is None else float(low), math.inf if high is None else float(high))


def _words(check: Check, words: list[str]) -> Verdict:
    seen = tuple(dict.fromkeys(words))
    allowed = set(check.allowed)
    if not words or not all(isinstance(a, str) for a in allowed):
        return Verdict(check, seen, False, "no value in that time, or numbers asked of words")
    passed = {
        "every": all(w in allowed for w in words),
        "some": any(w in allowed for w in words),
        "last": words[-1] in allowed,
    }.get(check.how)
    if passed is None:
        return Verdict(check, seen, False, "of words, only every, some and last can be asked")
    return Verdict(check, seen, passed, f"seen: {', '.join(seen)}")
