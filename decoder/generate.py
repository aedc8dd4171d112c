"""The draft-verify round, and the loop that repeats it. Reads top to bottom.

A round of one or several rows: the drafter proposes a block for each; one target pass gives the distributions of every
drafted position and one more; `verify` examines the blocks; what was accepted is emitted together with one residual or
bonus token; both caches are rolled back to what stands. With ``g = 0`` the same round is plain decoding.

Randomness. A request's output is a function of prompt, knobs and seed: output index ``i`` has its own uniforms (draft,
accept, residual or bonus, exploration), whichever round gets there. So two branches of a request share them, the
request is identical to its lossless self until the first touch, a fork can be generated at any later time, and a row of
a batch draws what it would draw alone.

The device is waited for once in a round: for the table of tokens and outcomes that decides what is emitted. (Requests
with structured spans need their block before the target's pass, and those that ask for logprobs read them afterwards.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoder.cache import CachedModel
from decoder.devices import Stopwatch, send
from decoder.drafters.base import Draft, Drafter, rows_of
from decoder.leniency import Leniency, applied
from decoder.request import (
    Completion,
    ForkPoint,
    ForkResult,
    Knobs,
    Observer,
    Request,
    RoundTrace,
    TokenLogprob,
)
from decoder.row import ACCEPT, DRAFT, EXPLORE, RESIDUAL, Outcome, Row
from decoder.sampling import Sampler, SamplingParams, bias_tensor
from decoder.steps import Steps, finish, fork_point
from decoder.verify import Block, verify
from policies.errors import ModelError
from policies.rules import Rule, Scalars, get_rule

__all__ = [
    "Completion",
    "Engine",
    "ForkPoint",
    "ForkResult",
    "Knobs",
    "Observer",
    "Request",
    "RoundTrace",
    "Rows",
    "SamplingParams",
]

_NOBODY = Leniency(0.0, 0.0, [], [])
NEVER = -9999.0  # what is said of the logarithm of 0


class Engine:
    """Decodes requests with a target and a drafter (None: plain decoding), one at a time; `Batch` decodes several.

    ``eos_ids`` end a request (none, one or several). Only the first ``vocab_size`` ids can come out (default: those
    that both models have); give it where the models' vocabularies are padded. ``static_length`` and ``compiler`` are
    options of `CachedModel` for the target. Raises ModelError for models and options that cannot be used.
    """

    def __init__(
        self,
        target: Any,
        drafter: Drafter | None,
        *,
        eos_ids: Iterable[int] = (),
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
        static_length: int | None = None,
        compiler: str | None = None,
    ):
        self.target = CachedModel(target, static_length=static_length, compiler=compiler)
        self.drafter = drafter
        self.device = torch.device(device)
        for who, where in (("target", self.target.device), ("draft model", getattr(drafter, "device", None))):
            if where is not None and where.type != self.device.type:
                raise ModelError(f"the {who} is on {where}, not on {self.device}; move it there first")
        sizes = [self.target.vocab_size, drafter.vocab_size if drafter else None, vocab_size]
        self.vocab_size = min(size for size in sizes if size is not None)
        self.eos_ids = frozenset(eos_ids)

    @property
    def context(self) -> int | None:
        """The longest sequence that the target reads, in tokens; None: any."""
        return self.target.context

    def check_rule(self, name: str) -> Rule:
        """The rule of that name; ModelError if there is none, or if this drafter would make it accept everything."""
        try:
            rule = get_rule(name)
        except ValueError as e:
            raise ModelError(str(e)) from e
        if rule.draft_confidence and self.drafter is not None and self.drafter.deterministic:
            raise ModelError(
                f"rule {name!r} reads the draft's confidence, and this drafter is always certain: it would accept "
                "everything; use threshold, token_v2 or token_v3"
            )
        return rule

    def can_use(self, name: str) -> bool:
        """Whether `check_rule` passes."""
        try:
            self.check_rule(name)
        except ModelError:
            return False
        return True

    def generate(self, request: Request, knobs: Callable[[], Knobs], observer: Observer | None = None) -> Completion:
        """Decode one request; ``knobs()`` is asked once per round.

        Raises ValueError for a request that cannot be served, ModelError for knobs whose rule cannot be used here (see
        `check_rule`).
        """
        return finish(self.steps(request, knobs, observer))

    @torch.inference_mode()
    def steps(
        self, request: Request, knobs: Callable[[], Knobs], observer: Observer | None = None
    ) -> Steps[Completion]:
        """As `generate`, a round at a time."""
        rows, row = Rows(self, 1), self.start(request)
        rows.join(row)
        while not row.finish_reason:
            rows.round(0, [knobs()], [observer])
            yield row
        return row.completion()

    def fork(self, completion: Completion) -> ForkResult:
        """Generate the branch that was not served, from the round after the fork point with the knobs of that point.

        A function of prompt, fork point and seed: with knobs that never change it is bit for bit what would have been
        served had the holdback coin fallen the other way. Raises ValueError for a request that was never touched.
        """
        return finish(self.fork_steps(completion))

    @torch.inference_mode()
    def fork_steps(self, completion: Completion) -> Steps[ForkResult]:
        """As `fork`, a round at a time."""
        point = fork_point(completion)
        rows, row = Rows(self, 1), self.start_fork(completion)
        rows.join(row)
        while not row.finish_reason:
            rows.round(0, [point.knobs], [None])
            yield row
        return row.fork_result(completion)

    def start_fork(self, completion: Completion) -> Row:
        """Begin the branch that was not served, at the fork point: its text may be finished already."""
        point, row = fork_point(completion), self.start(completion.request)
        row.arm, row.touches = point.arm, point.touches
        row.emit(point.token_ids)
        return row

    def start(self, request: Request) -> Row:
        """Check a request and begin it; raises ValueError for one that cannot be served."""
        params, length = request.params, len(request.prompt_ids)
        if not length or max(request.prompt_ids) >= self.vocab_size or min(request.prompt_ids) < 0:
            raise ValueError(f"prompt_ids must be 1 or more token ids below {self.vocab_size}")
        if params.stop and request.detokenize is None:
            raise ValueError("stop strings need the request's detokenize")
        bias_tensor(params, self.vocab_size)
        limit = params.max_tokens
        if self.target.context is not None:
            if length >= self.target.context:
                raise ValueError(f"the prompt has {length} tokens; the model reads at most {self.target.context}")
            limit = min(limit, self.target.context - length)
        return Row.start(request, limit, self.eos_ids)


class Rows:
    """Requests that decode together: row ``i`` of both caches belongs to ``rows[i]``.

    Raises ModelError if the models cannot decode ``max_rows`` in one pass.
    """

    def __init__(self, engine: Engine, max_rows: int):
        self.rows: list[Row] = []
        self._engine, self._device, self._vocab = engine, engine.device, engine.vocab_size
        drafter = engine.drafter
        self._context = drafter.context if drafter else None
        self._cache = engine.target.new_rows(max_rows)
        self._drafts = rows_of(drafter, max_rows, self._vocab, engine.eos_ids) if drafter else None
        self._samplers: dict[tuple[int, int], Sampler] = {}
        ends = sorted(token for token in engine.eos_ids if token < self._vocab)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=self._device)
        self._rounds = 0

    def join(self, row: Row) -> None:
        """Become the last row. Its first round must be one of its own."""
        self.rows.append(row)
        self._samplers.clear()
        if self._drafts is not None:
            self._drafts.join(row.request.params)

    def leave(self, i: int) -> None:
        """Take out row ``i``; the last row takes its place."""
        self._cache.leave(i, len(self.rows))
        if self._drafts is not None:
            self._drafts.leave(i)
        last = self.rows.pop()
        if i < len(self.rows):
            self.rows[i] = last
        self._samplers.clear()

    def round(self, first: int, knobs: Sequence[Knobs], observers: Sequence[Observer | None]) -> None:
        """One round of the rows from ``first`` on, as many as there are knobs.

        All of them have read the same but their last token, or there is only one. Raises ModelError for a rule that
        cannot be used, before anything has changed.
        """
        watch = Stopwatch(self._device)
        rows = self.rows[first : first + len(knobs)]
        lenient = [row.lenient(k) for row, k in zip(rows, knobs, strict=True)]
        rules = [self._engine.check_rule(k.rule) if may else None for k, may in zip(knobs, lenient, strict=True)]
        starts = [len(row.tokens) for row in rows]
        for row, k in zip(rows, knobs, strict=True):
            row.knobs = row.knobs or k

        sampler, watched = self._sampler(first, rows), any(observer is not None for observer in observers)
        said = any(row.request.params.logprobs is not None for row in rows)
        bare = sampler.greedy and not (watched or said or any(lenient))  # then the greatest logit decides

        # Draft.
        draft, uniforms = self._draft(first, rows, knobs, laws=not bare)
        width = draft.tokens.shape[-1]
        own = draft.tokens.new_full((len(rows), 1), width) if draft.widths is None else draft.widths[:, None]
        watch.lap()
        knob = _NOBODY if bare else Leniency.of(rows, knobs, lenient, draft.tokens)

        # One target pass over what it has not read yet and the blocks.
        ids = send([row.tokens[self._cache.lengths[first + i] :] for i, row in enumerate(rows)], self._device)
        logits = self._cache.extend(torch.cat([ids, draft.tokens], 1) if width else ids, width + 1, first)
        watch.lap()

        # Accept token j iff u_j <= A(x_j), up to the first rejection; then one residual or bonus token.
        logits, scalars = self._masked(rows, logits[..., : self._vocab]), None
        if bare:
            table = _compared(torch.cat([own, draft.tokens, sampler.best(logits)], 1).tolist(), width)
        else:
            probs, raw = sampler.process(logits)
            verdict = verify(
                Block(draft.tokens, probs, raw, draft.probs, draft.raw, draft.widths),
                rules if len(set(rules)) > 1 else rules[0],
                knob.theta,
                knob.rho,
                uniforms[ACCEPT, :, :width],
                uniforms[RESIDUAL, :, : width + 1],
            )
            if watched:
                scalars = torch.stack(verdict.scalars).float().to("cpu", non_blocking=True)
            branches = torch.stack([*verdict.lossless, *verdict.lenient], 1)
            table = torch.cat([branches, own, draft.tokens, verdict.touch], 1).tolist()  # here the host waits

        # Take what stands, and take back what does not.
        seen = []
        for i, (row, (a0, t0, a, t, w, *cells)) in enumerate(zip(rows, table, strict=True)):
            block, touch = cells[:w], cells[width : width + w]
            accepted, tokens = row.take(Outcome((a0, t0), (a, t), sum(touch)), block, knobs[i])
            if row.request.params.logprobs is not None:
                row.logprobs += _logprobs(raw[i, : len(tokens)], tokens, row.request.params.logprobs)
            row.emit(tokens)
            self._cache.truncate(first + i, starts[i] + accepted)
            if self._drafts is not None:
                self._drafts.commit(first + i, starts[i] + accepted)
            if row.target_passes == 1:
                row.first_token_s = time.perf_counter() - row.started
            seen.append((block, touch, accepted))

        # Tell who watches. The rows take turns in speaking for the round.
        self._rounds += 1
        if scalars is None:
            return
        columns = scalars.numpy()
        for i, (row, observer) in enumerate(zip(rows, observers, strict=True)):
            if observer is None:
                continue
            block, touch, accepted = seen[i]
            n, timed = len(block), i == self._rounds % len(rows)
            theta, flags = applied(row, touch, accepted, knob.by_row[i][:n], knob.pinned[i][:n])
            draft_s, verify_s, overhead_s = watch.seconds() if timed else (0.0, 0.0, 0.0)
            observer.on_round(
                RoundTrace(
                    request_id=row.request.request_id,
                    traffic_class=row.request.traffic_class,
                    knobs=knobs[i],
                    rows=len(rows),
                    width=n,
                    emitted=len(row.tokens) - starts[i],
                    prefill=starts[i] - 1 if row.target_passes == 1 else 0,
                    draft_s=draft_s,
                    verify_s=verify_s,
                    overhead_s=overhead_s,
                    theta=theta,
                    flags=flags,
                    timed=timed,
                    widest=max(len(block) for block, _, _ in seen) if timed else None,
                    **{name: columns[c, i, :n] for c, name in enumerate(Scalars._fields)},
                )
            )

    def _width(self, row: Row, knobs: Knobs) -> int:
        """How many tokens to draft: g, sometimes one more, never past the request's limit or the drafter's context."""
        if self._drafts is None:
            return 0
        done = row.emitted
        g = knobs.g + (row.explore[done] < knobs.explore)
        room = row.limit - done - 1  # the round emits one token of its own
        if self._context is not None:
            room = min(room, self._context - len(row.tokens))
        return max(0, min(g, room))

    def _uniforms(self, rows: Sequence[Row], width: int) -> Tensor:
        """The rows' uniforms for the next ``width + 1`` output indices, float64 [3, B, width + 1]; 0 past a limit."""
        if len(rows) == 1:
            done = rows[0].emitted
            table = rows[0].uniforms[:EXPLORE, None, done : done + width + 1]
        else:
            table = np.zeros((EXPLORE, len(rows), width + 1))
            for i, row in enumerate(rows):
                its = row.uniforms[:EXPLORE, row.emitted : row.emitted + width + 1]
                table[:, i, : its.shape[1]] = its
        return send(table, self._device)

    def _draft(self, first: int, rows: Sequence[Row], knobs: Sequence[Knobs], laws: bool) -> tuple[Draft, Tensor]:
        """The rows' blocks, and the uniforms of these output indices; ``laws`` as in `RowDrafts.propose`."""
        widths = [self._width(row, k) for row, k in zip(rows, knobs, strict=True)]
        uniforms = self._uniforms(rows, max(widths))
        if self._drafts is None or not any(widths):
            nothing = torch.zeros(len(rows), 0, self._vocab, device=self._device)
            return Draft(torch.zeros(len(rows), 0, dtype=torch.int64, device=self._device), nothing, nothing), uniforms
        texts = [row.tokens for row in rows]
        return self._drafts.propose(first, texts, widths, uniforms[DRAFT, :, : max(widths)], laws), uniforms

    def _masked(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Without the end tokens at output indices below a row's ``min_tokens``."""
        for i, row in enumerate(rows):
            short = row.request.params.min_tokens - row.emitted
            if short > 0 and len(self._ends):
                logits[i, :short].index_fill_(-1, self._ends, -torch.inf)
        return logits

    def _sampler(self, first: int, rows: Sequence[Row]) -> Sampler:
        key = first, len(rows)
        if key not in self._samplers:
            self._samplers[key] = Sampler([row.request.params for row in rows], self._vocab, self._device)
        return self._samplers[key]


def _compared(table: list[list[int]], width: int) -> list[list[int]]:
    """What `verify` says of greedy rows without leniency, from (width of the row, block, greatest logits) of each.

    Acceptance is 1 for the token of the greatest logit and 0 for any other, and what is left of ``p`` is that token.
    """
    said = []
    for w, *cells in table:
        block, best = cells[:w], cells[width:]
        accepted = next((j for j, token in enumerate(block) if token != best[j]), w)
        outcome = accepted, best[accepted]
        said.append([*outcome, *outcome, w, *cells[:width], *[0] * width])
    return said


def _logprobs(raw: Tensor, tokens: list[int], most: int) -> list[TokenLogprob]:
    """What the target says of emitted ``tokens`` under ``raw`` [n, V], and of its ``most`` most probable ones."""
    said = raw.gather(-1, torch.tensor(tokens, device=raw.device)[:, None]).log().clamp_min(NEVER)[:, 0].tolist()
    best = raw.topk(min(most, raw.shape[-1]))
    ids, values = best.indices.tolist(), best.values.log().clamp_min(NEVER).tolist()
    return [
        TokenLogprob(x, p, list(zip(i, v, strict=True))) for x, p, i, v in zip(tokens, said, ids, values, strict=True)
    ]
