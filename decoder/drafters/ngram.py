"""Drafts by looking up what followed the same words before: no model, no cost, good where text repeats itself.

Max-Gram (Chen et al. 2024, cascade speculative drafting): take the longest suffix of the text that occurs earlier in
it, the latest such place if there are several, and propose what followed. Where only the last token occurs earlier,
bigrams of the text decide: what followed a token most often. The drafter is deterministic, so q is one-hot and a
proposal is accepted losslessly with probability p(x).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.devices import send
from decoder.drafters.base import Draft
from decoder.sampling import SamplingParams

CANDIDATES = 64  # latest places that are compared for the longest match


class NgramDrafter:
    """Longest suffix match in prompt and output, with a bigram fallback. State lives in one request only."""

    deterministic = True
    context: int | None = None
    vocab_size: int | None = None

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> NgramDraftState:
        """Begin a request with an empty index."""
        return NgramDraftState(vocab_size, eos_ids)


class NgramDraftState:
    """An index of the text of one request: where each pair of tokens ended, and what followed each token."""

    def __init__(self, vocab_size: int, eos_ids: frozenset[int]):
        self._vocab = vocab_size
        self._eos = eos_ids
        self._text: list[int] = []
        self._pairs: dict[tuple[int, int], list[int]] = {}
        self._followers: dict[int, Counter[int]] = {}

    def propose(self, tokens: Sequence[int], width: int, uniforms: Tensor) -> Draft:
        """What followed the best match, going round where it reaches the end of the text; see `DraftState.propose`."""
        self._index(tokens)
        after = self._match()
        proposed = self._bigrams(width) if after is None else self._continuation(after, width)
        for j, token in enumerate(proposed):
            if token in self._eos:
                del proposed[j + 1 :]
                break
        ids = send([proposed], uniforms.device, torch.int64)
        one_hot = torch.zeros(1, len(proposed), self._vocab, device=uniforms.device).scatter_(2, ids[..., None], 1.0)
        return Draft(ids, one_hot, one_hot)

    def commit(self, length: int) -> None:
        """Nothing to roll back: only committed text is indexed."""

    def _index(self, tokens: Sequence[int]) -> None:
        text = self._text
        for token in tokens[len(text) :]:
            text.append(token)
            end = len(text) - 1
            if end >= 1:
                self._followers.setdefault(text[end - 1], Counter())[token] += 1
                self._pairs.setdefault((text[end - 1], token), []).append(end)

    def _match(self) -> int | None:
        """Index of the token after the longest earlier occurrence of a suffix of at least two tokens."""
        text = self._text
        last = len(text) - 1
        if last < 1:
            return None
        best, longest = None, 1
        for end in reversed(self._pairs[text[last - 1], text[last]][-CANDIDATES - 1 : -1]):
            length = 2
            while length <= end and text[end - length] == text[last - length]:
                length += 1
            if length > longest:
                best, longest = end + 1, length
        return best

    def _continuation(self, start: int, width: int) -> list[int]:
        period = len(self._text) - start
        return [self._text[start + j % period] for j in range(width)]

    def _bigrams(self, width: int) -> list[int]:
        chain: list[int] = []
        token = self._text[-1]
        while len(chain) < width and token in self._followers:
            token = self._followers[token].most_common(1)[0][0]
            chain.append(token)
        return chain
