"""The draft-verify round, and the loop that repeats it. Reads top to bottom.

A round: the drafter proposes a block; one target pass gives the distributions of every drafted position and one more;
`verify` examines the block; what was accepted is emitted together with one residual or bonus token; both caches are
rolled back to what stands. With ``g = 0`` the same round is plain decoding.

Randomness. A request's output is a function of prompt, knobs and seed: output index ``i`` has its own uniforms (draft,
accept, residual or bonus, exploration), whichever round gets there. So two branches of a request share them, the
request is identical to its lossless self until the first touch, and a fork can be generated at any later time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoder.cache import CachedModel, KVCache
from decoder.drafters.base import Draft, Drafter, DraftState
from decoder.request import (
    Completion,
    FloatArray,
    ForkPoint,
    ForkResult,
    Knobs,
    Observer,
    Request,
    RoundTrace,
)
from decoder.sampling import SamplingParams, bias_tensor, process
from decoder.verify import Block, Verdict, verify
from policies.errors import ModelError
from policies.rules import Rule, Scalars, get_rule
from storage.records import ACCEPTED, EXAMINED, PINNED, TOUCH, Arm

__all__ = [
    "Completion",
    "Engine",
    "ForkPoint",
    "ForkResult",
    "Knobs",
    "Observer",
    "Request",
    "RoundTrace",
    "SamplingParams",
]

# Columns of a request's uniforms.
_DRAFT, _ACCEPT, _RESIDUAL, _EXPLORE = range(4)


class Engine:
    """Decodes requests with a target and a drafter (None: plain decoding), one at a time.

    ``eos_ids`` end a request (none, one or several). Only the first ``vocab_size`` ids can come out (default: those
    that both models have); give it where the models' vocabularies are padded. Raises ModelError for models that cannot
    be used.
    """

    def __init__(
        self,
        target: Any,
        drafter: Drafter | None,
        *,
        eos_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
    ):
        self._target = CachedModel(target)
        self._drafter = drafter
        self._device = torch.device(device)
        if self._target.device.type != self._device.type:
            raise ModelError(f"the target is on {self._target.device}, not on {self._device}; move it there first")
        sizes = [self._target.vocab_size, drafter.vocab_size if drafter else None, vocab_size]
        self._vocab = min(size for size in sizes if size is not None)
        self.eos_ids = frozenset(eos_ids)
        self._nothing = Draft(
            torch.zeros(1, 0, dtype=torch.int64, device=self._device),
            *[torch.zeros(1, 0, self._vocab, device=self._device)] * 2,
        )

    def check_rule(self, name: str) -> Rule:
        """The rule of that name; ModelError if there is none, or if this drafter would make it accept everything."""
        try:
            rule = get_rule(name)
        except ValueError as e:
            raise ModelError(str(e)) from e
        if rule.draft_confidence and self._drafter is not None and self._drafter.deterministic:
            raise ModelError(
                f"rule {name!r} reads the draft's confidence, and this drafter is always certain: it would accept "
                "everything; use threshold, token_v2 or token_v3"
            )
        return rule

    @torch.inference_mode()
    def generate(self, request: Request, knobs: Callable[[], Knobs], observer: Observer | None = None) -> Completion:
        """Decode one request; ``knobs()`` is asked once per round.

        Raises ValueError for a request that cannot be served, ModelError for knobs whose rule cannot be used here (see
        `check_rule`).
        """
        row = self._start(request)
        while not row.finish_reason:
            self._round(row, knobs(), observer)
        return row.completion()

    @torch.inference_mode()
    def fork(self, completion: Completion) -> ForkResult:
        """Generate the branch that was not served, from the round after the fork point with the knobs of that point.

        A function of prompt, fork point and seed: with knobs that never change it is bit for bit what would have been
        served had the holdback coin fallen the other way. Raises ValueError for a request that was never touched.
        """
        point = completion.fork_point
        if point is None:
            raise ValueError(f"request {completion.request.request_id} was never touched: there is nothing to fork")
        row = self._start(completion.request)
        row.arm, row.touches = point.arm, point.touches
        row.emit(point.token_ids, self.eos_ids)
        while not row.finish_reason:
            self._round(row, point.knobs, None)
        return ForkResult(
            token_ids=row.output,
            touches=row.touches if point.arm == "lenient" else completion.touches,
            target_passes=row.target_passes,
            total_s=time.perf_counter() - row.started,
            finish_reason=row.finish_reason,
        )

    def _start(self, request: Request) -> _Row:
        length = len(request.prompt_ids)
        if not length or max(request.prompt_ids) >= self._vocab or min(request.prompt_ids) < 0:
            raise ValueError(f"prompt_ids must be 1 or more token ids below {self._vocab}")
        limit = request.params.max_tokens
        if self._target.context is not None:
            if length >= self._target.context:
                raise ValueError(f"the prompt has {length} tokens; the model reads at most {self._target.context}")
            limit = min(limit, self._target.context - length)
        # Rows of an output index come one after another: they do not depend on how many there are.
        rng = np.random.Generator(np.random.PCG64(request.params.seed))
        coins, uniforms = rng.random(3), rng.random((limit, 4))
        explore = uniforms[:, _EXPLORE].tolist()
        uniforms[:, _ACCEPT] = 1 - uniforms[:, _ACCEPT]  # (0, 1]: a token of acceptance 0 is never accepted
        return _Row(
            request=request,
            limit=limit,
            tokens=list(request.prompt_ids),
            cache=self._target.new_cache(),
            drafts=self._drafter.start(request.params, self._vocab, self.eos_ids) if self._drafter else None,
            bias=bias_tensor(request.params, self._vocab, self._device),
            coins=(float(coins[0]), float(coins[1]), float(coins[2])),
            uniforms=torch.from_numpy(uniforms.T.copy()).to(self._device),
            explore=explore,
        )

    def _width(self, row: _Row, knobs: Knobs) -> int:
        """How many tokens to draft: g, sometimes one more, never past the request's limit or the drafter's context."""
        if self._drafter is None:
            return 0
        done = row.emitted
        g = knobs.g + (row.explore[done] < knobs.explore)
        room = row.limit - done - 1  # the round emits one token of its own
        if self._drafter.context is not None:
            room = min(room, self._drafter.context - len(row.tokens))
        return max(0, min(g, room))

    def _round(self, row: _Row, knobs: Knobs, observer: Observer | None) -> None:
        began = time.perf_counter()
        first = row.knobs is None
        if first:
            row.knobs = knobs
        lenient = knobs.lenient and row.arm != "holdback" and not row.request.pinned
        rule = self.check_rule(knobs.rule) if lenient else None
        length, done = len(row.tokens), row.emitted

        # Draft.
        width = self._width(row, knobs)
        draft = self._nothing
        if width and row.drafts is not None:
            draft = row.drafts.propose(row.tokens, width, row.uniforms[_DRAFT, done : done + width])
        width = draft.tokens.shape[-1]
        drafted = time.perf_counter()

        # One target pass over what it has not read yet and the block.
        unread = torch.tensor([row.tokens[row.cache.length :]], device=self._device)
        logits = row.cache.extend(torch.cat([unread, draft.tokens], 1) if width else unread, keep=width + 1)
        verified = time.perf_counter()

        # Accept token j iff u_j <= A(x_j), up to the first rejection; then one residual or bonus token.
        probs, raw = process(logits[..., : self._vocab], row.request.params, row.bias)
        uniforms = row.uniforms[:, None, done : done + width + 1]
        verdict = verify(
            Block(draft.tokens, probs, raw, draft.probs, draft.raw),
            rule,
            knobs.theta,
            knobs.rho,
            uniforms[_ACCEPT, :, :width],
            uniforms[_RESIDUAL],
        )
        block, outcome = draft.tokens[0].tolist(), _outcome(verdict)
        served = outcome.lenient
        if outcome.touches:
            if row.arm == "untouched":
                served = self._first_touch(row, knobs, outcome, block)
            else:
                row.touches += outcome.touches
        accepted, token = served
        row.target_passes += 1
        row.drafted += width
        row.examined += min(accepted + 1, width)
        row.accepted += accepted
        row.emit([*block[:accepted], token], self.eos_ids)

        # Take back what does not stand.
        row.cache.truncate(length + accepted)
        if row.drafts is not None:
            row.drafts.commit(length + accepted)
        ended = time.perf_counter()
        if first:
            row.first_token_s = ended - row.started
        if observer is not None:
            theta, flags = _applied(verdict, accepted, knobs.theta if lenient else 0.0, row)
            columns = _columns(verdict.scalars)
            draft_s, verify_s = drafted - began, verified - drafted
            observer.on_round(
                RoundTrace(
                    request_id=row.request.request_id,
                    traffic_class=row.request.traffic_class,
                    knobs=knobs,
                    rows=1,
                    width=width,
                    emitted=row.emitted - done,
                    prefill=length - 1 if first else 0,
                    draft_s=draft_s,
                    verify_s=verify_s,
                    overhead_s=time.perf_counter() - began - draft_s - verify_s,
                    theta=theta,
                    flags=flags,
                    **columns,
                )
            )

    def _first_touch(self, row: _Row, knobs: Knobs, outcome: _Outcome, block: list[int]) -> tuple[int, int]:
        """Toss the request's coins, remember the branch that is not served, and return the outcome that is."""
        hold, fork, label = row.coins
        held = hold < knobs.holdback
        row.arm = "holdback" if held else "lenient"
        served, unserved = (outcome.lossless, outcome.lenient) if held else (outcome.lenient, outcome.lossless)
        row.touches = 1 if held else outcome.touches
        row.knobs, row.first_touch_at = knobs, time.time()
        row.fork_drawn, row.label_drawn = fork < knobs.fork, label < knobs.label
        accepted, token = unserved
        row.fork_point = ForkPoint(
            arm="lenient" if held else "holdback",
            token_ids=[*row.output, *block[:accepted], token],
            touches=outcome.touches if held else 1,
            knobs=knobs,
        )
        return served


@dataclass
class _Row:
    """A request at work. ``tokens`` is prompt and output; the cache holds all of them but those not read yet."""

    request: Request
    limit: int  # output tokens, at most
    tokens: list[int]
    cache: KVCache
    drafts: DraftState | None
    bias: Tensor | None
    coins: tuple[float, float, float]  # holdback, fork, label
    uniforms: Tensor  # float64 [4, limit], by output index
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
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    def emit(self, tokens: list[int], eos_ids: frozenset[int]) -> None:
        """Append output up to an end token or the limit, and note if that finishes the request."""
        for token in tokens:
            self.tokens.append(token)
            if token in eos_ids:
                self.finish_reason = "stop"
                return
            if self.emitted >= self.limit:
                self.finish_reason = "length"
                return

    def completion(self) -> Completion:
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
        )


class _Outcome(NamedTuple):
    """A verdict on one row as numbers: (accepted, next token) of both branches, and the touches of the lenient."""

    lossless: tuple[int, int]
    lenient: tuple[int, int]
    touches: int


def _outcome(verdict: Verdict) -> _Outcome:
    """The one transfer from the device that decides a round."""
    if verdict.lenient is verdict.lossless:
        accepted, token = torch.cat(verdict.lossless).tolist()
        return _Outcome((accepted, token), (accepted, token), 0)
    a0, t0, a, t, touches = torch.cat([*verdict.lossless, *verdict.lenient, verdict.touch.sum(-1)]).tolist()
    return _Outcome((a0, t0), (a, t), touches)


def _applied(verdict: Verdict, accepted: int, theta: float, row: _Row) -> tuple[FloatArray, npt.NDArray[np.uint8]]:
    """The knob in force at every drafted position, and the flag bits of what happened there."""
    touch = verdict.touch[0].cpu().numpy()
    flags = touch * np.uint8(TOUCH)
    flags[:accepted] |= ACCEPTED
    flags[: accepted + 1] |= EXAMINED
    applied = np.full(len(touch), theta, dtype=np.float32)
    if row.arm == "holdback":
        applied[accepted + 1 :] = 0
        flags[accepted + 1 :] = 0
    if row.request.pinned:
        flags |= PINNED
    return applied, flags


def _columns(scalars: Scalars) -> dict[str, FloatArray]:
    """The scalars of the one row as float32 arrays [width], in one transfer."""
    table = torch.cat(scalars).float().cpu().numpy()
    return dict(zip(Scalars._fields, table, strict=True))
