"""How well one knob predicts the others: ``python -m bench.offpolicy [--quick] --json`` (bundled pair, one thread).

Rounds are recorded at one knob of one rule. The curves estimated from them predict ten other knobs of every completed
rule.

- *Frozen starts*: at each recorded round start a second block is drafted, and its coins are tossed at every knob. Only
  noise may differ: deviations are in standard errors, and at most 3. The per-position estimate over examined tokens is
  the negative control: it fails where positions depend on each other, within easy problems weakly, and by far where
  easy and hard requests are mixed (key ``mixed``; `bench.mixture` is the same on recorded texts).
- *On policy*: each knob decodes other problems itself, so its rounds start elsewhere. Deviations of tokens per round
  and of touches per token are relative; what noise does not explain is the shift that a lease lives with.

Blocks are played token by token, both models side by side, many requests at a time. A request's last round is played
out past its end token, so that every round is a whole one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from controller.curve import Curve
from controller.estimate import CurveEstimator
from decoder.demo.pair import CACHE_ARGUMENT, EOS, PAD, Pair, load_pair, prompt_ids
from decoder.demo.problems import Domain
from decoder.demo.simulation import distributions, fresh_problems, inverse_cdf, position_scalars
from decoder.demo.tasks import Problem
from policies.rules import RULES, Scalars, accept_prob, get_rule, lossless_accept
from storage.records import TokenBlock

F = npt.NDArray[np.float64]
G = 5
IN_USE = ("token_v3", 0.5)
LONG, STRICT = 12, ("threshold", 0.0)  # of the mixture of domains
DOMAINS: tuple[tuple[int, Domain], ...] = ((11, "easy"), (12, "hard"))
KNOBS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)
FEW_TOUCHES = 5e-3  # touches per token below which a relative deviation means nothing
LONGEST = 200


class Stream:
    """Both models over one left-padded batch: the next token's logits, one token per row at a time, and branches."""

    def __init__(self, pair: Pair, problems: Sequence[Problem]):
        ids = [prompt_ids(pair.tokenizer, problem.prompt) for problem in problems]
        width = max(map(len, ids))
        self.models: tuple[Any, Any] = (pair.target, pair.draft)
        self.caches: tuple[Any, Any] = (DynamicCache(), DynamicCache())
        self.step = torch.tensor([[PAD] * (width - len(row)) + row for row in ids])
        self.mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        self.position = (self.mask.cumsum(-1) - 1).clamp_min(0)

    def logits(self) -> list[torch.Tensor]:
        """The target's and the draft's logits of the next token, each [rows, vocabulary]; reads what was appended."""
        kept = ({"logits_to_keep": 1},) * 2
        return [
            _forward(model, cache, self.step, self.mask, self.position, **keep)[:, -1]
            for model, cache, keep in zip(self.models, self.caches, kept, strict=True)
        ]

    def append(self, tokens: torch.Tensor, keep: torch.Tensor) -> None:
        """Append one token per row; only the rows ``keep`` go on."""
        if len(keep) < len(tokens):
            self.caches = tuple(_rows(cache, keep) for cache in self.caches)  # type: ignore[assignment]
        self.step = tokens[keep, None]
        self.position = self.position[keep, -1:] + 1
        self.mask = torch.cat([self.mask[keep], torch.ones(len(keep), 1, dtype=torch.long)], 1)

    def blocks(self, rows: torch.Tensor, p: torch.Tensor, q: torch.Tensor, uniforms: torch.Tensor) -> Scalars:
        """Draft a block of g tokens at these rows (after `logits`, whose p and q are given) and let the target read it.

        ``uniforms`` [rows, g] drive the drafts. Returns scalars [rows, g]; the stream itself does not move.
        """
        g = uniforms.shape[1]
        target, draft = (_rows(cache, rows) for cache in self.caches)
        mask, position = self.mask[rows], self.position[rows, -1:]
        tokens, drafts = [], [q[rows]]
        for j in range(g):
            tokens.append(inverse_cdf(drafts[j], uniforms[:, j]))
            if j == g - 1:
                break
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
            logits = _forward(self.models[1], draft, tokens[j][:, None], mask, position + 1 + j)[:, -1]
            drafts.append(distributions(logits, 1.0))
        block = torch.stack(tokens, 1)
        places = position + 1 + torch.arange(g - 1)
        read = _forward(self.models[0], target, block[:, :-1], mask, places)
        targets = torch.cat([p[rows, None], distributions(read, 1.0)], 1)
        made = torch.stack(drafts, 1)
        px, qx = (table.gather(2, block[:, :, None])[:, :, 0] for table in (targets, made))
        tv = (targets - made).clamp_min(0).sum(-1)
        return Scalars(px, qx, px, qx, targets.amax(-1), made.amax(-1), tv)


def _forward(
    model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, **options: Any
) -> torch.Tensor:
    out = model(
        tokens, attention_mask=mask, position_ids=position, use_cache=True, **{CACHE_ARGUMENT: cache}, **options
    )
    logits: torch.Tensor = out.logits
    return logits


def _rows(cache: Any, rows: torch.Tensor) -> Any:
    """A copy of these rows of a cache."""
    copy = DynamicCache()
    for i, layer in enumerate(cache.layers):
        copy.update(layer.keys[rows], layer.values[rows], i)
    return copy


@dataclass
class Played:
    """Sums over the rounds of one run, and the blocks drafted at its round starts if they were recorded."""

    rounds: int = 0
    tokens: int = 0
    squares: int = 0  # of tokens in a round
    touches: float = 0.0  # expected, at every examined position: exact in the drafts
    touch_squares: float = 0.0  # of a round's
    recorded: list[Scalars] = field(default_factory=list)  # one block per recorded start
    second: list[Scalars] = field(default_factory=list)  # and another one

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def tokens_error(self) -> float:
        """Standard error of tokens per round, of independent rounds."""
        return float(np.sqrt(max(0.0, self.squares / self.rounds - self.tokens_per_round**2) / self.rounds))

    @property
    def touches_per_token(self) -> float:
        return self.touches / self.tokens

    @property
    def touches_error(self) -> float:
        """Relative standard error of touches per token, of independent rounds; 0 without touches."""
        mean = self.touches / self.rounds
        spread = max(0.0, self.touch_squares / self.rounds - mean**2)
        return float(np.sqrt(spread / self.rounds) / mean) if mean > 0 else 0.0


@torch.inference_mode()
def play(
    pair: Pair,
    problems: Sequence[Problem],
    rule: str,
    theta: float,
    *,
    weights: Sequence[float] = (1.0,) * G,
    record: bool = False,
    seed: int = 5,
    batch: int = 125,
) -> Played:
    """Decode all problems at one knob in rounds of as many drafts as there are weights, temperature 1.

    ``weights`` are the mixing weights rho by position. With ``record`` two independent blocks are drafted at each round
    start. Uniforms belong to (problem, position).
    """
    played = Played()
    for start in range(0, len(problems), batch):
        generator = torch.Generator().manual_seed(seed + start)
        _play(pair, problems[start : start + batch], rule, theta, weights, generator, played, record=record)
    return played


def _play(
    pair: Pair,
    problems: Sequence[Problem],
    rule: str,
    theta: float,
    weights: Sequence[float],
    generator: torch.Generator,
    played: Played,
    *,
    record: bool,
) -> None:
    n, g = len(problems), len(weights)
    uniforms = torch.rand(3, n, LONGEST, generator=generator)
    by_place = torch.tensor([*weights, 0.0])
    stream = Stream(pair, problems)
    live = torch.arange(n)
    in_round = torch.zeros(n, dtype=torch.float64)
    place, ended = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.bool)  # accepted so far; end token seen
    for t in range(LONGEST):
        p, q = (distributions(x, 1.0) for x in stream.logits())
        starts = (place == 0).nonzero()[:, 0]
        if record and len(starts):
            both = torch.cat([starts, starts])
            blocks = stream.blocks(both, p, q, torch.rand(len(both), g, generator=generator))
            played.recorded.append(Scalars(*(v[: len(starts)].numpy() for v in blocks)))
            played.second.append(Scalars(*(v[len(starts) :].numpy() for v in blocks)))
        u_draft, u_accept, u_residual = uniforms[:, live, t]
        scalars = position_scalars(p, q, p, q)
        lossless = lossless_accept(scalars)
        lenient = accept_prob(get_rule(rule), scalars, theta, by_place[place, None])
        drafting = place < g
        in_round += (q * (lenient - lossless)).sum(-1).double() * drafting
        x = inverse_cdf(q, u_draft)
        kept = drafting & (u_accept <= lenient.gather(1, x[:, None])[:, 0])
        residual = (p - q).clamp_min(0)
        other = torch.where((drafting & (residual.sum(-1) > 0))[:, None], residual, p)
        y = torch.where(kept, x, inverse_cdf(other, u_residual))
        over = ~kept
        sizes = (place + 1)[over]
        played.rounds += len(sizes)
        played.tokens += int(sizes.sum())
        played.squares += int((sizes * sizes).sum())
        played.touches += float(in_round[over].sum())
        played.touch_squares += float((in_round[over] ** 2).sum())
        in_round = torch.where(over, 0.0, in_round)
        place = torch.where(over, 0, place + 1)
        ended |= y == EOS
        keep = (~(ended & over)).nonzero()[:, 0]
        if not len(keep):
            return
        stream.append(y, keep)
        live, place, ended, in_round = live[keep], place[keep], ended[keep], in_round[keep]


def block_of(scalars: Scalars, rule: str, seq: int) -> TokenBlock:
    """A telemetry block of whole rounds with these scalars [rounds, g]; only what a curve reads is set."""
    rounds, g = scalars.tv.shape
    n = rounds * g
    empty = np.zeros(rounds, dtype=np.float32)
    return TokenBlock(
        pool="bench",
        traffic_class="default",
        worker="w",
        boot="b",
        seq=seq,
        epoch=1,
        lease_seq=1,
        rule=rule,
        rho=1.0,
        round_rows=np.ones(rounds, np.uint16),
        round_width=np.full(rounds, g, np.uint16),
        round_emitted=np.ones(rounds, np.uint32),
        round_prefill=np.zeros(rounds, np.uint32),
        round_draft_s=empty,
        round_verify_s=empty,
        round_overhead_s=empty,
        request=np.zeros(n, np.uint16),
        round=np.repeat(np.arange(rounds, dtype=np.uint32), g),
        position=np.tile(np.arange(1, g + 1, dtype=np.uint8), rounds),
        theta=np.full(n, IN_USE[1], np.float32),
        flags=np.zeros(n, np.uint8),
        **{name: np.ravel(value).astype(np.float32) for name, value in scalars._asdict().items()},
    )


def curve_of(rule: str, blocks: Sequence[Scalars]) -> Curve:
    """The curve that the controller's estimator makes of these blocks, without forgetting."""
    estimator = CurveEstimator(rule, blocks[0].tv.shape[1], half_life_rounds=1e12)
    for seq, scalars in enumerate(blocks):
        estimator.add(block_of(scalars, rule, seq))
    return estimator.curve()


def frozen(
    rule: str, curve: Curve, played: Played, rng: np.random.Generator, in_use: tuple[str, float] = IN_USE
) -> dict[str, list[float]]:
    """Deviations in standard errors at each knob, of accepted tokens and touches: of the curve, and of the control."""
    g = curve.g_max
    first, second = (
        Scalars(*(np.concatenate(columns) for columns in zip(*blocks, strict=True)))
        for blocks in (played.recorded, played.second)
    )
    u = rng.random(second.tv.shape)
    used = accept_prob(get_rule(in_use[0]), first, in_use[1])
    examined = np.cumprod(np.column_stack((np.ones(len(u)), rng.random(u.shape) <= used))[:, :-1], axis=1)
    found: dict[str, list[float]] = {"curve": [], "control": []}
    for theta in KNOBS:
        a, a0 = accept_prob(get_rule(rule), second, theta), lossless_accept(second)
        alive = np.cumprod(u <= a, axis=1)
        counts = alive.sum(axis=1), ((u > a0) & (alive > 0)).sum(axis=1)
        i = curve.settings.level_of(theta)
        b, b0 = accept_prob(get_rule(rule), first, theta), lossless_accept(first)
        rate, drift = ((v * examined).sum(axis=0) / examined.sum(axis=0) for v in (b, b - b0))
        before = np.cumprod(np.concatenate(([1.0], rate)))
        naive = float(before[1:].sum()), float((before[:-1] * drift).sum())
        for count, value, other in zip(counts, (curve.tokens[i, g] - 1, curve.touches[i, g]), naive, strict=True):
            # Products vary less than coins: twice the count's variance bounds that of the difference, given the starts.
            # Where no touch was counted, as many as predicted give it.
            error = float(np.sqrt(2 * (count.var() or float(value)) / len(count)))
            if error > 0:
                found["curve"].append((float(value) - float(count.mean())) / error)
                found["control"].append((other - float(count.mean())) / error)
    return found


def mixed(pair: Pair, rules: Sequence[str], problems: int) -> dict[str, Any]:
    """Worst deviations at frozen starts, by rule, where half the requests are hard and a lossless run drafts LONG.

    Late positions are then examined in easy requests more and more, which the control does not know.
    """
    asked = [p for seed, domain in DOMAINS for p in fresh_problems(seed, problems // 2, domain)]
    asked.sort(key=lambda p: len(p.prompt))
    played = play(pair, asked, *STRICT, weights=(1.0,) * LONG, record=True, batch=250)
    found: dict[str, Any] = {"rounds": played.rounds}
    for rule in rules:
        z = frozen(rule, curve_of(rule, played.recorded), played, np.random.default_rng(1), STRICT)
        found[rule] = {name: round(max(map(abs, values)), 2) for name, values in z.items()}
    return found


def measure(
    pair: Pair, rules: Sequence[str], knobs: Sequence[float], recorded: int, decoded: int, progress: bool = False
) -> dict[str, Any]:
    """All figures; ``recorded`` problems at the knob in use, ``decoded`` ones at each other knob on policy."""
    rng = np.random.default_rng(1)
    source, fresh = fresh_problems(271828, recorded, "easy"), fresh_problems(141421, decoded, "easy")
    played = play(pair, source, *IN_USE, record=True)
    ends: dict[float, Played] = {}  # all rules do the same at knobs 0 and 1
    by_rule: dict[str, Any] = {}
    for rule in rules:
        began = time.process_time()
        curve = curve_of(rule, played.recorded)
        z = frozen(rule, curve, played, rng)
        rows = []
        for theta in knobs:
            run = ends.get(theta) or play(pair, fresh, rule, theta, seed=1000)
            if theta in (0.0, 1.0):
                ends[theta] = run
            i = curve.settings.level_of(theta)
            tokens = float(curve.tokens[i, G])
            touches = float(curve.touches[i, G]) / tokens
            rows.append(
                {
                    "theta": theta,
                    "tokens_per_round": round(run.tokens_per_round, 4),
                    "tokens_shift": round(tokens / run.tokens_per_round - 1, 4),
                    "tokens_error": round(run.tokens_error / run.tokens_per_round, 4),
                    "touches_per_token": round(run.touches_per_token, 5),
                    "touches_error": round(run.touches_error, 4),
                    "touches_shift": round(touches / run.touches_per_token - 1, 4)
                    if run.touches_per_token > FEW_TOUCHES
                    else None,
                }
            )
        by_rule[rule] = {
            "frozen_worst": round(max(map(abs, z["curve"])), 2),
            "frozen_beyond_3": sum(abs(v) > 3 for v in z["curve"]),
            "control_worst": round(max(map(abs, z["control"])), 2),
            "on_policy": rows,
        }
        if progress:
            print(rule, json.dumps(by_rule[rule]), f"{time.process_time() - began:.0f} s", flush=True)
    shifts = [row for rule in by_rule.values() for row in rule["on_policy"]]
    touches = [abs(row["touches_shift"]) for row in shifts if row["touches_shift"] is not None]
    return {
        "frozen_worst_standard_errors": max(rule["frozen_worst"] for rule in by_rule.values()),
        "control_least_worst_standard_errors": min(rule["control_worst"] for rule in by_rule.values()),
        "tokens_per_round_worst_shift": max(abs(row["tokens_shift"]) for row in shifts),
        "touches_per_token_worst_shift": max(touches, default=0.0),
        "mixed": mixed(pair, rules, recorded // 3),
        "rounds_recorded": played.rounds,
        "knobs": len(knobs),
        "rules": by_rule,
    }


def main() -> None:
    """Print the figures, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rules, three knobs, fewer problems")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rules = ["threshold", "token_v3"] if args.quick else [name for name in RULES if name != "lossless"]
    knobs = (0.0, 0.3, 0.8) if args.quick else KNOBS
    sizes = (200, 125) if args.quick else (600, 200)
    found = measure(load_pair(), rules, knobs, *sizes, progress=not args.json)
    print(json.dumps(found) if args.json else json.dumps({k: v for k, v in found.items() if k != "rules"}, indent=1))


if __name__ == "__main__":
    main()
