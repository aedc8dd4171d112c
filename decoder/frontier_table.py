"""Figures, comparisons and tables of a sweep, from the per-task columns of its settings.

*Saved* is the share of lossless decoding's target passes per token that a setting does without; *loss* is the mean
paired difference of the score, in shares of 1 (0.01 is one point). Intervals are 95%: Wilson for scores, Agresti and
Min (2005) for losses, linearised normal for ratios of sums, and percentiles over resampled tasks for comparisons.

A rule's *curve* joins its settings, and lossless, in the order of what they save; between two of them lies what comes
from taking one for some requests and the other for the rest. Rules are compared at equal saving and at equal loss.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.demo.measure import Estimate, Z, share
from decoder.demo.simulation import LOSSLESS, Setting
from decoder.frontier import Log, Sweep
from decoder.frontier_run import Columns, Floats
from policies.published import PUBLISHED, get_form

SAVINGS = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30)
LOSSES = (0.005, 0.01, 0.02, 0.05)
RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Everything that the files of a sweep say: one row per setting, and the comparisons of `compare`."""

    sweep: Sweep
    cost_ratio: float
    rows: list[dict[str, Any]]
    at_saving: list[dict[str, Any]]  # rule, saved, loss with interval, wins
    at_loss: list[dict[str, Any]]  # rule, loss, saved with interval, wins
    against_published: list[dict[str, Any]]  # form, completion, saved, extra loss of the form with interval

    def to_json(self) -> str:
        """One JSON document, a row a line."""
        data = asdict(self)
        head = json.dumps({"sweep": data["sweep"], "cost_ratio": self.cost_ratio})[1:-1]
        lists = [
            f' "{key}": [\n' + ",\n".join("  " + json.dumps(row) for row in data[key]) + "\n ]"
            for key in ("rows", "at_saving", "at_loss", "against_published")
        ]
        return "{\n " + head + ",\n" + ",\n".join(lists) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """The inverse of `to_json`."""
        data = json.loads(text)
        return cls(**data | {"sweep": Sweep(**data["sweep"])})

    def to_csv(self) -> str:
        """The rows, with an estimate spread over three columns."""
        out = io.StringIO()
        flat = [_flat(row) for row in self.rows]
        writer = csv.DictWriter(out, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return out.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            flat |= dict(zip((key, f"{key}_low", f"{key}_high"), value, strict=True))
        else:
            flat[key] = value
    return flat


def summarise(log: Log, *, cost_ratio: float | None = None, resamples: int = RESAMPLES) -> Summary:
    """The summary of what is finished, at a cost ratio other than the measured one if given.

    Raises ValueError when the lossless setting is not finished.
    """
    if LOSSLESS not in log.done:
        raise ValueError("the lossless setting is not measured yet; nothing can be compared")
    cost = (log.cost_ratio or 0.0) if cost_ratio is None else cost_ratio
    base = log.done[LOSSLESS]
    rows = [row_of(setting, columns, base, cost) for setting, columns in log.done.items()]
    return Summary(log.sweep, cost, rows, *compare(log.done, log.sweep.seed, resamples))


# -- one setting -------------------------------------------------------------------------------------------------------


def row_of(setting: Setting, run: Columns, base: Columns, cost_ratio: float) -> dict[str, Any]:
    """The figures of one setting; estimates as [value, low, high]."""
    form = get_form(setting.rule)
    examined, drift = run.examined.sum(), run.drift.sum()
    best_g, speed = best_block(run, cost_ratio)
    return {
        **setting._asdict(),
        "completed": form.completed,
        "completion": PUBLISHED[form.name].completion if form.name in PUBLISHED else form.name,
        "n": len(run.tokens),
        "exact": share(run.exact).json(),
        "loss": loss_interval(base.exact - run.exact).json(),
        "strict": share(run.strict).json(),
        "strict_loss": loss_interval(base.strict - run.strict).json(),
        "passes_per_token": ratio_interval(run.passes, run.tokens).json(),
        "saved": saved_interval(run, base).json(),
        "acceptance": ratio_interval(run.accepted, run.examined).json(),
        "touched": round(float((run.touches > 0).mean()), 4),
        "touches_per_request": round(float(run.touches.mean()), 4),
        "gain_per_position": round(float(run.gain.sum() / examined), 5),
        "drift_per_position": round(float(drift / examined), 5),
        "gain_per_drift": round(float(run.gain.sum() / drift), 3) if drift > 0 else None,
        "best_g": best_g,
        "speedup": round(speed, 3),
    }


def loss_interval(differences: Floats) -> Estimate:
    """Mean of paired differences in [-1, 1], with an interval that has a width even when there are none.

    Agresti and Min: half a case is added to each cell of the paired table, so two cases to n and one to the squares.
    """
    n, total, squares = len(differences) + 2, float(differences.sum()), float((differences**2).sum()) + 1
    centre, half = total / n, Z * np.sqrt(max(squares - total**2 / n, 0.0)) / n
    return Estimate(float(differences.mean()), float(centre - half), float(centre + half))


def ratio_interval(over: Floats, under: Floats) -> Estimate:
    """Ratio of sums over tasks, with the linearised normal interval."""
    value = over.sum() / under.sum()
    half = Z * ((over - value * under) / under.mean()).std(ddof=1) / np.sqrt(len(over))
    return Estimate(float(value), float(value - half), float(value + half))


def saved_interval(run: Columns, base: Columns) -> Estimate:
    """Share of the lossless target passes per token that a setting does without; paired, linearised."""
    mine, plain = run.passes.sum() / run.tokens.sum(), base.passes.sum() / base.tokens.sum()
    influence = (run.passes - mine * run.tokens) / run.tokens.mean() / mine
    influence = mine / plain * (influence - (base.passes - plain * base.tokens) / base.tokens.mean() / plain)
    value, half = 1 - mine / plain, Z * influence.std(ddof=1) / np.sqrt(len(influence))
    return Estimate(float(value), float(value - half), float(value + half))


def best_block(run: Columns, cost_ratio: float) -> tuple[int, float]:
    """The block length up to the sweep's with the best predicted speed over plain decoding, and that speed.

    ``N(g) / (g c + 1)`` with ``N(g)`` one plus the shares of rounds that put out more than 1, ..., g tokens.
    """
    reach = run.rounds.sum(0) / run.rounds[:, 0].sum()
    speeds = np.cumsum(reach) / (1 + cost_ratio * np.arange(len(reach)))
    return int(speeds.argmax()), float(speeds.max())


# -- comparisons -------------------------------------------------------------------------------------------------------


def compare(
    done: dict[Setting, Columns], seed: int, resamples: int = RESAMPLES
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Rules at equal saving, at equal loss, and published forms against their completions at equal saving.

    ``wins`` is the share of resamples of the tasks in which a completed rule does best of all completed rules there.
    """
    settings = list(done)
    base = done[LOSSLESS]
    n = len(base.tokens)
    rng = np.random.default_rng(seed)
    # The first row is the sample itself; the others resample tasks with replacement.
    weights = np.vstack([np.ones(n), rng.multinomial(n, np.full(n, 1 / n), size=resamples)])
    loss = weights @ np.array([base.exact - done[s].exact for s in settings]).T / n
    per_token = (weights @ np.array([done[s].passes for s in settings]).T) / (
        weights @ np.array([done[s].tokens for s in settings]).T
    )
    saved = 1 - per_token / per_token[:, [settings.index(LOSSLESS)]]
    curves: dict[str, tuple[Floats, Floats]] = {}
    for name in dict.fromkeys(s.rule for s in settings if s != LOSSLESS):
        places = [i for i, s in enumerate(settings) if s == LOSSLESS or (s.rule == name and s.rho == 1)]
        order = np.argsort(saved[:, places], axis=1)
        curves[name] = (
            np.take_along_axis(saved[:, places], order, 1),
            np.take_along_axis(loss[:, places], order, 1),
        )
    losses = {name: _interpolated(curve, SAVINGS) for name, curve in curves.items()}
    savings = {name: _affordable(curve, LOSSES) for name, curve in curves.items()}
    at_saving = _ranked(losses, "saved", SAVINGS, "loss", best=np.argmin)
    at_loss = _ranked(savings, "loss", LOSSES, "saved", best=np.argmax)
    against = [
        {"form": name, "completion": form.completion, "saved": level, "extra_loss": _percentiles(extra[:, j])}
        for name, form in PUBLISHED.items()
        if name in losses and form.completion in losses
        for extra in [_difference(losses[name], losses[form.completion])]
        for j, level in enumerate(SAVINGS)
        if np.isfinite(extra[0, j])
    ]
    return at_saving, at_loss, against


def _difference(minuend: Floats, subtrahend: Floats) -> Floats:
    """The difference where both are finite, else NaN."""
    both = np.isfinite(minuend) & np.isfinite(subtrahend)
    return np.where(both, np.where(both, minuend, 0) - np.where(both, subtrahend, 0), np.nan)


def _interpolated(curve: tuple[Floats, Floats], levels: Sequence[float]) -> Floats:
    """Loss [resamples, levels] at each saving; infinite where the rule does not save as much."""
    saved, loss = curve
    return np.array([np.interp(levels, x, y, right=np.inf) for x, y in zip(saved, loss, strict=True)])


def _affordable(curve: tuple[Floats, Floats], levels: Sequence[float]) -> Floats:
    """Saving [resamples, levels] at which the loss first exceeds each level, from lossless upwards."""
    out = np.empty((len(curve[0]), len(levels)))
    for i, (saved, loss) in enumerate(zip(*curve, strict=True)):
        start = int(np.searchsorted(saved, 0.0, side="right")) - 1  # lossless saves nothing
        x, y = saved[max(start, 0) :], loss[max(start, 0) :]
        for j, level in enumerate(levels):
            beyond = np.flatnonzero(y > level)
            k = int(beyond[0]) if len(beyond) else len(y)
            if k == 0 or k == len(y):
                out[i, j] = x[min(k, len(x) - 1)] if k else 0.0
            else:
                out[i, j] = x[k - 1] + (x[k] - x[k - 1]) * (level - y[k - 1]) / (y[k] - y[k - 1])
    return out


def _ranked(values: dict[str, Floats], key: str, levels: Sequence[float], of: str, best: Any) -> list[dict[str, Any]]:
    """One row per level and rule: the value with its interval, and how often the rule does best of the completed."""
    completed = [name for name in values if get_form(name).completed]
    rows = []
    for j, level in enumerate(levels):
        stacked = np.array([values[name][:, j] for name in completed]).reshape(len(completed), -1)
        first = best(stacked, axis=0) if completed else np.empty(0, dtype=np.int64)
        first = np.where(np.isfinite(stacked).any(axis=0), first, -1)  # a saving that no rule reaches has no winner
        for name in values:
            if not np.isfinite(values[name][0, j]):
                continue
            wins = float((first == completed.index(name)).mean()) if name in completed else None
            rows.append({"rule": name, key: level, of: _percentiles(values[name][:, j]),
                         "wins": None if wins is None else round(wins, 3)})  # fmt: skip
    return rows


def _percentiles(values: NDArray[np.float64]) -> list[float]:
    """The sample's own value, and the 95% percentile interval over those resamples that have one."""
    finite = values[1:][np.isfinite(values[1:])]
    low, high = np.percentile(finite, [2.5, 97.5]) if len(finite) else (np.nan, np.nan)
    return [round(float(x), 4) for x in (values[0], low, high)]
