"""What goes into the decoder and what comes out: knobs, requests, round traces, completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from decoder.sampling import SamplingParams
from storage.records import MAX_DEPTH, Arm

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Knobs:
    """What a round may do: block length g >= 0, the accept rule with its knob theta and mixing weight rho in [0, 1].

    ``depth`` in [0, MAX_DEPTH]: rho holds at the first ``floor(depth)`` positions of a block, its fraction times rho at
    the next, and after that nothing is lenient. ``structured`` lets structured spans be lenient as well. ``holdback``,
    ``fork`` and ``label`` are probabilities of the coins at the first touch, ``explore`` that of drafting one longer
    block; the fork is worth something for ``label_deadline`` seconds after the touch. ``epoch`` and ``lease_seq`` say
    which lease this is (0, 0: none).
    """

    g: int
    rule: str = "lossless"
    theta: float = 0.0
    rho: float = 1.0
    holdback: float = 0.0
    fork: float = 0.0
    label: float = 0.0
    explore: float = 0.0
    epoch: int = 0
    lease_seq: int = 0
    depth: float = MAX_DEPTH
    structured: bool = False
    label_deadline: float = 900.0

    @classmethod
    def lossless(cls, g: int) -> Knobs:
        """Exact speculative decoding with blocks of ``g``; plain decoding at g = 0."""
        return cls(g=g, rho=0.0)

    @property
    def lenient(self) -> bool:
        """Whether these knobs can accept anything that lossless decoding rejects."""
        return self.rule != "lossless" and self.theta > 0 and self.rho > 0 and self.depth > 0

    def weights(self, width: int) -> FloatArray:
        """The mixing weight at each position of a block of ``width``, float32."""
        inside = np.clip(self.depth - np.arange(width), 0.0, 1.0)
        return (self.rho * inside).astype(np.float32)


class SpanTracker(Protocol):
    """Says where in a text leniency is allowed (`decoder.spans`)."""

    def lenient_mask(self, output_ids: list[int], block: list[int], /) -> list[bool]:
        """Whether each token of ``block``, drafted to follow ``output_ids``, may be treated leniently.

        A function of its arguments, and entry j of ``output_ids`` and the first j tokens of the block only: forks and
        other branches of the request ask the same tracker.
        """
        ...


@dataclass(frozen=True)
class Request:
    """One prompt (token ids, at least one) and how to continue it.

    ``pinned``: leniency is not allowed anywhere in it. ``structured``: the whole answer is a structured span (JSON);
    ``spans`` says which positions are in one; the knobs say whether that matters. ``detokenize`` turns all output ids
    so far into text; stop strings need it.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    traffic_class: str = "default"
    pinned: bool = False
    structured: bool = False
    spans: SpanTracker | None = None
    detokenize: Callable[[list[int]], str] | None = None


@dataclass(frozen=True)
class RoundTrace:
    """What one round saw of one request. Seconds are wall time; what is neither drafting nor the target's pass is
    overhead (on a GPU the first two are what the device took).

    A round of ``rows`` requests gives one trace for each. One of them, ``timed``, speaks for the round: it has the
    round's seconds and says in ``widest`` how many tokens the widest row drafted; the others have 0 seconds. It is the
    requests' turn one after another, so that over rounds each traffic class gets its share of seconds and rows, while
    every measured round stays one round of so many rows. ``width`` tokens were drafted for the request and ``emitted``
    come out. ``prefill`` prompt tokens were read besides (0 after the first round, which a request has alone). The
    arrays have one entry per drafted position, examined or not: the scalars of
    `policies.rules.Scalars`, the knob ``theta`` in force there (0 when lossless, pinned or in holdback), and flag bits
    of `storage.records`. The touch that holdback turns into a rejection is EXAMINED and TOUCH but not ACCEPTED, and has
    the knob under which it was one; theta is 0 from right after it.
    """

    request_id: str
    traffic_class: str
    knobs: Knobs
    rows: int
    width: int
    emitted: int
    prefill: int
    draft_s: float
    verify_s: float
    overhead_s: float
    target_prob: FloatArray
    draft_prob: FloatArray
    target_prob_raw: FloatArray
    draft_prob_raw: FloatArray
    target_max_raw: FloatArray
    draft_max_raw: FloatArray
    tv: FloatArray
    theta: FloatArray
    flags: npt.NDArray[np.uint8]
    timed: bool = True
    widest: int | None = None  # None: as ``width``


class Observer(Protocol):
    """Something that watches rounds (telemetry); it must not block."""

    def on_round(self, trace: RoundTrace, /) -> None: ...


class ForkPoint(NamedTuple):
    """The branch that was not served, right after the round of the first touch."""

    arm: Arm  # of that branch: "lenient" or "holdback"
    token_ids: list[int]  # its output up to here
    touches: int  # of that branch up to here
    knobs: Knobs


class TokenLogprob(NamedTuple):
    """Natural logarithm of the target's probability of one output token, and of its most probable ones with their ids.

    Of the distribution at temperature 1 after the bias; -9999.0 where the probability is 0.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Completion:
    """A finished request. ``token_ids`` is the output, with its end token if it has one (finish reason "stop").

    The other finish reasons are "length" and "cancelled". Where a stop string ended it, ``stop_text`` is that string,
    the output ends with the token that completed it, and ``text_length`` says how many characters of the output's text
    come before it. With `SamplingParams.logprobs`, ``logprobs`` has one entry per output token.

    ``arm`` is internal: callers and judges never see it. ``touches`` counts those of the served text (1 in holdback).
    The coin probabilities and ``knobs`` are those in force at the first touch, else of the first round. ``drafted``,
    ``examined`` and ``accepted`` count draft tokens. Times are seconds; ``first_touch_at`` is Unix time. ``confidence``
    in [0, 1] is that of a whole draft answer, believed or not (None: there was none), which took ``draft_s`` seconds.
    """

    request: Request
    token_ids: list[int]
    finish_reason: str
    arm: Arm
    touches: int
    first_touch_at: float | None
    fork_drawn: bool
    label_drawn: bool
    holdback_prob: float
    fork_prob: float
    label_prob: float
    knobs: Knobs
    target_passes: int
    drafted: int
    examined: int
    accepted: int
    first_token_s: float
    total_s: float
    fork_point: ForkPoint | None
    stop_text: str | None = None
    text_length: int | None = None
    logprobs: list[TokenLogprob] | None = None
    confidence: float | None = None
    draft_s: float = 0.0


@dataclass(frozen=True)
class ForkResult:
    """The branch that was not served, complete: its whole output, and the touches of the lenient of the two branches.

    ``target_passes`` and ``total_s`` are what this run cost, from the fork on. ``text_length`` as in `Completion`.
    """

    token_ids: list[int]
    touches: int
    target_passes: int
    total_s: float
    finish_reason: str
    text_length: int | None = None
