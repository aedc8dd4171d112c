"""What the round asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from decoder.sampling import SamplingParams


class Draft(NamedTuple):
    """A proposed block of w >= 0 tokens of one row.

    tokens int64 [1, w]; probs float32 [1, w, V], the processed distribution that each token was drawn from; raw float32
    [1, w, V], before temperature. A drafter that is deterministic gives one-hot ``probs`` and ``raw``.
    """

    tokens: Tensor
    probs: Tensor
    raw: Tensor


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
