"""The loss three ways on the bundled pair: ``python -m bench.evidence_pair [--quick] --json`` (one core).

At several knobs of three rules the same word problems are answered with the same seeds, temperature 1, exact match:

- *two-arm*: every problem is decoded losslessly and leniently: the paired loss of these problems, with its normal
  interval;
- *holdback*: a coin decides at the first touch, and only the served text is scored (`controller.arms`);
- *fork*: of the touched requests whose fork coin fell so, the other branch is generated, and both are scored.

The last two are means over touched requests times their share, with anytime-valid 95 % intervals. ``agrees``: the
interval has the two-arm loss in it. Of holdback that is a statement about these very problems, since the coin is
independent of both outcomes. ``certified``: loss <= P(touched) <= touches per request, sharply, on these problems.
``requests`` are those that each way needs until its upper bound is within `GAP` of the loss, drawn with replacement
from the measured outcomes (median of seeded runs).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from controller.arms import ArmDifference
from controller.bounds import EmpiricalBernstein, mixture_radius
from decoder.batch import Batch
from decoder.demo.measure import paired
from decoder.demo.pair import EOS, load_pair, prompt_ids
from decoder.demo.problems import Problem, make_problem
from decoder.demo.tasks import score_exact
from decoder.drafters import ModelDrafter
from decoder.generate import Completion, Engine, ForkResult, Knobs, Request, Rows, SamplingParams
from decoder.steps import fork_point

G, ROWS, SEED, MAX_TOKENS = 4, 32, 602214, 160
HOLDBACK, FORK, SIGNIFICANCE = 0.5, 0.75, 0.05
POINTS = [
    *(("token_v3", theta) for theta in (0.7, 0.8, 0.95)),
    *(("threshold", theta) for theta in (0.45, 0.8, 0.95)),
    *(("forgive", theta) for theta in (0.01, 0.05, 0.2)),
]
COUNTED = (("threshold", 0.45), ("forgive", 0.01), ("token_v3", 0.8))  # where requests are counted
USUAL_HOLDBACK, GAP, CHUNK, MOST = 0.1, 0.008, 100, 400_000


@dataclass(frozen=True)
class Outcome:
    """One problem at one knob: scores of both arms, touches of the lenient text, and what a run with coins showed.

    ``served`` is that run's score; ``fork`` the score of its other branch, None where no fork was drawn.
    """

    lossless: float
    lenient: float
    same: bool  # both texts
    touches: int
    arm: str
    served: float
    fork: float | None

    @property
    def touched(self) -> bool:
        """Whether the run with coins was touched."""
        return self.arm != "untouched"

    @property
    def pair(self) -> tuple[float, float] | None:
        """(lossless, lenient) as the fork has them."""
        if self.fork is None:
            return None
        return (self.served, self.fork) if self.arm == "holdback" else (self.fork, self.served)


class Estimate(NamedTuple):
    """A loss per request with its interval, and the scores it took."""

    value: float
    low: float
    high: float
    scores: int

    def json(self) -> list[float]:
        """Value, low and high."""
        return [round(x, 4) for x in self[:3]]

    def has(self, loss: float) -> bool:
        """Whether the interval has ``loss`` in it."""
        return self.low <= loss <= self.high


def by_holdback(outcomes: Sequence[Outcome]) -> Estimate:
    """From the served texts of touched requests alone."""
    arms = ArmDifference(HOLDBACK)
    for o in outcomes:
        if o.touched:
            arms.add(o.served, held_back=o.arm == "holdback")
    share = arms.n / len(outcomes)
    low, high = arms.interval(SIGNIFICANCE)
    return Estimate(arms.mean * share, low * share, high * share, arms.n)


def by_fork(outcomes: Sequence[Outcome]) -> Estimate:
    """From both branches of the requests whose fork was drawn."""
    bound = EmpiricalBernstein()
    for o in outcomes:
        if o.pair is not None:
            bound.update(o.pair[0] - o.pair[1])
    share = sum(o.touched for o in outcomes) / len(outcomes)
    low, high = bound.lower(SIGNIFICANCE / 2), bound.upper(SIGNIFICANCE / 2)
    return Estimate(bound.mean * share, low * share, high * share, 2 * bound.n)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is said of one knob."""
    n = len(outcomes)
    loss = paired(np.array([o.lossless - o.lenient for o in outcomes]))
    touched = sum(o.touches > 0 for o in outcomes) / n
    tau = sum(o.touches for o in outcomes) / n
    holdback, fork = by_holdback(outcomes), by_fork(outcomes)
    pairs = [(o.pair, (o.lossless, o.lenient)) for o in outcomes if o.pair is not None]
    return {
        "tasks": n,
        "touched": round(touched, 4),
        "touches_per_request": round(tau, 4),
        "two_arm": loss.json(),
        "holdback": holdback.json(),
        "fork": fork.json(),
        "scores": {"two_arm": 2 * n, "holdback": holdback.scores, "fork": fork.scores},
        "holdback_agrees": holdback.has(loss.value),
        "fork_agrees": fork.has(loss.value),
        "certified": loss.value <= touched + 1e-12 and touched <= min(1.0, tau),
        # Rows of a batch are read together: texts may differ by rounding, hardly ever.
        "pairs_as_in_two_arm": [sum(a == b for a, b in pairs), len(pairs)],
        "untouched_that_differ": sum(not o.same for o in outcomes if not o.touches),
    }


def needed(way: str, outcomes: Sequence[Outcome], rng: np.random.Generator) -> int:
    """Requests until the upper bound on the loss per request is within `GAP` of it; outcomes drawn with replacement."""
    lossless, lenient, touched = (
        np.array([getattr(o, name) for o in outcomes], dtype=float) for name in ("lossless", "lenient", "touches")
    )
    aim = float((lossless - lenient).mean()) + GAP
    guess = float(lossless.mean())
    measured = np.ones(len(outcomes), dtype=bool) if way == "two_arm" else touched > 0
    scale = 1.0 if way == "fork" else 1 / (1 - USUAL_HOLDBACK)
    requests = n = 0
    total = squares = 0.0
    while requests < MOST:
        requests += CHUNK
        drawn = rng.integers(len(outcomes), size=CHUNK)
        drawn = drawn[measured[drawn]]
        if way == "fork":
            x = lossless[drawn] - lenient[drawn]
        else:
            held = rng.random(len(drawn)) < USUAL_HOLDBACK
            x = np.where(
                held, (lossless[drawn] - guess) / USUAL_HOLDBACK, -(lenient[drawn] - guess) / (1 - USUAL_HOLDBACK)
            )
        n, total, squares = n + len(x), total + float(x.sum()), squares + float((x * x).sum())
        if n and (total + mixture_radius(squares, SIGNIFICANCE, scale)) / requests <= aim:
            break
    return requests


def requests_needed(outcomes: Sequence[Outcome], runs: int) -> dict[str, int]:
    """Medians over seeded runs of each way."""
    ways = ("two_arm", "holdback", "fork")
    return {
        way: int(np.median([needed(way, outcomes, np.random.default_rng([i, run])) for run in range(runs)]))
        for i, way in enumerate(ways)
    }


class Bench:
    """The pair, its problems, and the texts that it gives."""

    def __init__(self, tasks: int, progress: Progress):
        pair = load_pair()
        self.tokenizer = pair.tokenizer
        self.engine = Engine(pair.target, ModelDrafter(pair.draft), eos_ids=[EOS])
        self.progress = progress
        rng = random.Random(SEED)
        self.problems = [make_problem(rng, "easy") for _ in range(tasks)]
        self.requests = [
            Request(str(i), prompt_ids(pair.tokenizer, p.prompt), SamplingParams(seed=SEED + i, max_tokens=MAX_TOKENS))
            for i, p in enumerate(self.problems)
        ]

    def decode(self, knobs: Knobs, what: str) -> list[Completion]:
        """Every problem's completion, `ROWS` at a time."""
        batch = Batch(self.engine, ROWS)
        waiting, done = iter(self.requests), dict[str, Completion]()
        bar = self.progress.add_task(what, total=len(self.requests))
        while len(done) < len(self.requests):
            while batch.free and (request := next(waiting, None)) is not None:
                batch.add(request, lambda: knobs)
            for completion in batch.step():
                done[completion.request.request_id] = completion
                self.progress.advance(bar)
        self.progress.remove_task(bar)
        return [done[request.request_id] for request in self.requests]

    @torch.inference_mode()
    def forks(self, served: Sequence[Completion], what: str) -> dict[str, ForkResult]:
        """The other branch of each, as `Engine.fork` but `ROWS` at a time, by request."""
        rows = Rows(self.engine, ROWS)
        waiting, at_work, done = iter(served), list[Completion](), dict[str, ForkResult]()
        bar = self.progress.add_task(what, total=len(served))

        def play(first: int) -> None:
            rows.round(first, [fork_point(c).knobs for c in at_work[first:]], [None] * len(at_work[first:]))
            for i in reversed(range(first, len(at_work))):
                if rows.rows[i].finish_reason:
                    done[at_work[i].request.request_id] = rows.rows[i].fork_result(at_work[i])
                    rows.leave(i)
                    at_work[i] = at_work[-1]
                    at_work.pop()

        while len(done) < len(served):
            if at_work:
                play(0)
            while len(at_work) < ROWS and (c := next(waiting, None)) is not None:
                row = self.engine.start_fork(c)
                if row.finish_reason:
                    done[c.request.request_id] = row.fork_result(c)
                    continue
                rows.join(row)
                at_work.append(c)
                play(len(at_work) - 1)
            self.progress.update(bar, completed=len(done))
        self.progress.remove_task(bar)
        return done

    def score(self, problem: Problem, token_ids: Iterable[int]) -> float:
        """Exact match."""
        return score_exact(self.tokenizer.decode([t for t in token_ids if t != EOS]), problem.answer)

    def outcomes(self, rule: str, theta: float, lossless: Sequence[Completion]) -> list[Outcome]:
        """All that is measured at one knob."""
        name = f"{rule} {theta:g}"
        lenient = self.decode(Knobs(g=G, rule=rule, theta=theta), f"{name}: lenient")
        coins = Knobs(g=G, rule=rule, theta=theta, holdback=HOLDBACK, fork=FORK)
        served = self.decode(coins, f"{name}: with coins")
        forks = self.forks([c for c in served if c.fork_drawn], f"{name}: forks")
        return [
            Outcome(
                self.score(problem, a.token_ids),
                self.score(problem, b.token_ids),
                a.token_ids == b.token_ids,
                b.touches,
                c.arm,
                self.score(problem, c.token_ids),
                self.score(problem, forks[c.request.request_id].token_ids) if c.fork_drawn else None,
            )
            for problem, a, b, c in zip(self.problems, lossless, lenient, served, strict=True)
        ]


def bench(tasks: int, points: Sequence[tuple[str, float]], runs: int, console: Console) -> dict[str, Any]:
    """The figures of every point."""
    rows: list[dict[str, Any]] = []
    counted: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        work = Bench(tasks, progress)
        lossless = work.decode(Knobs.lossless(G), "lossless")
        bar = progress.add_task("knobs", total=len(points))
        for rule, theta in points:
            outcomes = work.outcomes(rule, theta, lossless)
            rows.append({"rule": rule, "theta": theta, **figures(outcomes)})
            if (rule, theta) in COUNTED:
                counted.append(
                    {"rule": rule, "theta": theta, "touched": rows[-1]["touched"], **requests_needed(outcomes, runs)}
                )
            progress.advance(bar)
            console.print(line(rows[-1]), soft_wrap=True, highlight=False)
    exact = [work.score(p, c.token_ids) for p, c in zip(work.problems, lossless, strict=True)]
    return {
        "tasks": tasks,
        "confidence": 1 - SIGNIFICANCE,
        "holdback": HOLDBACK,
        "fork": FORK,
        "lossless_exact": round(float(np.mean(exact)), 4),
        "holdback_agrees": [sum(r["holdback_agrees"] for r in rows), len(rows)],
        "fork_agrees": [sum(r["fork_agrees"] for r in rows), len(rows)],
        "certified": [sum(r["certified"] for r in rows), len(rows)],
        "points": rows,
        "requests": {"gap": GAP, "holdback": USUAL_HOLDBACK, "points": counted},
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table in docs/benchmarks.md."""
    said = [f"{v:.3f} ({low:.3f} to {high:.3f})" for v, low, high in (row["two_arm"], row["holdback"], row["fork"])]
    same, pairs = row["pairs_as_in_two_arm"]
    cells = [f"`{row['rule']}` {row['theta']:g}", f"{row['touched']:.3f}", f"{row['touches_per_request']:.2f}", *said]
    return f"| {' | '.join(cells)} | {same} of {pairs} |"


def main() -> None:
    """Run and print; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="few tasks and one knob of each rule")
    parser.add_argument("--tasks", type=int, default=600, help="problems at each knob")
    parser.add_argument("--out", type=Path, help="where the figures go as well (docs/data/evidence_pair.json)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks, points, runs = (60, COUNTED, 3) if args.quick else (args.tasks, POINTS, 21)
    found = bench(tasks, points, runs, Console(stderr=True))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
