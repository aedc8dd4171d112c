"""One request at work: its text, its random numbers, its arm, and where it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from decoder.request import Completion, ForkPoint, ForkResult, Knobs, Request, TokenLogprob
from storage.records import Arm

# Rows of a request's uniforms.
DRAFT, ACCEPT, RESIDUAL, EXPLORE = range(4)
_SLACK = 16  # tokens read before the new ones in search of a stop string, beyond its length


class Outcome(NamedTuple):
    """A verdict on one row as numbers: (accepted, next token) of both branches, and the touches of the lenient."""

    lossless: tuple[int, int]
    lenient: tuple[int, int]
    touches: int


@dataclass
class Row:
    """A request at work. ``tokens`` is prompt and output, at most ``limit`` of which are output."""

    request: Request
    limit: int
    tokens: list[int]
    eos_ids: frozenset[int]
    coins: tuple[float, float, float]  # holdback, fork, label
    uniforms: npt.NDArray[np.float64]  # [4, limit], by output index
    explore: list[float]
    arm: Arm = "untouched"
    touches: int = 0
    knobs: Knobs | None = None
    first_touch_at: float | None = None
    fork_drawn: bool = False
    label_drawn: bool = False
    fork_point: ForkPoint | None = None
    target_passes: int = 0
    drafted: int = 0
    examined: int = 0
    accepted: int = 0
    finish_reason: str = ""
    stop_text: str | None = None
    text_length: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    confidence: float | None = None  # of a whole draft answer
    draft_s: float = 0.0  # what it took to draft
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0

    @classmethod
    def start(cls, request: Request, limit: int, eos_ids: frozenset[int]) -> Row:
        """Begin a request. What it draws for an output index does not depend on how many there are."""
        rng = np.random.Generator(np.random.PCG64(request.params.seed))
        coins, uniforms = rng.random(3), rng.random((limit, 4))
        uniforms[:, ACCEPT] = 1 - uniforms[:, ACCEPT]  # (0, 1]: a token of acceptance 0 is never accepted
        return cls(
            request=request,
            limit=limit,
            tokens=list(request.prompt_ids),
            eos_ids=eos_ids,
            coins=(float(coins[0]), float(coins[1]), float(coins[2])),
            uniforms=np.ascontiguousarray(uniforms.T),
            explore=uniforms[:, EXPLORE].tolist(),
        )

    @property
    def emitted(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def output(self) -> list[int]:
        """Output so far."""
        return self.tokens[len(self.request.prompt_ids) :]

    def news(self, told: int) -> tuple[list[int], list[TokenLogprob]]:
        """Output after the first ``told`` tokens, and its log-probabilities where they are kept."""
        new = self.output[told:]
        return new, self.logprobs[told : told + len(new)]

    def lenient(self, knobs: Knobs) -> bool:
        """Whether these knobs may accept anything in this request that lossless decoding rejects."""
        request = self.request
        pinned = request.pinned or (request.structured and not knobs.structured)
        return knobs.lenient and self.arm != "holdback" and not pinned

    def take(self, outcome: Outcome, block: list[int], knobs: Knobs) -> tuple[int, list[int]]:
        """Decide what is served of a round: tokens accepted, and what it emits. Tosses the coins at the first touch."""
        served = outcome.lenient
        if outcome.touches:
            if self.arm == "untouched":
                served = self._first_touch(knobs, outcome, block)
            else:
                self.touches += outcome.touches
        accepted, token = served
        self.target_passes += 1
        self.drafted += len(block)
        self.examined += min(accepted + 1, len(block))
        self.accepted += accepted
        return accepted, [*block[:accepted], token]

    def emit(self, tokens: list[int]) -> None:
        """Append output up to an end token, a stop string or the limit, and note if that finishes the request."""
        before = self.emitted
        for token in tokens:
            self.tokens.append(token)
            if token in self.eos_ids:
                self.finish_reason = "stop"
                break
            if self.emitted >= self.limit:
                self.finish_reason = "length"
                break
        if self.request.params.stop:
            self._find_stop(before)

    def completion(self) -> Completion:
        """The request as it stands, finished or cancelled; it must have had a round."""
        knobs = self.knobs
        assert knobs is not None
        return Completion(
            request=self.request,
            token_ids=self.output,
            finish_reason=self.finish_reason,
            arm=self.arm,
            touches=self.touches,
            first_touch_at=self.first_touch_at,
            fork_drawn=self.fork_drawn,
            label_drawn=self.label_drawn,
            holdback_prob=knobs.holdback,
            fork_prob=knobs.fork,
            label_prob=knobs.label,
            knobs=knobs,
            target_passes=self.target_passes,
            drafted=self.drafted,
            examined=self.examined,
            accepted=self.accepted,
            first_token_s=self.first_token_s,
            total_s=time.perf_counter() - self.started,
            fork_point=self.fork_point,
            stop_text=self.stop_text,
            text_length=self.text_length,
            logprobs=None if self.request.params.logprobs is None else self.logprobs[: self.emitted],
            confidence=self.confidence,
            draft_s=self.draft_s,
        )

    def fork_result(self, served: Completion) -> ForkResult:
        """The row as the branch of ``served`` that was not served, finished. Seconds are those since it began."""
        return ForkResult(
            token_ids=self.output,
            touches=self.touches if self.arm == "lenient" else served.touches,
            target_passes=self.target_passes,
            total_s=time.perf_counter() - self.started,
            finish_reason=self.finish_reason,
            text_length=self.text_length,
        )

    def _first_touch(self, knobs: Knobs, outcome: Outcome, block: list[int]) -> tuple[int, int]:
        """Toss the request's coins, remember the branch that is not served, and return the outcome that is."""
        hold, fork, label = self.coins
        held = hold < knobs.holdback
        self.arm = "holdback" if held else "lenient"
        served, unserved = (outcome.lossless, outcome.lenient) if held else (outcome.lenient, outcome.lossless)
        self.touches = 1 if held else outcome.touches
        self.knobs, self.first_touch_at = knobs, time.time()
        self.fork_drawn, self.label_drawn = fork < knobs.fork, label < knobs.label
        accepted, token = unserved
        self.fork_point = ForkPoint(
            arm="lenient" if held else "holdback",
            token_ids=[*self.output, *block[:accepted], token],
            touches=outcome.touches if held else 1,
            knobs=knobs,
        )
        return served

    def _find_stop(self, before: int) -> None:
        """End after the first output token, of those from index ``before`` on, that completes a stop string.

        So the output is the one of decoding token by token, wherever blocks begin. The text before the new tokens is
        read only as far as a stop string can reach back.
        """
        stops, text = self.request.params.stop, self.request.detokenize
        assert text is not None
        output = self.output
        near = output[max(0, before - 4 * max(map(len, stops)) - _SLACK) :]  # a character has at most four tokens
        tail = text(near)
        if not any(stop in tail for stop in stops):
            return
        for n in range(before + 1, len(output) + 1):
            so_far = text(output[:n])
            found = [(so_far.find(stop), stop) for stop in stops if stop in so_far]
            if found:
                del self.tokens[len(self.request.prompt_ids) + n :]
                self.finish_reason = "stop"
                self.text_length, self.stop_text = min(found)
                return
