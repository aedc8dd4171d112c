"""Drafts with a causal language model that has its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoder.cache import CachedModel
from decoder.devices import send
from decoder.drafters.base import Draft
from decoder.sampling import Sampler, SamplingParams


class ModelDrafter:
    """Any causal language model over the target's tokenizer; raises ModelError if its cache cannot be rolled back.

    ``options`` are those of `CachedModel`.
    """

    deterministic = False

    def __init__(self, model: Any, **options: Any):
        self._model = CachedModel(model, **options)
        self.context = self._model.context
        self.vocab_size: int | None = self._model.vocab_size
        self.device = self._model.device

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> ModelDraftState:
        """Begin a request with an empty cache."""
        rows = self.start_rows(1, vocab_size, eos_ids)
        rows.join(params)
        return ModelDraftState(rows)

    def start_rows(self, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> ModelRowDrafts:
        """Begin a batch; see `BatchDrafter`."""
        return ModelRowDrafts(self._model, max_rows, vocab_size, eos_ids)


class ModelRowDrafts:
    """The draft model at work on the rows of a batch.

    A token is drawn on the device and goes into the next step from there; the host waits for nothing. Only on a CPU,
    where looking costs nothing, the block ends early once every row has drawn an end token.
    """

    def __init__(self, model: CachedModel, max_rows: int, vocab_size: int, eos_ids: frozenset[int]):
        self._device = model.device
        self._looks = model.device.type == "cpu"
        self._cache = model.new_rows(max_rows)
        self._vocab = vocab_size
        self._eos = eos_ids
        self._ends = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=model.device)
        self._params: list[SamplingParams] = []
        self._samplers: dict[tuple[int, int], Sampler] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache of each row."""
        return self._cache.lengths[: len(self._params)]

    def join(self, params: SamplingParams) -> None:
        """Begin a request with an empty cache."""
        self._params.append(params)
        self._samplers.clear()

    def leave(self, row: int) -> None:
        """Forget a row."""
        self._cache.leave(row, len(self._params))
        last = self._params.pop()
        if row < len(self._params):
            self._params[row] = last
        self._samplers.clear()

    def propose(
        self,
        first: int,
        texts: Sequence[Sequence[int]],
        widths: Sequence[int],
        uniforms: Tensor,
        laws: bool = True,
    ) -> Draft:
        """Draw the rows' tokens step by step; see `RowDrafts.propose`."""
        sampler = self._sampler(first, len(texts))
        before = self._cache.lengths[first : first + len(texts)]
        logits = self._read(first, texts, widths)[..., : self._vocab]
        drafted: list[Tensor] = []
        probs, raws = [], []
        ended = [False] * len(texts)
        widest = max(widths)
        for j in range(widest):
            if j:
                logits = self._cache.extend(drafted[-1], 1, first)[..., : self._vocab]
            if laws or not sampler.greedy:
                q, raw = sampler.process(logits)
                token = sampler.draw(q, uniforms[:, j : j + 1])
                probs.append(q)
                raws.append(raw)
            else:
                token = sampler.best(logits)
            drafted.append(token)
            if self._eos and self._looks:
                for i, x in enumerate(token[:, 0].tolist()):
                    ended[i] = ended[i] or x in self._eos or j + 1 >= widths[i]
                if all(ended):
                    break
        for i, width in enumerate(widths):
            if not width:
                self._cache.truncate(first + i, before[i])  # it read padding only
        tokens = torch.cat(drafted, 1) if len(drafted) > 1 else drafted[0]
        if not probs:
            return Draft(tokens, logits, logits, self._own(tokens, widths))
        joined = torch.cat(probs, 1) if len(probs) > 1 else probs[0]
        raw = joined if probs[0] is raws[0] else torch.cat(raws, 1)
        return Draft(tokens, joined, raw, self._own(tokens, widths))

    def commit(self, row: int, length: int) -> None:
        """Roll the row's cache back to at most ``length`` tokens."""
        self._cache.truncate(row, length)

    def _read(self, first: int, texts: Sequence[Sequence[int]], widths: Sequence[int]) -> Tensor:
        """Read what the rows have not read yet; logits [B, 1, V] after the last of it.

        At most two tokens in a row that drafted in its last round. One that did not drafts nothing now either, and
        reads padding, or has to catch up, and does so alone.
        """
        read = self._cache.lengths[first : first + len(texts)]
        unread = [list(text[n:]) if w else [] for text, n, w in zip(texts, read, widths, strict=True)]
        if len(texts) == 1:
            return self._cache.extend(send(unread, self._device), 1, first)
        for i, tokens in enumerate(unread):
            if len(tokens) > 2:
                self._cache.extend(send([tokens[:-1]], self._device), 1, first + i)
                unread[i] = tokens[-1:]
        longest = max(map(len, unread))
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in unread]
        logits = self._cache.extend(send(padded, self._device), longest, first)
        if longest == 1 and all(unread):
            return logits
        for i, tokens in enumerate(unread):  # take the padding back
            row = first + i
            self._cache.truncate(row, self._cache.lengths[row] - longest + len(tokens))
        last = send([max(0, len(tokens) - 1) for tokens in unread], self._device)
        return logits.gather(1, last[:, None, None].expand(-1, 1, logits.shape[-1]))

    def _own(self, tokens: Tensor, widths: Sequence[int]) -> Tensor | None:
        """How many tokens are each row's own: up to its width, and to its first end token."""
        drawn = tokens.shape[-1]
        asked = None
        if len(widths) > 1 and min(widths) < drawn:
            asked = send([min(w, drawn) for w in widths], self._device)
        if not self._eos or drawn == 1 or (len(widths) == 1 and self._looks):
            return asked
        ended = (tokens[:, :-1, None] == self._ends).any(-1).long().cumsum(1)
        kept = drawn - (ended > 0).sum(1)
        return kept if asked is None else torch.minimum(kept, asked)

    def _sampler(self, first: int, rows: int) -> Sampler:
        if (first, rows) not in self._samplers:
            params = self._params[first : first + rows]
            self._samplers[first, rows] = Sampler(params, self._vocab, self._device)
        return self._samplers[first, rows]


class ModelDraftState:
    """The draft model at work on one request."""

    def __init__(self, rows: ModelRowDrafts):
        self._rows = rows

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._rows.lengths[0]

    def propose(self, tokens: Sequence[int], width: int, uniforms: Tensor) -> Draft:
        """Draw up to ``width`` tokens one after another; see `DraftState.propose`."""
        return self._rows.propose(0, [tokens], [width], uniforms[None, :])

    def commit(self, length: int) -> None:
        """Roll the cache back to at most ``length`` tokens."""
        self._rows.commit(0, length)
