"""What the round asks of a drafter.

A drafter offers `Drafter.start`, which drafts for one request. One that can draft for many rows at once offers
`BatchDrafter.start_rows` too; `rows_of` makes the others draft row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from decoder.devices import send
from decoder.sampling import SamplingParams


class Draft(NamedTuple):
    """Proposed blocks of up to w >= 0 tokens, for B rows.

    tokens int64 [B, w]; probs float32 [B, w, V], the processed distribution that each token was drawn from; raw float32
    [B, w, V], before temperature. A drafter that is deterministic gives one-hot ``probs`` and ``raw``. ``widths`` int64
    [B], on the same device: how many of the w positions are a row's own (None: all); the others hold something finite.
    """

    tokens: Tensor
    probs: Tensor
    raw: Tensor
    widths: Tensor | None = None


class DraftState(Protocol):
    """A drafter at work on one request."""

    def propose(self, tokens: Sequence[int], width: int, uniforms: Tensor) -> Draft:
        """Up to ``width`` >= 1 tokens to follow ``tokens`` (prompt and output so far); an end token ends the block.

        ``uniforms`` [width] in [0, 1) is the only source of randomness, one a position.
        """
        ...

    def commit(self, length: int) -> None:
        """The first ``length`` tokens of what was read and proposed stand; forget the others."""
        ...


class RowDrafts(Protocol):
    """A drafter at work on the rows of a batch, numbered from 0."""

    def join(self, params: SamplingParams) -> None:
        """A request becomes the last row."""
        ...

    def leave(self, row: int) -> None:
        """A row goes; the last one takes its place."""
        ...

    def propose(
        self,
        first: int,
        texts: Sequence[Sequence[int]],
        widths: Sequence[int],
        uniforms: Tensor,
        laws: bool = True,
    ) -> Draft:
        """Draft for the B rows from ``first`` on: up to ``widths[i]`` >= 0 tokens to follow ``texts[i]``.

        As `DraftState.propose` row by row; ``uniforms`` [B, max(widths)]; at least one width is positive. Without
        ``laws`` nobody asks for the distributions, and they may be anything.
        """
        ...

    def commit(self, row: int, length: int) -> None:
        """As `DraftState.commit`, for one row."""
        ...


class Drafter(Protocol):
    """A cheap proposer of tokens.

    ``deterministic`` says that it emits one token with certainty (one-hot q), ``context`` is the longest sequence that
    it can read (None: unlimited), ``vocab_size`` the size of its vocabulary (None: any).
    """

    @property
    def deterministic(self) -> bool: ...

    @property
    def context(self) -> int | None: ...

    @property
    def vocab_size(self) -> int | None: ...

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> DraftState:
        """Begin a request. Distributions have ``vocab_size`` entries (at most the drafter's own)."""
        ...


@runtime_checkable
class BatchDrafter(Protocol):
    """A drafter that drafts for many rows at once."""

    def start_rows(self, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> RowDrafts:
        """Begin a batch without rows; raises ModelError where ``max_rows`` cannot be drafted for together."""
        ...


def rows_of(drafter: Drafter, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> RowDrafts:
    """The drafter for a batch of up to ``max_rows``: its own way, or one row after another."""
    if isinstance(drafter, BatchDrafter):
        return drafter.start_rows(max_rows, vocab_size, eos_ids)
    return OneByOne(drafter, vocab_size, eos_ids)


class OneByOne:
    """Drafts row by row with a drafter that knows one request only."""

    def __init__(self, drafter: Drafter, vocab_size: int, eos_ids: frozenset[int]):
        self._drafter, self._vocab, self._eos = drafter, vocab_size, eos_ids
        self._states: list[DraftState] = []

    def join(self, params: SamplingParams) -> None:
        """Begin a request."""
        self._states.append(self._drafter.start(params, self._vocab, self._eos))

    def leave(self, row: int) -> None:
        """End it."""
        last = self._states.pop()
        if row < len(self._states):
            self._states[row] = last

    def propose(
        self,
        first: int,
        texts: Sequence[Sequence[int]],
        widths: Sequence[int],
        uniforms: Tensor,
        laws: bool = True,
    ) -> Draft:
        """Each row's own proposal, padded with zeros to the widest."""
        states = self._states[first : first + len(texts)]
        drafts = [
            state.propose(text, width, u[:width]) if width else None
            for state, text, width, u in zip(states, texts, widths, uniforms, strict=True)
        ]
        if len(drafts) == 1 and drafts[0] is not None:
            return Draft(*drafts[0])
        own = [0 if draft is None else draft.tokens.shape[-1] for draft in drafts]
        shape = (len(drafts), max(own))
        tokens = torch.zeros(shape, dtype=torch.int64, device=uniforms.device)
        probs = torch.zeros(*shape, self._vocab, device=uniforms.device)
        raw = probs if self._drafter.deterministic else torch.zeros_like(probs)
        for i, (draft, width) in enumerate(zip(drafts, own, strict=True)):
            if draft is not None:
                tokens[i, :width], probs[i, :width] = draft.tokens[0], draft.probs[0]
                raw[i, :width] = draft.raw[0]
        return Draft(tokens, probs, raw, send(own, uniforms.device))

    def commit(self, row: int, length: int) -> None:
        """Pass it on."""
        self._states[row].commit(length)
