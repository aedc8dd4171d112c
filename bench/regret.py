"""How close the controller comes to one that knows the future: ``python -m bench.regret [--quick] --json``.

Every policy decodes the same traces (`bench.regret_traces`), token by token: a round of block length g drafts, accepts
what the text says, and the next one starts where it ended. A policy sees only what it drafted, and seconds with noise;
it is judged by seconds without. The *clairvoyant* takes the best block length of each segment in hindsight, the *fixed*
one the best of the whole trace. `bench.regret_rivals` has the others, `bench.regret_lenity` the controller.

No leniency is allowed (theta = 0): what is tested is g*. Keys: ``mean_fraction_of_clairvoyant`` (of its speed, mean
over traces), ``worst_segment`` (the least fraction in any segment), ``wins`` and ``losses`` (traces on which Lenity is
faster or slower than a rival by more than `TIE`), ``never_slower_than_plain`` (least speed over plain decoding on a
trace). A segment's seconds are summed over the seeds.

The controller's constants were chosen on the traces of `SYNTHETIC` and `RECORDED`; those of `HELD_OUT` were written
after that, and are only reported. ``by_set`` has the first two keys for either; the goals count over all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.regret_lenity import Lenity
from bench.regret_rivals import RIVALS, Fixed, Policy, Round
from bench.regret_traces import G, Segment, Trace, traces

GOALS = {"mean_fraction_of_clairvoyant": 0.97, "worst_segment": 0.90, "never_slower_than_plain": 0.98}
TIE = 0.002  # relative speed within which nobody wins
QUICK, FULL = (12000, 1), (36000, 2)  # tokens a row, seeds


def decode(trace: Trace, policy: Policy, rng: np.random.Generator) -> list[float]:
    """Seconds that ``policy`` takes for each segment, without noise."""
    now, ahead, spent = 0.0, 0, []
    for segment in trace.segments:
        text, rows, total = segment.text, segment.rows, len(segment.text)
        at = np.arange(rows) * (total // rows)
        if rows == 1:
            at += ahead
        done, took = ahead, 0.0
        while done < total:
            g = policy.lengths(rows, now)
            drafted = np.minimum(g, text.width[at])
            accepted = np.minimum(g, text.length[at])
            width = int(drafted.max())
            parts = np.array([column[width] for column in segment.seconds])
            seen = parts * np.exp(trace.noise * rng.standard_normal(3))
            took += float(parts.sum())
            now += float(seen.sum())
            draft_s, verify_s, overhead_s = seen.tolist()
            played = Round(rows, width, drafted, accepted, draft_s, verify_s, overhead_s, at, text)
            policy.after(played, now)
            done += played.emitted
            at = (at + accepted + 1) % total
        ahead = done - total
        spent.append(took)
    return spent


def by_length(segment: Segment) -> list[float]:
    """Seconds of the segment at every fixed block length."""
    text, rows, total = segment.text, segment.rows, len(segment.text)
    if rows > 1:
        rng = np.random.default_rng(0)
        return [decode(Trace("", (segment,), noise=0.0), Fixed(g), rng)[0] for g in range(G + 1)]
    length, width, cost = text.length.tolist(), text.width.tolist(), segment.seconds.total.tolist()
    found = []
    for g in range(G + 1):
        i, took = 0, 0.0
        while i < total:
            took += cost[min(g, width[i])]
            i += min(g, length[i]) + 1
        found.append(took * total / i)
    return found


@dataclass
class Result:
    """Seconds of one trace by policy and segment, summed over seeds."""

    name: str
    held_out: bool
    segments: list[str]
    seconds: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = field(default_factory=dict)
    best: list[list[int]] = field(default_factory=list)  # the clairvoyant's block lengths, by seed

    def add(self, name: str, seconds: Sequence[float]) -> None:
        """Add one seed's."""
        self.seconds[name] = self.seconds.get(name, np.zeros(len(self.segments))) + np.array(seconds)

    def speed(self, name: str, over: str) -> float:
        """Speed of one policy over another's on the whole trace."""
        return float(self.seconds[over].sum() / self.seconds[name].sum())

    @property
    def fractions(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Lenity's speed over the clairvoyant's, by segment."""
        return np.asarray(self.seconds["clairvoyant"] / self.seconds["lenity"])

    def row(self) -> dict[str, Any]:
        """The line of the table."""
        worst = int(self.fractions.argmin())
        return {
            "trace": self.name,
            "segments": len(self.segments),
            "fraction": round(self.speed("lenity", "clairvoyant"), 4),
            "worst_segment": [self.segments[worst], round(float(self.fractions[worst]), 4)],
            "over_plain": round(self.speed("lenity", "plain"), 4),
            "clairvoyant_over_plain": round(self.speed("clairvoyant", "plain"), 4),
            "over": {name: round(self.speed("lenity", name), 4) for name in (*RIVALS, "fixed")},
            "best_g": self.best[0],
        }


def play(tokens: int, seeds: int, only: Sequence[str] = (), say: bool = False) -> list[Result]:
    """Every policy on every trace."""
    results: dict[str, Result] = {}
    for seed in range(seeds):
        for k, trace in enumerate(traces(tokens, seed, only)):
            began = time.process_time()
            result = results.setdefault(
                trace.name, Result(trace.name, trace.held_out, [s.name for s in trace.segments])
            )
            table = np.array([by_length(segment) for segment in trace.segments])
            result.best.append(table.argmin(axis=1).tolist())
            result.add("clairvoyant", table.min(axis=1).tolist())
            result.add("fixed", table[:, table.sum(axis=0).argmin()].tolist())
            result.add("plain", table[:, 0].tolist())
            for i, (name, make) in enumerate({"lenity": Lenity, **RIVALS}.items()):
                policy = make(np.random.default_rng([seed, k, i, 0]))
                result.add(name, decode(trace, policy, np.random.default_rng([seed, k, i, 1])))
            if say:
                print(
                    f"{seed} {json.dumps(result.row())} {time.process_time() - began:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return list(results.values())


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """The keys of the goals, and the table."""
    wins, losses = {}, {}
    for rival in (*RIVALS, "fixed", "plain"):
        over = {result.name: result.speed("lenity", rival) for result in results}
        wins[rival] = sum(speed > 1 + TIE for speed in over.values())
        losses[rival] = {name: round(speed, 4) for name, speed in over.items() if speed < 1 - TIE}
    found: dict[str, Any] = {
        "mean_fraction_of_clairvoyant": round(float(np.mean([r.speed("lenity", "clairvoyant") for r in results])), 4),
        "worst_segment": round(float(min(r.fractions.min() for r in results)), 4),
        "never_slower_than_plain": round(min(r.speed("lenity", "plain") for r in results), 4),
        "wins": wins,
        "losses": losses,
        "traces": len(results),
        "means": {
            name: round(float(np.mean([r.speed(name, "clairvoyant") for r in results])), 4)
            for name in ("lenity", *RIVALS, "fixed", "plain")
        },
        "table": [r.row() for r in results],
    }
    found["by_set"] = {
        name: {
            "traces": len(part),
            "mean_fraction_of_clairvoyant": round(float(np.mean([r.speed("lenity", "clairvoyant") for r in part])), 4),
            "worst_segment": round(float(min(r.fractions.min() for r in part)), 4),
        }
        for name, held_out in (("tuned", False), ("held_out", True))
        if (part := [r for r in results if r.held_out == held_out])
    }
    found["goals"] = {name: f">= {goal}" for name, goal in GOALS.items()}
    found["missed"] = [name for name, goal in GOALS.items() if found[name] < goal]
    return found


def main() -> None:
    """Play and print, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter traces, one seed")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--trace", action="append", default=[], help="only this trace (may be repeated)")
    parser.add_argument("--tokens", type=int, help="output tokens a row of a trace")
    parser.add_argument("--seeds", type=int)
    args = parser.parse_args()
    tokens, seeds = QUICK if args.quick else FULL
    began = time.process_time()
    found = figures(play(args.tokens or tokens, args.seeds or seeds, args.trace, say=not args.json))
    found["cpu_s"] = round(time.process_time() - began, 1)
    print(json.dumps(found) if args.json else json.dumps({k: v for k, v in found.items() if k != "table"}, indent=1))


if __name__ == "__main__":
    main()
