"""What every strategy shares: the models, the interface, and a request at work.

A strategy is lenient in one place: where it takes what the draft says without the target's lossless test. Whatever the
place is, a whole answer or one token, it is treated as the round treats an accepted token: taking it is a *touch*, the
first touch tosses the request's coins (holdback, fork, label), holdback takes the lossless outcome there and to the
end, and the branch that was not served can be generated at any later time. Until the first touch the text is what it
would be without leniency under the same seed. Rounds of these strategies are not reported to observers: a confidence
test has selected them, and estimates of acceptance from them would be biased.

One knob. Every threshold is a function of the knob ``theta`` in [0, 1]: at 0 the strategy is lossless, at 1 it always
follows the draft. ``rho`` in [0, 1] is the chance that leniency is used where it could be (a coin of its own). Knobs
whose rule is not one of the strategy's own grant it no leniency: evidence about loss is kept per rule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from decoder.cache import CachedModel
from decoder.drafters.base import Draft, Drafter
from decoder.generate import Engine
from decoder.request import Completion, ForkPoint, ForkResult, Knobs, Observer, Request
from decoder.row import ACCEPT, DRAFT, RESIDUAL
from decoder.sampling import Sampler
from decoder.steps import Steps, finish
from decoder.verify import Block, Verdict, verify
from policies.errors import ModelError

KnobSource = Callable[[], Knobs]


class Models:
    """A target, a drafter (None: only `plain` works) and what ends a request; arguments as for `Engine`.

    ``engine`` is the one that plain and speculative decoding go through; by default one is made. Raises ModelError for
    models that cannot be used.
    """

    def __init__(
        self,
        target: Any,
        drafter: Drafter | None,
        *,
        eos_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
        engine: Engine | None = None,
    ):
        self.eos_ids = frozenset(eos_ids)
        self.engine = engine or Engine(target, drafter, eos_ids=self.eos_ids, device=device, vocab_size=vocab_size)
        self.target = target if isinstance(target, CachedModel) else CachedModel(target)
        self.drafter = drafter
        self.device = torch.device(device)
        sizes = [self.target.vocab_size, drafter.vocab_size if drafter else None, vocab_size]
        self.vocab_size = min(size for size in sizes if size is not None)

    @classmethod
    def of(cls, engine: Engine) -> Models:
        """Those of an engine."""
        return cls(
            engine.target,
            engine.drafter,
            eos_ids=engine.eos_ids,
            device=engine.device,
            vocab_size=engine.vocab_size,
            engine=engine,
        )

    def answering_drafter(self, strategy: str) -> Drafter:
        """The drafter, if it can answer by itself; ModelError if there is none, or if it is always certain."""
        if self.drafter is None:
            raise ModelError(f"strategy {strategy!r} needs a draft model; plain works without one")
        if self.drafter.deterministic:
            raise ModelError(
                f"strategy {strategy!r} asks how sure the draft is, and this drafter is always certain; give it "
                "a draft model, or use speculative"
            )
        return self.drafter


@dataclass(frozen=True, kw_only=True)
class StrategyCompletion(Completion):
    """A completion that says how it was made. ``draft_passes`` counts passes of the draft model."""

    strategy: str
    draft_passes: int


class Strategy(Protocol):
    """A way to decode a request.

    ``rules`` are the names that the knobs may carry to make it lenient, the usual one first (none: always lossless).
    """

    name: str
    rules: tuple[str, ...]

    def check(self, models: Models) -> None:
        """Raise ModelError if it cannot be used with these models; to be called at load."""
        ...

    def steps(
        self, models: Models, request: Request, knobs: KnobSource, observer: Observer | None = None
    ) -> Steps[StrategyCompletion]:
        """Decode one request. Raises ValueError for one that cannot be served, ModelError as `check` does."""
        ...

    def fork_steps(self, models: Models, completion: Completion) -> Steps[ForkResult]:
        """Generate the branch that was not served; ValueError if there is none."""
        ...

    def generate(
        self, models: Models, request: Request, knobs: KnobSource, observer: Observer | None = None
    ) -> StrategyCompletion:
        """All of `steps`."""
        return finish(self.steps(models, request, knobs, observer))

    def fork(self, models: Models, completion: Completion) -> ForkResult:
        """All of `fork_steps`."""
        return finish(self.fork_steps(models, completion))


class Session:
    """One request at work: its row, the target's cache, the draft's state and the counts that a row has no place for.

    Rounds, limits, uniforms and coins are those of `decoder.generate`: a lossless round here emits what it does there.
    """

    def __init__(self, models: Models, request: Request):
        self.models = models
        self.row = models.engine.start(request)
        self.draft_passes = 0
        self._cache = models.target.new_cache()
        self._sampler = Sampler([request.params], models.vocab_size, models.device)
        self._drafts = None
        if models.drafter is not None:
            self._drafts = models.drafter.start(request.params, models.vocab_size, models.eos_ids)
        uniforms = torch.from_numpy(self.row.uniforms)
        # A block that fills the output is followed by a token that is never emitted.
        self.uniforms = torch.cat([uniforms, uniforms[:, -1:]], 1).to(models.device)
        self._mix = np.random.Generator(np.random.PCG64([request.params.seed, 1])).random(self.row.limit).tolist()

    def ask(self, knobs: KnobSource, rules: Sequence[str]) -> tuple[Knobs, bool]:
        """The knobs of the moment, and whether they allow leniency here, by a rule among ``rules``."""
        row, now = self.row, knobs()
        row.knobs = row.knobs or now
        return now, row.lenient(now) and now.rule in rules and self._mix[row.emitted] < now.rho

    def allowed(self, block: list[int], knobs: Knobs) -> list[bool]:
        """Whether each drafted token of ``block`` may be believed: in no structured span, no end that is too early."""
        row = self.row
        spans, ends = None if knobs.structured else row.request.spans, self.models.eos_ids
        mask = spans.lenient_mask(row.output, block) if spans is not None else [True] * len(block)
        early = row.request.params.min_tokens - row.emitted
        return [ok and not (j < early and token in ends) for j, (ok, token) in enumerate(zip(mask, block, strict=True))]

    def ends(self, output: list[int]) -> bool:
        """Whether ``output`` holds an end token at its end, or a stop string."""
        request = self.row.request
        if output[-1] in self.models.eos_ids:
            return True
        if not request.params.stop or request.detokenize is None:
            return False
        text = request.detokenize(output)
        return any(stop in text for stop in request.params.stop)

    def draft_room(self) -> int:
        """How many tokens the output and the draft model's context have room for."""
        room = self.row.limit - self.row.emitted
        context = self.models.drafter.context if self.models.drafter else 0
        return room if context is None else max(0, min(room, context - len(self.row.tokens)))

    def draft(self, width: int, after: Sequence[int] = ()) -> Draft:
        """Up to ``width`` >= 1 drafted tokens to follow the text and ``after``."""
        assert self._drafts is not None
        at = self.row.emitted + len(after)
        draft = self._drafts.propose([*self.row.tokens, *after], width, self.uniforms[DRAFT, at : at + width])
        self.draft_passes += draft.tokens.shape[-1]
        return draft if draft.widths is None else cut(draft, int(draft.widths))

    def nothing(self) -> Draft:
        """A block of no tokens: its verification is plain decoding."""
        empty = torch.zeros(1, 0, self.models.vocab_size, device=self.models.device)
        return Draft(torch.zeros(1, 0, dtype=torch.int64, device=self.models.device), empty, empty)

    def read_prompt(self) -> threading.Thread:
        """Read the prompt with the target on a thread of its own; join it before the next target pass."""

        @torch.inference_mode()
        def read() -> None:
            self._cache.extend(torch.tensor([prompt], device=self.models.device), keep=1)

        prompt = self.row.request.prompt_ids[:-1]  # the pass that verifies needs one token to go on from
        thread = threading.Thread(target=read if prompt else lambda: None, name="lenity-prefill", daemon=True)
        self.row.target_passes += bool(prompt)
        thread.start()
        return thread

    def target(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """One target pass over what it has not read and ``block`` [1, w]: processed and raw laws [1, w + 1, V]."""
        row = self.row
        unread = torch.tensor([row.tokens[self._cache.length :]], device=self.models.device)
        logits = self._cache.extend(torch.cat([unread, block], 1), keep=block.shape[-1] + 1)
        logits = logits[..., : self.models.vocab_size]
        row.target_passes += 1
        early = row.request.params.min_tokens - row.emitted
        if early > 0 and self.models.eos_ids:
            logits = logits.clone()
            logits[:, :early, sorted(t for t in self.models.eos_ids if t < self.models.vocab_size)] = -torch.inf
        return self._sampler.process(logits)

    def verify(self, draft: Draft) -> tuple[Verdict, Tensor]:
        """One target pass over a block: its lossless verdict, and the target's processed laws."""
        p, raw = self.target(draft.tokens)
        width, at = draft.tokens.shape[-1], self.row.emitted
        u = self.uniforms[:, None, at : at + width + 1]
        block = Block(draft.tokens, p, raw, draft.probs, draft.raw)
        return verify(block, None, 0.0, 0.0, u[ACCEPT, :, :width], u[RESIDUAL]), p

    def lossless_round(self, g: int) -> None:
        """Draft up to ``g`` tokens and emit what lossless verification leaves."""
        room = min(self.draft_room(), self.row.limit - self.row.emitted - 1) if self._drafts is not None else 0
        width = min(g, room)
        self.emit_lossless(self.draft(width) if width > 0 else self.nothing())

    def emit_lossless(self, draft: Draft) -> None:
        """Verify a draft of what follows the text losslessly, and emit what stands."""
        verdict, _ = self.verify(draft)
        accepted, token = torch.cat(verdict.lossless).tolist()
        self.emit_block(draft.tokens[0].tolist(), accepted, token)

    def emit_block(self, block: list[int], accepted: int, token: int) -> None:
        """Count a verified block, emit what was accepted and the token after it, and take back the rest."""
        row, kept = self.row, len(self.row.tokens) + accepted
        row.drafted += len(block)
        row.examined += min(accepted + 1, len(block))
        row.accepted += accepted
        self.emit([*block[:accepted], token])
        self.rollback(kept)

    def emit(self, tokens: list[int]) -> None:
        """Append output; see `Row.emit`."""
        if not self.row.emitted:
            self.row.first_token_s = time.perf_counter() - self.row.started
        self.row.emit(tokens)

    def rollback(self, length: int) -> None:
        """Only the first ``length`` tokens of what was read stand."""
        self._cache.truncate(length)
        if self._drafts is not None:
            self._drafts.commit(length)

    def touch(self, knobs: Knobs, lenient: Sequence[int], lossless: Sequence[int], touches: int = 1) -> bool:
        """Count touches; toss the coins at the first one. Returns whether the request is held there.

        ``lenient`` and ``lossless`` are what the branches append to the text here; the first touch remembers the one
        that is not served. ``touches`` are those of the former.
        """
        row = self.row
        if row.arm != "untouched":
            row.touches += touches
            return False
        hold, fork, label = row.coins
        held = hold < knobs.holdback
        row.arm, row.touches = ("holdback", 1) if held else ("lenient", touches)
        row.knobs, row.first_touch_at = knobs, time.time()
        row.fork_drawn, row.label_drawn = fork < knobs.fork, label < knobs.label
        row.fork_point = ForkPoint(
            arm="lenient" if held else "holdback",
            token_ids=[*row.output, *(lenient if held else lossless)],
            touches=touches if held else 1,
            knobs=knobs,
        )
        return held

    def resume(self, point: ForkPoint) -> None:
        """Stand where the branch that was not served stood."""
        row = self.row
        row.arm, row.touches, row.knobs = point.arm, point.touches, point.knobs
        self.emit(point.token_ids)

    def completion(self, strategy: str) -> StrategyCompletion:
        """The finished request."""
        return StrategyCompletion(**vars(self.row.completion()), strategy=strategy, draft_passes=self.draft_passes)

    def fork_result(self, completion: Completion) -> ForkResult:
        """The finished branch that was not served."""
        return self.row.fork_result(completion)


def cut(draft: Draft, width: int) -> Draft:
    """The first ``width`` tokens of a draft of one row."""
    return Draft(draft.tokens[:, :width], draft.probs[:, :width], draft.raw[:, :width])


def join(drafts: Sequence[Draft]) -> Draft:
    """One draft of one row from consecutive parts, at least one."""
    tokens = torch.cat([part.tokens for part in drafts], 1)
    probs = torch.cat([part.probs for part in drafts], 1)
    same = all(part.probs is part.raw for part in drafts)
    return Draft(tokens, probs, probs if same else torch.cat([part.raw for part in drafts], 1))


def lossless(knobs: Knobs, g: int | None = None) -> Knobs:
    """The same lease without leniency; with ``g`` drafted tokens and no exploration if given."""
    if g is None:
        return replace(knobs, rule="lossless", theta=0.0, rho=0.0)
    return replace(knobs, rule="lossless", theta=0.0, rho=0.0, g=g, explore=0.0)


def may_be_lenient(request: Request, knobs: Knobs, rules: Sequence[str]) -> bool:
    """Whether a request that starts under ``knobs`` may be lenient by a rule among ``rules``.

    One that may not is left to the draft-verify round to its end. So are those that ask for the log-probabilities of
    the target, which only that round has for every token.
    """
    pinned = request.pinned or (request.structured and not knobs.structured)
    return knobs.lenient and knobs.rule in rules and not pinned and request.params.logprobs is None


def by_engine(
    strategy: str, models: Models, request: Request, knobs: KnobSource, observer: Observer | None
) -> Steps[StrategyCompletion]:
    """Decode with draft-verify rounds (`decoder.generate`). Every drafted token cost a draft pass, but for n-grams."""
    done = yield from models.engine.steps(request, knobs, observer)
    passes = 0 if models.drafter is None or models.drafter.deterministic else done.drafted
    return StrategyCompletion(**vars(done), strategy=strategy, draft_passes=passes)
