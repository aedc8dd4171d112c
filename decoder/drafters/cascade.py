"""Drafters made of drafters (Chen et al. 2024, cascade speculative drafting). Both are exact as drafters.

*Vertical*: the draft model does not draw its tokens one pass at a time either; a cheaper drafter proposes them and the
draft model verifies a whole proposal in one pass, losslessly, so that what comes out is drawn from its own ``q``. With
a deterministic proposer this takes no further randomness: draw ``y ~ q`` with the position's own uniform and keep the
proposal where it is ``y``. So it drafts the very tokens that the draft model would draft alone, in fewer passes.

*Horizontal*: a good drafter for the first positions of a block, which are the likeliest to be reached, and a cheaper
one for the rest. Each position's ``q`` is the law of the drafter that filled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoder.cache import CachedModel
from decoder.drafters.base import Draft, Drafter, DraftState
from decoder.drafters.ngram import NgramDraftState
from decoder.sampling import Sampler, SamplingParams
from policies.errors import ModelError


class VerticalDrafter:
    """A causal language model that drafts, helped by n-grams.

    ``longest`` >= 1 bounds a proposal of the n-grams. ``passes`` counts passes of the model over all requests.
    """

    deterministic = False

    def __init__(self, model: Any, *, longest: int = 8, **options: Any):
        if longest < 1:
            raise ValueError(f"longest must be at least 1, not {longest!r}")
        self._model = CachedModel(model, **options)
        self._longest = longest
        self.context = self._model.context
        self.vocab_size: int | None = self._model.vocab_size
        self.device = self._model.device
        self.passes = 0

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> DraftState:
        """Begin a request."""
        return _VerticalState(self, self._model, self._longest, params, vocab_size, eos_ids)


class _VerticalState:
    def __init__(
        self,
        owner: VerticalDrafter,
        model: CachedModel,
        longest: int,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: frozenset[int],
    ):
        self._owner, self._longest = owner, longest
        self._device, self._vocab, self._eos = model.device, vocab_size, eos_ids
        self._cache = model.new_cache()
        self._sampler = Sampler([params], vocab_size, model.device)
        self._ngrams = RollbackNgrams(vocab_size, eos_ids)

    def propose(self, tokens: Sequence[int], width: int, uniforms: Tensor) -> Draft:
        """See `DraftState.propose`."""
        text = list(tokens)
        drafted: list[int] = []
        parts: list[tuple[Tensor, Tensor]] = []
        while len(drafted) < width:
            # A pass gives one token more than it verifies.
            room = min(self._longest, width - len(drafted) - 1)
            guess = self._ngrams.guess(text, room) if room else []
            unread = torch.tensor([[*text[self._cache.length :], *guess]], device=self._device)
            logits = self._cache.extend(unread, keep=len(guess) + 1)[..., : self._vocab]
            self._owner.passes += 1
            q, raw = self._sampler.process(logits)
            drawn = self._sampler.draw(q, uniforms[None, len(drafted) : len(drafted) + len(guess) + 1])[0].tolist()
            n = 1
            while n <= len(guess) and drawn[n - 1] == guess[n - 1] and drawn[n - 1] not in self._eos:
                n += 1
            self._cache.truncate(len(text) + n - 1)
            text += drawn[:n]
            drafted += drawn[:n]
            parts.append((q[:, :n], raw[:, :n]))
            if drafted[-1] in self._eos:
                break
        probs = torch.cat([q for q, _ in parts], 1)
        same = all(q is raw for q, raw in parts)
        ids = torch.tensor([drafted], device=self._device)
        return Draft(ids, probs, probs if same else torch.cat([raw for _, raw in parts], 1))

    def commit(self, length: int) -> None:
        """See `DraftState.commit`."""
        self._cache.truncate(length)
        self._ngrams.commit(length)


class RollbackNgrams(NgramDraftState):
    """N-grams over text that is not settled yet: `commit` takes back what was indexed beyond it."""

    def guess(self, tokens: Sequence[int], width: int) -> list[int]:
        """Up to ``width`` >= 1 tokens that followed the same words before; ``tokens`` are indexed first."""
        self._index(tokens)
        after = self._match()
        return self._bigrams(width) if after is None else self._continuation(after, width)

    def commit(self, length: int) -> None:
        """Forget the text after its first ``length`` tokens."""
        text = self._text
        while len(text) > length:
            token = text.pop()
            if not text:
                break
            self._pairs[text[-1], token].pop()
            followers = self._followers[text[-1]]
            followers[token] -= 1
            if not followers[token]:
                del followers[token]
            if not followers:
                del self._followers[text[-1]]


class HorizontalDrafter:
    """``first`` drafts up to ``head`` >= 1 tokens of a block and n-grams the others.

    Counts as deterministic, for some of its proposals are: rules that read the draft's confidence are refused with it.
    """

    deterministic = True

    def __init__(self, first: Drafter, *, head: int):
        if head < 1:
            raise ValueError(f"head must be at least 1, not {head!r}")
        if first.deterministic:
            raise ModelError("the first drafter of a horizontal cascade must be a model; n-grams are its second")
        self._first, self._head = first, head
        self.context = first.context
        self.vocab_size = first.vocab_size

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> DraftState:
        """Begin a request."""
        return _HorizontalState(
            self._first.start(params, vocab_size, eos_ids),
            RollbackNgrams(vocab_size, eos_ids),
            self._head,
            eos_ids,
        )


class _HorizontalState:
    def __init__(self, first: DraftState, ngrams: RollbackNgrams, head: int, eos_ids: frozenset[int]):
        self._first, self._ngrams, self._head, self._eos = first, ngrams, head, eos_ids

    def propose(self, tokens: Sequence[int], width: int, uniforms: Tensor) -> Draft:
        """See `DraftState.propose`."""
        head = self._first.propose(tokens, min(self._head, width), uniforms[: self._head])
        w = head.tokens.shape[-1] if head.widths is None else int(head.widths)
        parts = [Draft(head.tokens[:, :w], head.probs[:, :w], head.raw[:, :w])]
        drafted = parts[0].tokens[0].tolist()
        if w < width and drafted[-1] not in self._eos:
            parts.append(self._ngrams.propose([*tokens, *drafted], width - w, uniforms[w:]))
        return Draft(*(torch.cat(list(column), 1) for column in list(zip(*parts, strict=True))[:3]))

    def commit(self, length: int) -> None:
        """See `DraftState.commit`."""
        self._first.commit(length)
        self._ngrams.commit(length)
