"""What a cascade of whole answers would cost at every threshold, from the answers that it drafted.

A sequence cascade drafts a whole answer and believes it if the draft was sure enough of it, at a confidence of at least
``tau = 1 - theta`` (`policies.rules.confidence_threshold`); otherwise the target answers as well. Each drafted answer
tells its confidence, so one threshold in use shows all others: those who would have been believed take the draft's
seconds, the rest also the target's. A believed answer is one touch, so touches per request are the share of the fast
path, which the loss budget limits as it does touches of any rule.

    share(tau)              = answers with confidence >= tau / answers
    seconds per token(tau)  = (draft seconds of all + target seconds of those below tau) / tokens

The target's seconds for an answer that was believed are not known; they are taken as its tokens times the target's
seconds per token, measured on the answers that were not believed, or given. Errors are those of independent requests.

`Option` puts a cascade, a speculative solution and plain decoding into the same units, and `choose_strategy` keeps
the one in use unless another is faster by more than the noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from controller.solve import Solution
from policies.errors import Infeasible, TooFewSamples
from policies.rules import confidence_threshold, theta_of_confidence
from storage.records import RequestRecord

F = npt.NDArray[np.float64]
CASCADES = ("sequence_cascade", "speculative_sequence_cascade")
KEPT = 2000  # answers remembered
LEAST = 30  # answers from which a curve is drawn
MIN_GAIN = 0.02  # another strategy must be faster by this,
ERRORS = 2.0  # and by so many standard errors of the difference


class Drafted(NamedTuple):
    """One whole draft answer: its confidence, seconds to draft it, the target's seconds (None if not asked), tokens."""

    confidence: float
    draft_s: float
    target_s: float | None
    tokens: int

    @classmethod
    def of(cls, record: RequestRecord) -> Drafted | None:
        """What a request's record says; None if it drafted no whole answer."""
        if record.confidence is None or record.tokens < 1 or record.draft_s <= 0:
            return None
        if record.arm == "lenient":  # all of its seconds, with those that the draft waited for others
            return cls(record.confidence, max(record.draft_s, record.total_s), None, record.tokens)
        return cls(record.confidence, record.draft_s, max(0.0, record.total_s - record.draft_s), record.tokens)


@dataclass(frozen=True)
class CascadeCurve:
    """Cost of every threshold, from the strictest (nothing believed) on; arrays of one length.

    ``threshold`` falls and ``share`` rises; the first point is a threshold above every confidence. ``*_se`` are
    standard errors. Seconds are per emitted token of a request.
    """

    threshold: F
    share: F
    share_se: F
    seconds_per_token: F
    seconds_se: F
    answers: int

    @property
    def theta(self) -> F:
        """The knob of each threshold."""
        return np.array([theta_of_confidence(float(v)) for v in self.threshold])


class CascadeEstimator:
    """The last `KEPT` whole draft answers of one strategy and rule."""

    def __init__(self, kept: int = KEPT):
        self._drafted: deque[Drafted] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._drafted)

    def add(self, record: RequestRecord) -> None:
        """Take in one served request; those that drafted no whole answer are left out."""
        drafted = Drafted.of(record)
        if drafted is not None:
            self._drafted.append(drafted)

    def curve(self, target_s_per_token: float | None = None, points: int | None = None) -> CascadeCurve:
        """See `cascade_curve`."""
        return cascade_curve(self._drafted, target_s_per_token, points)

    def to_state(self) -> list[list[Any]]:
        """JSON-able state."""
        return [list(drafted) for drafted in self._drafted]

    @classmethod
    def from_state(cls, state: Sequence[Sequence[Any]], kept: int = KEPT) -> CascadeEstimator:
        """The estimator that wrote ``state``."""
        made = cls(kept)
        made._drafted.extend(
            Drafted(float(c), float(d), None if t is None else float(t), int(n)) for c, d, t, n in state
        )
        return made


def cascade_curve(
    drafted: Iterable[Drafted], target_s_per_token: float | None = None, points: int | None = None
) -> CascadeCurve:
    """Share, seconds per token and touches at every threshold, or at ``points`` of them (None: all), evenly chosen.

    ``target_s_per_token`` are the seconds in which the target answers without the cascade, for answers that were
    believed; measured on those that were not when it is None. Raises TooFewSamples below `LEAST` answers, and when no
    answer was the target's and nothing is given.
    """
    answers = sorted(drafted, key=lambda one: -one.confidence)
    n = len(answers)
    if n < LEAST:
        raise TooFewSamples(f"a cascade's curve needs {LEAST} whole draft answers, not {n}")
    asked = [(one.target_s, one.tokens) for one in answers if one.target_s is not None]
    if target_s_per_token is None:
        if not asked:
            raise TooFewSamples("the target answered none of these requests, so its seconds per token are not known")
        target_s_per_token = sum(s for s, _ in asked) / sum(tokens for _, tokens in asked)
    tokens = np.array([one.tokens for one in answers], dtype=np.float64)
    draft = np.array([one.draft_s for one in answers])
    target = np.array([one.tokens * target_s_per_token if one.target_s is None else one.target_s for one in answers])
    confidence = np.array([one.confidence for one in answers])
    last = np.append(np.flatnonzero(np.diff(confidence)), n - 1)  # the last answer of each confidence
    if points is not None and len(last) > points - 1:
        last = last[np.unique(np.linspace(0, len(last) - 1, points - 1).astype(int))]
    believed = np.concatenate(([0], last + 1))
    saved = np.concatenate(([0.0], np.cumsum(target)))[believed]
    seconds = (draft.sum() + target.sum() - saved) / tokens.sum()
    spread = []
    for k, per_token in zip(believed.tolist(), seconds.tolist(), strict=True):
        took = draft + np.where(np.arange(n) < k, 0.0, target)
        spread.append(float(np.std(took - per_token * tokens)) * math.sqrt(n) / float(tokens.sum()))
    share = believed / n
    return CascadeCurve(
        threshold=np.concatenate(([np.nextafter(1.0, 2.0)], confidence[last])),
        share=share,
        share_se=np.sqrt(share * (1 - share) / n),
        seconds_per_token=seconds,
        seconds_se=np.array(spread),
        answers=n,
    )


@dataclass(frozen=True)
class Option:
    """A strategy at its best knob: seconds per token of a request with their standard error, touches per request.

    ``touches_upper`` carries the pessimism that was held to what is allowed.
    """

    strategy: str
    theta: float
    seconds_per_token: float
    seconds_se: float
    touches_per_request: float
    touches_upper: float


def cascade_option(
    strategy: str,
    curve: CascadeCurve,
    *,
    allowed: float,
    max_theta: float = 1.0,
    pessimism: float = 1.0,
    holdback: float = 0.0,
) -> Option | None:
    """The fastest threshold whose touches per request, with ``pessimism`` standard errors and one unseen answer, stay
    at or below ``allowed``; None if only a threshold that believes nothing does. Raises Infeasible below zero.

    The share ``holdback`` of the answers that would be believed is held back, and takes the target's seconds too.
    """
    if not allowed >= 0:
        raise Infeasible(f"even an untouched request has no fewer than {allowed} touches")
    upper = curve.share + pessimism * np.hypot(curve.share_se, 1 / curve.answers)
    fits = (upper <= allowed) & (curve.theta <= max_theta + 1e-12) & (curve.share > 0) & (curve.threshold > 0)
    if not fits.any():
        return None
    seconds = (1 - holdback) * curve.seconds_per_token + holdback * curve.seconds_per_token[0]
    i = int(np.where(fits, seconds, np.inf).argmin())
    return Option(
        strategy,
        float(curve.theta[i]),
        float(seconds[i]),
        float(curve.seconds_se[i]),
        float(curve.share[i]),
        float(upper[i]),
    )


def solution_option(solution: Solution, mean_length: float, relative_error: float = 0.0) -> Option:
    """A speculative solution, or plain decoding where its block length is 0, for requests of ``mean_length`` tokens."""
    return Option(
        "speculative" if solution.g else "plain",
        solution.theta,
        solution.seconds_per_token,
        relative_error * solution.seconds_per_token,
        solution.touches_per_token * mean_length,
        solution.touches_per_token_upper * mean_length,
    )


def choose_strategy(held: Option | None, options: Sequence[Option]) -> Option:
    """The fastest option, but the one in use unless another is faster by `MIN_GAIN` and `ERRORS` standard errors.

    ``held`` is the strategy in use, valued like the others; None when there is none. Raises ValueError without options.
    """
    if not options and held is None:
        raise ValueError("there is no strategy to choose from")
    best = min(options, key=lambda one: one.seconds_per_token) if options else held
    assert best is not None
    if held is None or best.strategy == held.strategy:
        return best
    gain = held.seconds_per_token - best.seconds_per_token
    noise = math.hypot(held.seconds_se, best.seconds_se)
    enough = gain > MIN_GAIN * best.seconds_per_token and gain > ERRORS * noise
    return best if enough else held


def threshold_of(option: Option) -> float:
    """The confidence from which a cascade's answer is believed under this option."""
    return confidence_threshold(option.theta)
