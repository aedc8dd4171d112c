"""Measures the bundled pair and writes its card: ``python -m decoder.demo.measure`` (one thread, about 20 minutes).

Knobs are chosen on one set of problems and judged on another that nothing looked at before. All runs of one domain and
temperature are coupled (`decoder.demo.simulation`), so losses and gains are paired differences. Intervals are 95%:
Wilson for shares, normal for paired means and for ratios of sums (linearised).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from decoder.demo.card import CARD, README, card_text, facts, readme
from decoder.demo.disagreements import disagreements
from decoder.demo.pair import Pair, load_pair
from decoder.demo.problems import Domain
from decoder.demo.simulation import FULL, LOSSLESS, Floats, Run, Setting, decode, fresh_problems
from decoder.demo.tasks import HOUSE_STYLE_SHARE

SELECT_SEED, SELECT_N = 314159, 500
FRESH_SEED, FRESH_N = 161803, 2000
MAX_LOSS = 0.01  # one point of exact match, where knobs are chosen
TIE = 0.005  # gains this close are the same; the smaller loss decides

# Rules that compare q with something are left out: the card wants one good knob, not the frontier (that is in bench/).
CANDIDATES = [
    *(Setting("token_v3", t) for t in (0.7, 0.8, 0.85, 0.9, 0.95)),
    *(Setting("token_v2", t) for t in (0.2, 0.3)),
    *(Setting("threshold", t) for t in (0.7, 0.8, 0.85, 0.9)),
    *(Setting("lenience", t) for t in (0.5, 0.7, 0.8)),
    Setting("forgive", 0.05),
]
# At temperature 0 both distributions are one-hot, and these two rules do nothing below theta = 1.
NEEDS_TEMPERATURE = ("threshold", "lenience")
# Measured on the fresh problems whatever is chosen: the comparison that the choice of a default rule rests on.
COMPARED = [Setting("token_v3", 0.8), Setting("threshold", 0.8), Setting("forgive", 0.05)]

Z = 1.959964  # two-sided 95%


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float

    def json(self) -> list[float]:
        return [round(x, 4) for x in (self.value, self.low, self.high)]


def share(hits: Floats) -> Estimate:
    """Share of ones, with the Wilson interval."""
    n, k = len(hits), float(hits.sum())
    centre, half = (k + Z**2 / 2) / (n + Z**2), Z / (n + Z**2) * np.sqrt(k * (n - k) / n + Z**2 / 4)
    return Estimate(k / n, float(centre - half), float(centre + half))


def paired(differences: Floats) -> Estimate:
    """Mean of paired differences, with the normal interval."""
    mean, half = differences.mean(), Z * differences.std(ddof=1) / np.sqrt(len(differences))
    return Estimate(float(mean), float(mean - half), float(mean + half))


def ratio(run: Run, minus: Run | None = None) -> Estimate:
    """Acceptance of a run (accepted over tokens), or its difference to another run over the same problems."""
    value, influence = _ratio(run)
    if minus is not None:
        other, subtract = _ratio(minus)
        value, influence = value - other, influence - subtract
    half = Z * influence.std(ddof=1) / np.sqrt(len(influence))
    return Estimate(value, float(value - half), float(value + half))


def _ratio(run: Run) -> tuple[float, Floats]:
    """The ratio of sums, and each problem's influence on it."""
    influence = (run.accepted - run.acceptance * run.tokens) / run.tokens.mean()
    return run.acceptance, np.asarray(influence, dtype=np.float64)


def figures_of(run: Run, base: Run) -> dict[str, Any]:
    """The figures of one run against the lossless run over the same problems; estimates as [value, low, high]."""
    same = all(a == b for a, b, touched in zip(run.texts, base.texts, run.touched, strict=True) if not touched)
    loss = paired(base.exact - run.exact)
    if not same or loss.value > run.touched.mean() + 1e-9:
        raise RuntimeError("the coupling is broken: an untouched request differs from its lossless text")
    return {
        "exact": share(run.exact).json(),
        "strict": share(run.strict).json(),
        "acceptance": ratio(run).json(),
        "gain": ratio(run, base).json(),
        "loss": loss.json(),
        "strict_loss": paired(base.strict - run.strict).json(),
        "touched": round(float(run.touched.mean()), 4),
        "touches_per_request": round(float(run.touches.mean()), 4),
        "tokens_per_request": round(float(run.tokens.mean()), 2),
    }


def choose(rows: list[dict[str, Any]]) -> Setting:
    """Among settings that lose at most `MAX_LOSS`, the largest gain; within `TIE` of it, the smallest loss."""
    allowed = [row for row in rows if row["loss"][0] <= MAX_LOSS]
    best = max(row["gain"][0] for row in allowed)
    row = min((row for row in allowed if row["gain"][0] >= best - TIE), key=lambda row: row["loss"][0])
    return Setting(row["rule"], row["theta"], row["rho"])


class Bench:
    """Runs settings over fixed problems, coupled, and reports as it goes."""

    def __init__(self, pair: Pair, console: Console, progress: Progress, log: Path | None = None) -> None:
        self.pair, self.console, self.progress, self.log = pair, console, progress, log
        lines = log.read_text().splitlines() if log is not None and log.is_file() else []
        self.done: dict[str, dict[str, Any]] = {entry["key"]: entry["row"] for entry in map(json.loads, lines)}

    def rows(
        self, domain: Domain, temperature: float, settings: list[Setting], *, seed: int, n: int
    ) -> list[dict[str, Any]]:
        """One row of figures for the lossless rule and for each setting, over ``n`` problems drawn from ``seed``."""
        problems = fresh_problems(seed, n, domain)
        task = self.progress.add_task(f"{domain}, temperature {temperature:g}, {n} problems", total=len(settings) + 1)
        out: list[dict[str, Any]] = []
        base: Run | None = None
        for setting in [LOSSLESS, *settings]:
            row = {"domain": domain, "temperature": temperature, **setting._asdict()}
            key = json.dumps([row, seed, n])
            if key not in self.done:
                base = base or decode(self.pair, problems, LOSSLESS, temperature=temperature)
                run = base if setting == LOSSLESS else decode(self.pair, problems, setting, temperature=temperature)
                self.keep(key, {**row, **figures_of(run, base)})
            row = self.done[key]
            out.append(row)
            self.progress.advance(task)
            self.console.print(
                f"{domain} T={temperature:g} n={n} {setting.rule} {setting.theta:g}: exact {row['exact'][0]:.3f}, "
                f"strict {row['strict'][0]:.3f}, acceptance {row['acceptance'][0]:.3f}, loss {row['loss']}",
                soft_wrap=True,
            )
        return out

    def keep(self, key: str, row: dict[str, Any]) -> None:
        """Remember a finished row, in the log too if there is one, so that an interrupted run can go on."""
        self.done[key] = row
        if self.log is not None:
            with self.log.open("a") as f:
                f.write(json.dumps({"key": key, "row": row}) + "\n")


def measure(bench: Bench) -> dict[str, Any]:
    """Choose the knobs, then measure them on fresh problems; everything of the card that needs the models to run."""
    selection, fresh, chosen = [], [], {}
    for temperature in (1.0, 0.0):
        candidates = [s for s in CANDIDATES if temperature > 0 or s.rule not in NEEDS_TEMPERATURE]
        rows = bench.rows("easy", temperature, candidates, seed=SELECT_SEED, n=SELECT_N)
        chosen[temperature] = choose(rows)
        selection += rows
    for domain in ("easy", "hard"):
        for temperature in (1.0, 0.0):
            settings = [chosen[temperature], FULL]
            if (domain, temperature) == ("easy", 1.0):
                settings += [s for s in COMPARED if s not in settings]
            fresh += bench.rows(domain, temperature, settings, seed=FRESH_SEED, n=FRESH_N)

    def row(domain: str, temperature: float, setting: Setting) -> dict[str, Any]:
        key = (domain, temperature, *setting)
        return next(r for r in fresh if (r["domain"], r["temperature"], r["rule"], r["theta"], r["rho"]) == key)

    estimates = {
        "target_em_greedy": row("easy", 0.0, LOSSLESS)["exact"],
        "target_em_t1": row("easy", 1.0, LOSSLESS)["exact"],
        "draft_em_greedy": row("easy", 0.0, FULL)["exact"],
        "draft_em_t1": row("easy", 1.0, FULL)["exact"],
        "acceptance_t1": row("easy", 1.0, LOSSLESS)["acceptance"],
        "gain_at_1_point": row("easy", 1.0, chosen[1.0])["gain"],
        "loss_at_1_point": row("easy", 1.0, chosen[1.0])["loss"],
        "gain_at_1_point_greedy": row("easy", 0.0, chosen[0.0])["gain"],
        "loss_at_1_point_greedy": row("easy", 0.0, chosen[0.0])["loss"],
        "full_leniency_loss": row("easy", 1.0, FULL)["loss"],
        "strict_em_t1": row("easy", 1.0, LOSSLESS)["strict"],
        "strict_em_token_v3_08": row("easy", 1.0, Setting("token_v3", 0.8))["strict"],
        "hard_target_em_greedy": row("hard", 0.0, LOSSLESS)["exact"],
        "hard_target_em_t1": row("hard", 1.0, LOSSLESS)["exact"],
        "hard_draft_em_t1": row("hard", 1.0, FULL)["exact"],
        "hard_acceptance_t1": row("hard", 1.0, LOSSLESS)["acceptance"],
        "hard_gain_at_1_point": row("hard", 1.0, chosen[1.0])["gain"],
        "hard_loss_at_1_point": row("hard", 1.0, chosen[1.0])["loss"],
    }
    return {
        **{name: value[0] for name, value in estimates.items()},
        "intervals": {name: value[1:] for name, value in estimates.items()},
        "setting_at_1_point": chosen[1.0]._asdict(),
        "setting_at_1_point_greedy": chosen[0.0]._asdict(),
        "house_style_share": HOUSE_STYLE_SHARE,
        "measured_on": {
            "problems": FRESH_N,
            "seed": FRESH_SEED,
            "knobs_chosen_on": SELECT_N,
            "knobs_chosen_seed": SELECT_SEED,
            "confidence": 0.95,
        },
        "disagreements": {domain: disagreements(bench.pair, domain) for domain in ("easy", "hard")},
        "fresh": fresh,
        "selection": selection,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", type=Path, default=CARD, help="where the card goes (JSON)")
    parser.add_argument("--readme", type=Path, default=README, help="where the readable card goes")
    parser.add_argument("--resume", type=Path, help="log of finished rows (JSON lines): read if there, and added to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    with Progress(console=console) as progress:
        figures = measure(Bench(load_pair(), console, progress, args.resume))
    card = {**figures, **facts()}
    args.card.write_text(card_text(card))
    args.readme.write_text(readme(card))
    console.print(f"wrote {args.card} and {args.readme}")


if __name__ == "__main__":
    main()
