"""Reach and touch curves over block position and knob, from what one knob in use has recorded.

For every drafted position the worker records the scalars of `policies.rules.Scalars`. Drafts are sampled from the draft
model whatever the knob, so the products of acceptance along a round,

    reach    S_j = E[ prod_{i<=j} A(x_i) ]
    touches  T_j = E[ sum_{i<=j} prod_{l<i} A(x_l) (A - A0)(x_i) ]

can be averaged for *every* setting of the rule at once, from the same rounds (docs/mathematics.md). Averaging per
position over examined tokens would be wrong: which contexts are examined depends on the knob in use.

The same for rounds that are lenient at their first k positions only, where A0 goes on from there: per k one matrix
product of the lenient products up to k with the lossless ones from there on, which costs little beside the rest.

Where text is easy in one stretch and hard in the next, long blocks have more of their rounds start in hard text than
short ones, whose rounds start again within the easy stretch. So for every shorter block length the recorded rounds are
cut as it would have cut them, and `Curve.starts` corrects tokens per round by what comes out.

Rounds differ in how many tokens they drafted, so reach and touches are chained: a position's conditional acceptance and
touch rate are ratios of sums over the rounds that drafted that far. With equal lengths this is the plain mean of the
products. A position with fewer than `BORROW_BELOW` effective rounds borrows the missing weight from the conditional
rates of the position before it, wholly where nothing was drafted, and its standard errors are widened.
"""

from __future__ import annotations

import base64
import contextlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from controller.curve import Curve, F, Ints, Settings, settings_path
from policies.errors import TooFewSamples
from policies.rules import Scalars, accept_prob, get_rule
from storage.records import ACCEPTED, EXAMINED, PINNED, TokenBlock

Singles = npt.NDArray[np.float32]

__all__ = ["Curve", "CurveEstimator", "Settings", "settings_path"]

BORROW_BELOW = 32.0  # effective rounds a position needs to speak for itself
CLUSTER_ROUNDS = 64  # rounds per batch when the correlation of rounds is measured
PRIOR_CLUSTERS, PRIOR_INFLATION, MOST_INFLATION = 8.0, 2.0, 64.0
ELSEWHERE, ELSEWHERE_CONFIDENT = 0.1, 0.3  # shift of touches with round starts (bench.offpolicy); rules that trust q
CUT_ROUNDS, MOST_SHIFT = 16.0, 1.5  # rounds from which shorter blocks are judged; by how much that may change tokens
UNSEEN_ERROR = 0.5  # relative standard error of a borrowed rejection or touch rate


class CurveEstimator:
    """Running estimate of a `Curve` for one accept rule, with exponential forgetting per round.

    ``rule`` names an accept rule; ``g_max >= 1`` is the longest block; a round's weight halves after
    ``half_life_rounds`` further rounds (a round of each request counts). Blocks of several workers go into one
    estimator; a changed rule needs a new one. ``settings`` comes from `settings_path`, which is its default.
    """

    _BY_SETTING = ("_accept", "_before", "_touch", "_touches", "_touches_sq")
    _SCALARS = ("_acceptance", "_cluster", "_clusters")

    def __init__(self, rule: str, g_max: int, half_life_rounds: float = 4000, settings: Settings | None = None):
        if g_max < 1 or not half_life_rounds > 0:
            raise ValueError(f"g_max must be at least 1 and the half life positive: {g_max!r}, {half_life_rounds!r}")
        self.rule, self.g_max, self.half_life_rounds = get_rule(rule).name, g_max, float(half_life_rounds)
        self.settings = settings or settings_path()
        self._elsewhere = ELSEWHERE_CONFIDENT if get_rule(rule).draft_confidence else ELSEWHERE
        shape = (len(self.settings), g_max)
        # Weighted sums over the rounds that drafted position j: products up to j, products before j, touches at j,
        # touches up to j and their squares; then the weights and squared weights.
        self._accept, self._before, self._touch = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._touches, self._touches_sq = np.zeros(shape), np.zeros(shape)
        # Lenient at the first k positions only: products up to j > k and before j, by level from 1 and pair (k, j).
        self._pairs = np.triu_indices(g_max, 1)
        self._deep = np.zeros((2, len(self.settings) - 1, len(self._pairs[0])))
        # By shorter block length: rounds, their lossless tokens, those up to that length, and rounds if cut to it.
        self._cut = np.zeros((4, g_max))
        self._weight, self._weight_sq = np.zeros(g_max), np.zeros(g_max)
        self._acceptance = np.zeros(2)  # weighted accepted and examined tokens
        self._open = np.zeros((2, len(self.settings)))  # residual sums of the open cluster: accepted, touches
        self._cluster = np.zeros(3)  # rounds in the open cluster, and its squared residuals: accepted, touches
        self._clusters = np.zeros(5)  # closed clusters; squared sums and sums of squares: accepted, touches

    @property
    def rounds_effective(self) -> float:
        """Effective number of rounds in memory."""
        return float(self._n_eff()[0])

    @property
    def examined(self) -> float:
        """Examined tokens in memory, weighted by age."""
        return float(self._acceptance[1])

    @property
    def acceptance(self) -> float | None:
        """Accepted over examined tokens at the knobs that were in use; None when nothing was examined."""
        return float(self._acceptance[0] / self._acceptance[1]) if self._acceptance[1] > 0 else None

    def add(self, block: TokenBlock) -> None:
        """Take in one telemetry block, its rounds in the order of their index.

        Positions beyond g_max are left out; a round whose positions are not 1, 2, 3, ... is left out altogether.
        PINNED positions count with lossless acceptance at every setting.
        """
        rounds = Rounds.of(block, self.g_max)
        if rounds is None:
            return
        products, lossless = self._products(block, rounds)
        count = len(rounds.length)
        decay = 0.5 ** (1.0 / self.half_life_rounds)
        weight = decay ** np.arange(count - 1, -1, -1, dtype=np.float64)
        self._remember_correlation(products, rounds.length)
        self.forget(decay**count)
        g = rounds.drafted.shape[1]
        w = weight[:, None] * (np.arange(1, g + 1) <= rounds.length[:, None])
        for name, values in zip(self._BY_SETTING, products, strict=True):
            getattr(self, name)[:, :g] += _weighted(weight, w, values)
        self._weight[:g] += w.sum(axis=0)
        self._weight_sq[:g] += (w * w).sum(axis=0)
        self._go_on_losslessly(products[0], lossless, w)
        self._cut_shorter(products[0][:, 0], rounds.length, weight)
        flags = block.flags[rounds.drafted]
        for i, bits in enumerate((EXAMINED | ACCEPTED, EXAMINED)):
            self._acceptance[i] += float((w * ((flags & bits) == bits)).sum())

    def forget(self, keep: float) -> None:
        """Scale the weight of everything remembered by ``keep`` in [0, 1], so that new rounds outweigh it sooner."""
        for name in (*self._BY_SETTING, "_deep", "_cut", "_weight", "_acceptance", "_clusters"):
            getattr(self, name)[...] *= keep
        self._weight_sq *= keep * keep

    def curve(self) -> Curve:
        """The curve as of now; raises TooFewSamples before the first drafted round."""
        n = self._n_eff()
        if not n[0] > 0:
            raise TooFewSamples(f"no drafted round of rule {self.rule!r} in memory")
        reach, touches = self._chain(n)
        reach_se, touches_se = self._errors(n, reach, touches)
        by_depth = self._by_depth(n, reach)
        starts = self._starts()
        return Curve(self.settings, reach, touches, reach_se, touches_se, by_depth, np.concatenate((n[:1], n)), starts)

    def _n_eff(self) -> F:
        """Effective rounds by position: Kish's size, at most what the remembered weight can carry; shape [g_max]."""
        kish = self._weight**2 / np.where(self._weight_sq > 0, self._weight_sq, 1.0)
        return np.minimum(kish, 2.0 * self._weight)

    def _chain(self, n: F) -> tuple[F, F]:
        """Reach and touches, shape [S, g_max + 1], borrowing where fewer than BORROW_BELOW rounds were seen."""
        own = np.minimum(1.0, n / BORROW_BELOW)
        own[0] = 1.0
        seen = self._before > 0
        below = np.where(seen, self._before, 1.0)
        ratio, rate = self._accept / below, self._touch / below
        reach, touches = np.ones((len(self.settings), self.g_max + 1)), np.zeros((len(self.settings), self.g_max + 1))
        for j in range(self.g_max):
            if j > 0:
                mix = own[j] * seen[:, j]
                ratio[:, j] = mix * ratio[:, j] + (1 - mix) * ratio[:, j - 1]
                rate[:, j] = mix * rate[:, j] + (1 - mix) * rate[:, j - 1]
            reach[:, j + 1] = reach[:, j] * np.minimum(1.0, ratio[:, j])
            touches[:, j + 1] = touches[:, j] + reach[:, j] * np.minimum(1.0, rate[:, j])
        return reach, touches

    def _by_depth(self, n: F, reach: F) -> F:
        """Reach by depth and position, shape [S, g_max + 1, g_max + 1]; what is missing is borrowed from lossless."""
        g, (k, j) = self.g_max, self._pairs
        ratio = np.ones((len(self.settings), g + 1, g + 1))
        alone = reach[0, 1:] / np.where(reach[0, :-1] > 0, reach[0, :-1], 1.0)
        accept, before = self._deep
        seen = before > 0
        mix = np.minimum(1.0, n[j] / BORROW_BELOW) * seen
        own = np.minimum(1.0, accept / np.where(seen, before, 1.0))
        ratio[1:, k + 1, j + 1] = mix * own + (1 - mix) * alone[j]
        ratio[0, k + 1, j + 1] = alone[j]
        ratio[:, 0, 1:] = alone
        lenient = np.tri(g + 1, dtype=bool)  # j <= k
        found = np.where(lenient, reach[:, None, :], 1.0)
        last = np.diagonal(found, axis1=1, axis2=2)  # reach at k itself
        return np.asarray(
            np.where(lenient, found, last[:, :, None] * np.cumprod(np.where(lenient, 1.0, ratio), axis=2))
        )

    def _errors(self, n: F, reach: F, touches: F) -> tuple[F, F]:
        """Standard errors of `_chain`'s arrays.

        The smaller of two upper estimates: the spread of whole rounds that drafted that far, and the error at the
        position before plus that of the conditional rate (at most that of as many coin flips as rounds arrived there).
        Both are inflated by the measured correlation of rounds. One unseen touch in all the effective rounds is added,
        and for touches the tolerance for rounds that start elsewhere at another knob.
        """
        inflate_reach, inflate_touches = self._inflation()
        reach_se, touches_se = np.zeros_like(reach), np.zeros_like(touches)
        weight = np.where(self._weight > 0, self._weight, 1.0)
        spread = np.maximum(0.0, self._touches_sq / weight - (self._touches / weight) ** 2)
        for j in range(self.g_max):
            m = max(float(n[j]), BORROW_BELOW if j else 1.0)
            unseen = max(0.0, 1 - float(n[j]) / BORROW_BELOW) * UNSEEN_ERROR if j else 0.0
            here, then = reach[:, j], reach[:, j + 1]
            step = touches[:, j + 1] - touches[:, j]
            coin = np.sqrt(np.maximum(0.0, then * (here - then)) / np.where(here > 0, here, 1.0) / m * inflate_reach)
            ratio = then / np.where(here > 0, here, 1.0)
            chained = ratio * reach_se[:, j] + coin + unseen * (here - then)
            touch = np.sqrt(np.maximum(0.0, step) / m * inflate_touches)
            rate = step / np.where(here > 0, here, 1.0)
            chained_touches = touches_se[:, j] + touch + rate * reach_se[:, j] + unseen * step
            if n[j] >= BORROW_BELOW:
                whole = np.sqrt(np.maximum(0.0, then * (1 - then)) / m * inflate_reach)
                chained = np.minimum(chained, whole)
                chained_touches = np.minimum(chained_touches, np.sqrt(spread[:, j] / m * inflate_touches))
            reach_se[:, j + 1] = chained
            touches_se[:, j + 1] = chained_touches
        touches_se[1:, 1:] = np.hypot(touches_se[1:, 1:], 1 / max(float(n[0]), 1.0))
        touches_se[1:] = np.hypot(touches_se[1:], self._elsewhere * touches[1:])
        return reach_se, touches_se

    def _inflation(self) -> tuple[float, float]:
        """Variance inflation by correlation between rounds, of reach and of touches, at least 1: batch means.

        The squared sum of residuals over batches of CLUSTER_ROUNDS rounds against the sum of their squares, pooled over
        settings and shrunk to PRIOR_INFLATION while batches are few.
        """
        closed, *sums = (float(v) for v in self._clusters)
        found: list[float] = []
        for together, apart in (sums[0:2], sums[2:4]):
            ratio = together / apart if apart > 0 else PRIOR_INFLATION
            blended = (closed * ratio + PRIOR_CLUSTERS * PRIOR_INFLATION) / (closed + PRIOR_CLUSTERS)
            found.append(min(MOST_INFLATION, max(1.0, blended)))
        return found[0], found[1]

    def _products(self, block: TokenBlock, rounds: Rounds) -> tuple[tuple[Singles, ...], Singles]:
        """Per round, level and position (shape [rounds, S, g]) what `_BY_SETTING` sums; and A0, [rounds, g]."""
        at = rounds.drafted
        scalars = Scalars(*(getattr(block, name)[at][:, None, :] for name in Scalars._fields))
        theta = self.settings.theta.astype(np.float32)[:, None]
        accept: Singles = accept_prob(get_rule(self.rule), scalars, theta)
        lossless = accept[:, :1]
        pinned = (block.flags[at] & PINNED) > 0
        if pinned.any():
            accept = np.where(pinned[:, None, :], lossless, accept)
        after = np.empty_like(accept)
        before = np.ones_like(accept)
        after[:, :, 0] = accept[:, :, 0]
        for j in range(1, accept.shape[2]):
            before[:, :, j] = after[:, :, j - 1]
            np.multiply(before[:, :, j], accept[:, :, j], out=after[:, :, j])
        touch = before * (accept - lossless)
        touches = np.cumsum(touch, axis=2)
        return (after, before, touch, touches, touches * touches), lossless[:, 0]

    def _go_on_losslessly(self, after: Singles, lossless: Singles, weight: F) -> None:
        """Add the products that are lenient up to each position and lossless after it; ``weight`` is [rounds, g]."""
        g, w = after.shape[2], weight.astype(np.float32)
        lenient = np.ascontiguousarray(after[:, 1:].transpose(2, 1, 0))  # [g, levels, rounds]
        first = 0
        for k in range(g - 1):
            alone = np.cumprod(lossless[:, k + 1 :], axis=1)
            before = np.concatenate((np.ones_like(alone[:, :1]), alone[:, :-1]), axis=1)
            for sums, part in zip(self._deep, (alone, before), strict=True):
                sums[:, first : first + g - 1 - k] += lenient[k] @ (w[:, k + 1 :] * part)
            first += self.g_max - 1 - k

    def _cut_shorter(self, alive: Singles, length: Ints, weight: F) -> None:
        """Add what these rounds would have been at shorter blocks: ``alive`` is their lossless reach, [rounds, g].

        At block length h a round that got further than h + 1 tokens would have been two or more, with the same tokens;
        a last one that is cut off by the end of the block counts by the tokens that it had.
        """
        g = alive.shape[1]
        inside = np.arange(1, g + 1) <= length[:, None]
        reach = np.where(inside, alive, 0.0).astype(np.float64)
        tokens = 1 + np.concatenate((np.zeros((len(reach), 1)), np.cumsum(reach, axis=1)), axis=1)
        usual = weight @ tokens / weight.sum()
        for h in range(1, g + 1):
            use = weight * (length >= h)
            begun = np.arange(h + 1, g + 1, h + 1)  # accepted drafts with which a further round would begin
            left = np.clip(length[:, None] - begun, 0, h)
            rounds = 1 + (reach[:, begun - 1] * usual[left] / usual[h]).sum(axis=1)
            self._cut[:, h - 1] += (use.sum(), use @ tokens[:, -1], use @ tokens[:, h], use @ rounds)

    def _starts(self) -> F:
        """Tokens per round at each block length over what the reach promises, as rounds would start there."""
        count, whole, promised, rounds = self._cut
        found = np.ones(self.g_max + 1)
        for h in range(1, self.g_max + 1):
            known = count[h - 1] >= CUT_ROUNDS
            found[h] = whole[h - 1] / rounds[h - 1] * count[h - 1] / promised[h - 1] if known else found[h - 1]
        return np.clip(found, 1 / MOST_SHIFT, MOST_SHIFT)

    def _remember_correlation(self, products: tuple[Singles, ...], length: Ints) -> None:
        """Add the rounds' residuals, against what was expected before this block, to the open cluster."""
        n = self._n_eff()
        if n[0] < CLUSTER_ROUNDS:
            return
        reach, touches = self._chain(n)
        after, _, _, touched, _ = products
        rows = np.arange(len(length))
        accepted = np.cumsum(after, axis=2)[rows, :, length - 1]
        residuals = (
            accepted - (np.cumsum(reach, axis=1) - 1)[:, length].T,
            touched[rows, :, length - 1] - touches[:, length].T,
        )
        self._cluster[0] += len(length)
        for i, residual in enumerate(residuals):
            self._open[i] += residual.sum(axis=0)
            self._cluster[i + 1] += float((residual**2).sum())
        if self._cluster[0] >= CLUSTER_ROUNDS:
            for i in range(2):
                self._clusters[2 * i + 1] += float((self._open[i] ** 2).sum())
                self._clusters[2 * i + 2] += self._cluster[i + 1]
            self._clusters[0] += 1
            self._open[...], self._cluster[...] = 0.0, 0.0

    def to_state(self) -> dict[str, Any]:
        """JSON-able state from which `from_state` goes on bit for bit."""
        names = (*self._BY_SETTING, *self._SCALARS, "_deep", "_cut", "_weight", "_weight_sq", "_open")
        s = self.settings
        return {
            "rule": self.rule,
            "g_max": self.g_max,
            "half_life_rounds": self.half_life_rounds,
            "levels": s.levels,
            "top": float(s.theta[-1]),
            "sums": {name: _pack(getattr(self, name)) for name in names},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The estimator that wrote ``state``; raises ValueError when its shapes are not those of this version."""
        settings = settings_path(int(state["levels"]), float(state["top"]))
        made = cls(state["rule"], int(state["g_max"]), float(state["half_life_rounds"]), settings)
        for name, text in state["sums"].items():
            target = getattr(made, name)
            target[...] = _unpack(text, target.shape)
        return made


@dataclass(frozen=True)
class Rounds:
    """Row numbers of the drafted positions of whole rounds, shape [rounds, longest], and the rounds' lengths."""

    drafted: Ints
    length: Ints

    @classmethod
    def of(cls, block: TokenBlock, g_max: int) -> Rounds | None:
        """Rounds in time order, one per request; None when no usable position was drafted. Padding repeats a row."""
        key = block.round.astype(np.int64) << 16 | block.request
        order = np.lexsort((block.position, key))
        key, position = key[order], block.position[order].astype(np.int64)
        if not len(key):
            return None
        first = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        length = np.diff(np.append(first, len(key)))
        expected = np.arange(len(key)) - np.repeat(first, length) + 1
        whole = np.logical_and.reduceat(position == expected, first)
        first, length = first[whole], np.minimum(length[whole], g_max)
        if not len(first):
            return None
        steps = np.minimum(np.arange(int(length.max())), length[:, None] - 1)
        return cls(order[first[:, None] + steps], length)


def _weighted(by_round: F, by_position: F, values: Singles) -> F:
    """Sum of [rounds, S, g] values over rounds, with weights [rounds, g] that are ``by_round`` where not zero."""
    if by_position.all():
        rounds, s, g = values.shape
        total = by_round.astype(np.float32) @ values.reshape(rounds, s * g)
    else:
        total = np.einsum("mj,msj->sj", by_position.astype(np.float32), values)
    return np.asarray(total, dtype=np.float64).reshape(values.shape[1:])


def _pack(values: F) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values, dtype="<f8").tobytes(), 1)).decode("ascii")


def _unpack(text: str, shape: tuple[int, ...]) -> F:
    raw = base64.b64decode(text)
    with contextlib.suppress(zlib.error):  # an older state is not compressed
        raw = zlib.decompress(raw)
    values = np.frombuffer(raw, dtype="<f8") if len(raw) % 8 == 0 else np.zeros(0)
    if values.size != math.prod(shape) or not np.all(np.isfinite(values)):
        raise ValueError(f"the state holds {values.size} numbers where {math.prod(shape)} finite ones belong")
    return values.reshape(shape).astype(np.float64)
