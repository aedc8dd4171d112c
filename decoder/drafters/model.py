"""Drafts with a causal language model that has its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoder.cache import CachedModel
from decoder.drafters.base import Draft
from decoder.sampling import SamplingParams, bias_tensor, draw, process


class ModelDrafter:
    """Any causal language model over the target's tokenizer; raises ModelError if its cache cannot be rolled back."""

    deterministic = False

    def __init__(self, model: Any):
        self._model = CachedModel(model)
        self.context = self._model.context
        self.vocab_size: int | None = self._model.vocab_size

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> ModelDraftState:
        """Begin a request with an empty cache."""
        return ModelDraftState(self._model, params, vocab_size, eos_ids)


class ModelDraftState:
    """The draft model's cache of one request."""

    def __init__(self, model: CachedModel, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]):
        self._device = model.device
        self._cache = model.new_cache()
        self._params = params
        self._vocab = vocab_size
        self._eos = eos_ids
        self._bias = bias_tensor(params, vocab_size, model.device)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._cache.length

    def propose(self, tokens: Sequence[int], width: int, uniforms: Tensor) -> Draft:
        """Draw up to ``width`` tokens one after another; see `DraftState.propose`."""
        step = torch.tensor([tokens[self._cache.length :]], device=self._device)
        drafted, probs, raws = [], [], []
        for j in range(width):
            logits = self._cache.extend(step, keep=1)[..., : self._vocab]
            q, raw = process(logits, self._params, self._bias)
            step = q.argmax(-1) if self._params.temperature == 0 else draw(q, uniforms[j : j + 1, None])
            drafted.append(step)
            probs.append(q)
            raws.append(raw)
            if int(step) in self._eos:
                break
        joined = torch.cat(probs, 1)
        return Draft(torch.cat(drafted, 1), joined, joined if probs[0] is raws[0] else torch.cat(raws, 1))

    def commit(self, length: int) -> None:
        """Roll the cache back to at most ``length`` tokens."""
        self._cache.truncate(length)
