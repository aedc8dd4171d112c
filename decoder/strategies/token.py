"""Strategies that decide token by token whether the draft is believed without asking the target.

*Token cascade* (Narasimhan et al. 2025, section 2): at each token the draft decides where it is sure enough, by Chow's
rule ``max q >= 1 - theta``; elsewhere the target does. The target reads what it missed when it is asked the next time.
The ``diff`` rule, ``max q >= max p - theta``, needs the target at every token; it is an oracle that shows what Chow's
rule gives away by not looking.

*BiLD* (Kim et al. 2023): the draft goes on until it is unsure (``max q`` below the *fallback* threshold), then the
target reads all that, and everything from the first token it finds too unlikely is *rolled back*: cross-entropy
``-log p(x)`` above ``-log(1 - theta)``. The target says the next token itself. This is the published form, in which a
token that is rolled back is replaced by a draw from ``p``; it is not completed (DESIGN 2.1), so a step is a touch where
its outcome differs from the lossless one. The target also reads the last stretch before the answer ends.

Touches. Where the target was not asked, believing the draft is a touch: nobody knows whether lossless decoding would
have said the same, so ``touches`` of a Chow cascade is an upper bound, one for each token the draft decided. Where it
was asked, both outcomes are computed from the same uniforms and a touch is a step where they differ.
"""

from __future__ import annotations

from typing import Protocol

import torch

from decoder.drafters.base import Draft
from decoder.request import Completion, ForkResult, Knobs, Observer, Request
from decoder.row import ACCEPT, RESIDUAL
from decoder.sampling import draw
from decoder.steps import Steps, fork_point
from decoder.strategies.base import (
    KnobSource,
    Models,
    Session,
    Strategy,
    StrategyCompletion,
    by_engine,
    join,
    lossless,
    may_be_lenient,
)
from decoder.verify import Block, residual, scalars_of
from policies.rules import lossless_accept

LONGEST = 32  # tokens that BiLD drafts at most before the target looks


class _TokenStrategy(Strategy, Protocol):
    """What the two share; a subclass says what happens at one step."""

    def check(self, models: Models) -> None:
        """ModelError unless the drafter can answer by itself and is not always certain."""
        models.answering_drafter(self.name)

    @torch.inference_mode()
    def steps(
        self, models: Models, request: Request, knobs: KnobSource, observer: Observer | None = None
    ) -> Steps[StrategyCompletion]:
        """See `Strategy.steps`. ``knobs()`` is asked at every step."""
        self.check(models)
        if not may_be_lenient(request, knobs(), self.rules):
            return (yield from by_engine(self.name, models, request, lambda: lossless(knobs()), observer))
        session = Session(models, request)
        yield from self._run(session, knobs)
        return session.completion(self.name)

    @torch.inference_mode()
    def fork_steps(self, models: Models, completion: Completion) -> Steps[ForkResult]:
        """See `Strategy.fork_steps`."""
        point = fork_point(completion)
        session = Session(models, completion.request)
        session.resume(point)
        yield from self._run(session, lambda: point.knobs)
        return session.fork_result(completion)

    def _run(self, session: Session, knobs: KnobSource) -> Steps[None]:
        while not session.row.finish_reason:
            now, lenient = session.ask(knobs, self.rules)
            if lenient and session.draft_room():
                self._step(session, now)
            else:
                session.lossless_round(now.g)
            yield session.row

    def _step(self, session: Session, knobs: Knobs) -> None:
        raise NotImplementedError


class TokenCascade(_TokenStrategy):
    """One token at a time from the draft or from the target; rule ``chow``, or ``diff`` as an oracle."""

    name = "token_cascade"
    rules = ("chow", "diff")

    def _step(self, session: Session, knobs: Knobs) -> None:
        draft = session.draft(1)
        x, confidence = int(draft.tokens), float(draft.raw.amax())
        (allowed,) = session.allowed([x], knobs)
        if knobs.rule == "chow" and allowed and confidence >= 1 - knobs.theta:
            if session.touch(knobs, [x], ()):
                session.rollback(len(session.row.tokens) - 1)  # held: the target goes on from here
            else:
                session.emit([x])
            return

        # The target reads what it missed, not the proposal: its law at this place is all that is asked for.
        p, raw = session.target(session.nothing().tokens)
        at = session.row.emitted
        u = session.uniforms[:, None, at : at + 1]
        block = Block(draft.tokens, torch.cat([p, p], 1), torch.cat([raw, raw], 1), draft.probs, draft.raw)
        passed = bool(u[ACCEPT] <= lossless_accept(scalars_of(block)))
        exact = x if passed else int(draw(residual(p, draft.probs), u[RESIDUAL]))
        session.row.drafted += 1
        session.row.examined += 1
        trusted = knobs.rule == "diff" and allowed and confidence >= float(raw.amax()) - knobs.theta
        says = exact
        if trusted and x != exact and float(raw[0, 0, x]) > 0 and not session.touch(knobs, [x], [exact]):
            says = x
        session.row.accepted += says == x
        session.emit([says])


class Bild(_TokenStrategy):
    """Fallback and rollback. ``fallback`` in [0, 1] is the confidence below which the target takes over (0: never).

    ``longest`` >= 1 bounds a stretch of the draft (None: only the answer's end does).
    """

    name = "bild"
    rules = ("bild",)

    def __init__(self, fallback: float = 0.5, longest: int | None = LONGEST):
        if not 0 <= fallback <= 1 or (longest is not None and longest < 1):
            raise ValueError(f"fallback must lie in [0, 1] and longest be 1 or more, not {fallback!r} and {longest!r}")
        self._fallback = fallback
        self._longest = longest

    def _step(self, session: Session, knobs: Knobs) -> None:
        draft = self._stretch(session)
        block, width, at = draft.tokens[0].tolist(), draft.tokens.shape[-1], session.row.emitted
        verdict, p = session.verify(draft)
        exact = torch.cat(verdict.lossless).tolist()

        # Roll back from the first token that the target finds too unlikely; there, and after the stretch, it decides.
        allowed, likely = session.allowed(block, knobs), verdict.scalars.target_prob_raw[0]
        kept = (likely >= 1 - knobs.theta) & (likely > 0)
        kept &= torch.tensor(allowed, dtype=torch.bool, device=kept.device)
        accepted = int(kept.long().cumprod(-1).sum())
        u = session.uniforms[:, at : at + width + 1]
        token = int(draw(p[0, accepted], u[RESIDUAL, accepted]))

        # Steps whose lossless outcome is another one.
        passed = u[ACCEPT, :width] <= lossless_accept(verdict.scalars)[0]
        touches = int((~passed[:accepted]).sum())
        if accepted < width:
            weights = residual(p[0, accepted], draft.probs[0, accepted])
            says = block[accepted] if passed[accepted] else int(draw(weights, u[RESIDUAL, accepted]))
            if not allowed[accepted]:
                token = says
            touches += says != token
        if touches:
            branches = [*block[:accepted], token], [*block[: exact[0]], exact[1]]
            if session.touch(knobs, *branches, touches):
                accepted, token = exact
        session.emit_block(block, accepted, token)

    def _stretch(self, session: Session) -> Draft:
        """Draft until the model is unsure or the answer ends; the token it was unsure of is not in it."""
        room = session.draft_room()
        longest = room if self._longest is None else min(room, self._longest)
        block: list[int] = []
        drafts: list[Draft] = []
        while len(block) < longest:
            step = session.draft(1, block)
            if float(step.raw.amax()) < self._fallback:
                break
            drafts.append(step)
            block.append(int(step.tokens))
            if block[-1] in session.models.eos_ids:
                break
        return join(drafts) if drafts else session.nothing()
