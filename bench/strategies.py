"""Decoding strategies on the same work: ``python -m bench.strategies [--quick] --json`` (bundled pair, one core).

Every strategy at up to three settings answers the same easy problems with the same seeds, at temperature 1 and
greedily: exact match, target and draft passes a token, and CPU time a token. Problems go round the settings in turn, so
that whatever else the machine does falls on all alike. The table is in `docs/strategies.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoder.demo.pair import EOS, load_pair, prompt_ids
from decoder.demo.problems import make_problem
from decoder.demo.tasks import score_exact
from decoder.drafters import Drafter, ModelDrafter, NgramDrafter
from decoder.drafters.cascade import HorizontalDrafter, VerticalDrafter
from decoder.drafters.selfdraft import SelfDrafter
from decoder.generate import Engine, Knobs, Request, SamplingParams
from decoder.strategies import Models, decode

G, SEED, MAX_TOKENS, RESAMPLES = 4, 2718, 160, 2000


@dataclass(frozen=True)
class Setting:
    """One strategy with its knobs."""

    strategy: str
    rule: str = "lossless"
    theta: float = 0.0
    g: int = G

    @property
    def name(self) -> str:
        return self.strategy if self.rule == "lossless" else f"{self.strategy} {self.rule} {self.theta:g}"

    @property
    def knobs(self) -> Knobs:
        return Knobs(g=self.g, rule=self.rule, theta=self.theta)


# Knobs of the sequence cascades: the 80th, 50th and 20th percentile of the draft's least token probability, so that
# about 20, 50 and 80% of the answers are believed; from 40 other problems (seed 99).
BELIEVED = {1.0: (0.888, 0.926, 0.984), 0.0: (0.565, 0.586, 0.703)}


def settings(temperature: float) -> list[Setting]:
    """What is compared."""
    made = [Setting("plain"), Setting("draft_only", "draft_only", 1.0), Setting("speculative")]
    made += [Setting("speculative", "token_v3", theta) for theta in (0.8, 0.95)]
    made += [Setting("token_cascade", "chow", theta) for theta in (0.1, 0.3, 0.6)]
    made += [Setting("token_cascade", "diff", theta) for theta in (0.02, 0.1, 0.4)]
    for strategy in ("sequence_cascade", "speculative_sequence_cascade"):
        made += [Setting(strategy, "confidence_min", theta) for theta in BELIEVED[temperature]]
    made += [Setting("bild", "bild", theta) for theta in (0.9, 0.97, 0.995)]
    return made


COLUMNS = ("exact", "tokens", "target_passes", "draft_passes", "touched", "cpu_s")


def measure(problems: int, temperature: float, compared: Sequence[Setting], seconds: float) -> npt.NDArray[np.float64]:
    """`COLUMNS` of every setting and problem, [settings, problems done, columns]; stops after so many CPU seconds."""
    pair = load_pair()
    models = Models(pair.target, ModelDrafter(pair.draft), eos_ids=[EOS])
    rng = random.Random(SEED)
    done: list[list[tuple[float, ...]]] = []
    began = time.process_time()
    for i in range(problems):
        problem = make_problem(rng, "easy")
        params = SamplingParams(temperature=temperature, seed=SEED + i, max_tokens=MAX_TOKENS)
        request = Request(f"problem-{i}", prompt_ids(pair.tokenizer, problem.prompt), params)
        rows: list[tuple[float, ...]] = [()] * len(compared)
        for j in range(len(compared)):
            place = (i + j) % len(compared)
            setting = compared[place]
            start = time.process_time()
            out = decode(models, request, lambda knobs=setting.knobs: knobs, setting.strategy)  # type: ignore[misc]
            spent = time.process_time() - start
            text = pair.tokenizer.decode([token for token in out.token_ids if token != EOS])
            rows[place] = (
                score_exact(text, problem.answer),
                len(out.token_ids),
                out.target_passes,
                out.draft_passes,
                out.arm != "untouched",
                spent,
            )
        done.append(rows)
        if i % 20 == 19:
            print(f"temperature {temperature:g}: {i + 1} problems", file=sys.stderr)
        if time.process_time() - began > seconds:
            break
    return np.array(done).transpose(1, 0, 2)


def drafters(problems: int, seconds: float) -> dict[str, Any]:
    """Drafters under lossless rounds at temperature 1: acceptance, passes and CPU time, each [value, low, high]."""
    pair = load_pair()
    draft = ModelDrafter(pair.draft)
    vertical = VerticalDrafter(pair.draft)
    made: dict[str, Drafter] = {"draft model": draft, "n-gram": NgramDrafter()}
    made |= {f"first {k} of 6 layers": SelfDrafter(pair.target, k) for k in (1, 3, 5, 6)}
    made |= {
        "vertical: n-gram, draft model": vertical,
        "horizontal: draft model, n-gram": HorizontalDrafter(draft, head=2),
    }
    engines = {name: Engine(pair.target, drafter, eos_ids=[EOS]) for name, drafter in made.items()}
    rng, names = random.Random(SEED), list(made)
    done: list[list[tuple[float, ...]]] = []
    began = time.process_time()
    for i in range(problems):
        prompt = prompt_ids(pair.tokenizer, make_problem(rng, "easy").prompt)
        request = Request(f"problem-{i}", prompt, SamplingParams(seed=SEED + i, max_tokens=MAX_TOKENS))
        rows: list[tuple[float, ...]] = [()] * len(names)
        for j in range(len(names)):
            place = (i + j) % len(names)
            start, passes = time.process_time(), vertical.passes
            out = engines[names[place]].generate(request, lambda: Knobs.lossless(G))
            spent = time.process_time() - start
            drafted = vertical.passes - passes if names[place].startswith("vertical") else out.drafted
            rows[place] = (out.accepted, out.examined, out.target_passes, drafted, len(out.token_ids), spent)
        done.append(rows)
        if time.process_time() - began > seconds:
            break
    table = np.array(done).transpose(1, 2, 0)
    found: dict[str, Any] = {"problems": len(done)}
    for name, (accepted, examined, passes, drafted, tokens, cpu) in zip(names, table, strict=True):
        found[name] = {
            "acceptance": ratio(accepted, examined),
            "target_passes_per_token": ratio(passes, tokens),
            "draft_passes_per_token": ratio(drafted, tokens),
            "cpu_ms_per_token": ratio(1000 * cpu, tokens),
        }
        if name == "n-gram" or name.startswith("horizontal"):
            del found[name]["draft_passes_per_token"]  # tokens that n-grams found cost none
    return found


def ratio(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> list[float]:
    """Sum over sum, and its 95% interval by resampling problems."""
    rng = np.random.default_rng(SEED)
    picks = rng.integers(len(above), size=(RESAMPLES, len(above)))
    low, high = np.quantile(above[picks].sum(1) / below[picks].sum(1), (0.025, 0.975))
    return [round(float(x), 4) for x in (above.sum() / below.sum(), low, high)]


def wilson(hits: float, n: int) -> list[float]:
    """A share and its 95% interval."""
    z, p = 1.96, hits / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return [round(x, 4) for x in (p, (middle - half) / scale, (middle + half) / scale)]


def summary(compared: Sequence[Setting], table: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Figures of every setting: each is [value, low, high]."""
    exact, tokens, passes, drafts, touched, cpu = (table[..., c] for c in range(len(COLUMNS)))
    found = {}
    for j, setting in enumerate(compared):
        found[setting.name] = {
            "exact_match": wilson(float(exact[j].sum()), table.shape[1]),
            "touched": wilson(float(touched[j].sum()), table.shape[1]),
            "target_passes_per_token": ratio(passes[j], tokens[j]),
            "draft_passes_per_token": ratio(drafts[j], tokens[j]),
            "cpu_ms_per_token": ratio(1000 * cpu[j], tokens[j]),
        }
    return found


def show(found: dict[str, Any]) -> str:
    """The figures as a table in Markdown."""
    titles = [
        "strategy, rule, theta",
        "exact match",
        "touched",
        *(f"{x} a token" for x in ("target passes", "draft passes", "CPU ms")),
    ]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for name, row in found.items():
        cells = [f"{row[key][0]:.3f} ({row[key][1]:.3f} to {row[key][2]:.3f})" for key in list(row)[:5]]
        cells[1], cells[3] = f"{row['touched'][0]:.2f}", f"{row['draft_passes_per_token'][0]:.2f}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the figures, or one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about half a minute of CPU instead of ten")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    # CPU seconds are a bound: on a slow machine fewer problems are done, and the intervals say so.
    for temperature, problems, seconds in ((1.0, 200, 400.0), (0.0, 100, 200.0)):
        compared = settings(temperature)
        table = measure(8 if args.quick else problems, temperature, compared, 14.0 if args.quick else seconds)
        key = f"temperature_{temperature:g}"
        found[key] = {"problems": table.shape[1], **summary(compared, table)}
        if not args.json:
            print(f"\n{key}, {table.shape[1]} problems\n\n{show(summary(compared, table))}")
    found["drafters"] = drafters(4 if args.quick else 60, 5.0 if args.quick else 90.0)
    if args.json:
        print(json.dumps(found))
    else:
        for name, row in found["drafters"].items():
            print(name, row)


if __name__ == "__main__":
    main()
