"""Strategies that decide about whole answers, and the two that leave everything to the draft-verify round.

A sequence cascade drafts a whole answer and believes it where the draft was sure of it: confidence at least
``tau = 1 - theta`` (`decoder.strategies.confidence`). Otherwise the target answers losslessly. It either starts again
(*sequence cascade*) or reads the whole draft in one pass, keeps what lossless verification leaves and goes on
speculatively (*speculative sequence cascade*). Both give the target's own answer, of exactly its law, whenever the
draft is not believed: the draft's answer is a function of the request's draft uniforms, and what verification makes of
it is ``p``-distributed whether or not somebody looked at it before.

A believed answer is one touch: nobody asked the target, so it may have answered otherwise. In holdback the target
answers all the same, as it does where the draft is not believed, and so does a fork that was drawn: for the speculative
form from the very same draft, without which the two answers would not be coupled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.drafters.base import Draft
from decoder.request import Completion, ForkResult, Knobs, Observer, Request
from decoder.steps import Steps, fork_point
from decoder.strategies.base import (
    KnobSource,
    Models,
    Session,
    Strategy,
    StrategyCompletion,
    by_engine,
    cut,
    join,
    lossless,
    may_be_lenient,
)
from decoder.strategies.confidence import Confidence, certain, mean_confidence, min_confidence, quantile_confidence
from policies.rules import RULES, confidence_threshold

CHUNK = 8  # drafted tokens in a step, after which others get their turn and stop strings are looked for

SCORES: Mapping[str, Confidence] = {
    "confidence_mean": mean_confidence,
    "confidence_quantile": quantile_confidence,
    "confidence_min": min_confidence,
}


class Plain(Strategy):
    """The target alone, token by token."""

    name = "plain"
    rules: tuple[str, ...] = ()

    def check(self, models: Models) -> None:
        """Works with any models."""

    def steps(
        self, models: Models, request: Request, knobs: KnobSource, observer: Observer | None = None
    ) -> Steps[StrategyCompletion]:
        """See `Strategy.steps`."""
        return by_engine(self.name, models, request, lambda: lossless(knobs(), g=0), observer)

    def fork_steps(self, models: Models, completion: Completion) -> Steps[ForkResult]:
        """ValueError: nothing is ever touched."""
        return models.engine.fork_steps(completion)


class Speculative(Strategy):
    """Draft-verify rounds of up to ``g`` tokens under any accept rule (`decoder.generate`)."""

    name = "speculative"
    rules = tuple(name for name in RULES if name != "lossless")

    def check(self, models: Models) -> None:
        """Works with any models; without a drafter it is plain decoding."""

    def steps(
        self, models: Models, request: Request, knobs: KnobSource, observer: Observer | None = None
    ) -> Steps[StrategyCompletion]:
        """See `Strategy.steps`."""
        return by_engine(self.name, models, request, knobs, observer)

    def fork_steps(self, models: Models, completion: Completion) -> Steps[ForkResult]:
        """See `Strategy.fork_steps`."""
        return models.engine.fork_steps(completion)


class Answer(NamedTuple):
    """A drafted answer. ``complete``: it ends by itself or fills the output; ``probs`` are the raw ``q(x)``.

    ``draft`` has all its laws where they were asked for.
    """

    tokens: list[int]
    probs: list[float]
    complete: bool
    draft: Draft | None


class SequenceCascade(Strategy):
    """Believe the draft's whole answer, or let the target answer; ``scores`` maps the strategy's rules to confidences.

    ``verifies``: the speculative form. ``prefill`` then reads the prompt with the target on a second thread while the
    draft runs. Without it the pass that verifies the draft reads the prompt as well: one pass less in all, and on one
    CPU thread the faster order, since there is nothing to overlap.
    """

    def __init__(
        self, name: str, scores: Mapping[str, Confidence] = SCORES, *, verifies: bool = False, prefill: bool = False
    ):
        self.name = name
        self.rules = tuple(scores)
        self._scores = scores
        self._verifies = verifies
        self._prefill = prefill and verifies

    def check(self, models: Models) -> None:
        """ModelError unless the drafter can answer by itself and is not always certain."""
        models.answering_drafter(self.name)

    @torch.inference_mode()
    def steps(
        self, models: Models, request: Request, knobs: KnobSource, observer: Observer | None = None
    ) -> Steps[StrategyCompletion]:
        """See `Strategy.steps`. ``knobs()`` is asked before the draft, before it is believed, and once a round."""
        self.check(models)
        if not may_be_lenient(request, knobs(), self.rules):
            return (yield from by_engine(self.name, models, request, lambda: lossless(knobs()), observer))
        session = Session(models, request)
        answer = yield from self._answer(session)
        now, lenient = session.ask(knobs, self.rules)
        sure = self._confidence(session, answer, now)
        if now.rule in self.rules:
            session.row.confidence = sure or 0.0
        believed = lenient and sure is not None and sure >= confidence_threshold(now.theta)
        if believed and not session.touch(now, answer.tokens, ()):
            session.emit(answer.tokens)
            yield session.row
        else:
            yield from self._target_answers(session, answer, lambda: knobs().g)
        return session.completion(self.name)

    @torch.inference_mode()
    def fork_steps(self, models: Models, completion: Completion) -> Steps[ForkResult]:
        """See `Strategy.fork_steps`. The draft's answer is at hand; the target's is generated now."""
        point = fork_point(completion)
        session = Session(models, completion.request)
        session.resume(point)
        if point.arm == "holdback":
            answer = Answer([], [], False, None)
            if self._verifies:
                answer = yield from self._answer(session)
            yield from self._target_answers(session, answer, lambda: point.knobs.g)
        return session.fork_result(completion)

    def _answer(self, session: Session) -> Steps[Answer]:
        """Let the draft answer, up to an end token, a stop string or the limit."""
        reading = session.read_prompt() if self._prefill else None
        tokens: list[int] = []
        probs: list[Tensor] = []
        drafts: list[Draft] = []
        ended, room = False, session.draft_room()
        while len(tokens) < room and not ended:
            began = time.perf_counter()
            draft = session.draft(min(CHUNK, room - len(tokens)), tokens)
            tokens += draft.tokens[0].tolist()
            probs.append(draft.raw.gather(-1, draft.tokens[..., None])[0, :, 0])
            if self._verifies:
                drafts.append(draft)
            ended = session.ends(tokens)
            session.row.draft_s += time.perf_counter() - began
            yield session.row
        if reading is not None:
            reading.join()
        complete = ended or len(tokens) == session.row.limit
        return Answer(tokens, torch.cat(probs).tolist() if probs else [], complete, join(drafts) if drafts else None)

    def _confidence(self, session: Session, answer: Answer, knobs: Knobs) -> float | None:
        """How sure the draft is of its answer; None for one that cannot be served: not complete, or not allowed."""
        if knobs.rule not in self.rules or not answer.complete or not all(session.allowed(answer.tokens, knobs)):
            return None
        return self._scores[knobs.rule](answer.probs)

    def _target_answers(self, session: Session, answer: Answer, g: Callable[[], int]) -> Steps[None]:
        """The lossless answer."""
        row = session.row
        width = min(len(answer.tokens), row.limit - 1)
        if self._verifies and answer.draft is not None and width:
            session.emit_lossless(cut(answer.draft, width))
            yield session.row
        else:
            session.rollback(len(row.tokens) - 1)  # the draft starts again too
        while not row.finish_reason:
            session.lossless_round(g())
            yield row


def draft_only() -> SequenceCascade:
    """The draft alone, wherever its knobs allow any leniency: a cascade that never asks the target."""
    return SequenceCascade("draft_only", {"draft_only": certain})
