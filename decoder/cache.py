"""Key-value caches of causal language models, and their rollback.

After every round a cache holds exactly the committed tokens but the last one: what the target rejected is taken back.
Models whose cache cannot be rolled back (recurrent state, offloaded or static layouts) are refused at load.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from policies.errors import ModelError

_EMPTY_INPUT = "a model pass needs at least one token"


class CachedModel:
    """A causal language model that was checked at load: its cache can be rolled back.

    ``context`` is the longest sequence it can read (None: unlimited), ``vocab_size`` the width of its logits. Raises
    ModelError for an encoder-decoder, a model with recurrent state, or a cache of another kind.
    """

    def __init__(self, model: Any):
        name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{name} is an encoder-decoder; only causal (decoder-only) models can draft or verify")
        if getattr(model, "_is_stateful", False):
            raise ModelError(f"{name} keeps a recurrent state, which cannot be rolled back; use an attention model")
        self.model = model
        self.config = model.config
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed this argument in 5.24; both names stay usable for the versions that we support.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cuts_logits = "logits_to_keep" in parameters
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.vocab_size: int = config.vocab_size
        self.device: torch.device = model.device
        self.new_cache()  # refuses what cannot be rolled back now rather than at the first request

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence; raises ModelError if a layer of it cannot be rolled back."""
        try:
            cache = DynamicCache(config=self.config)
        except (KeyError, ValueError, TypeError) as e:
            raise ModelError(f"{type(self.model).__name__}: no dynamic cache for this model: {e}") from e
        for layer in cache.layers:
            kind = type(layer)
            sliding = kind is DynamicSlidingWindowLayer and hasattr(layer, "activate_past_recording")
            if kind is not DynamicLayer and not sliding:
                raise ModelError(
                    f"{type(self.model).__name__}: cannot roll back a cache layer of type {kind.__name__}; "
                    "full and sliding-window attention work"
                )
            if sliding:
                layer.activate_past_recording()
        return KVCache(self, cache)

    def forward(self, ids: Tensor, cache: Any, keep: int) -> Tensor:
        """Logits [B, keep, V] of the last ``keep`` of ``ids`` [B, n], which are appended to ``cache``."""
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if self._cuts_logits:
            arguments["logits_to_keep"] = keep
        logits: Tensor = self.model(input_ids=ids, **arguments).logits
        return logits if self._cuts_logits else logits[:, -keep:]


class KVCache:
    """The cache of one sequence; ``length`` tokens are in it."""

    def __init__(self, owner: CachedModel, cache: Any):
        self._owner = owner
        self._cache = cache
        self.length = 0

    def extend(self, ids: Tensor, keep: int) -> Tensor:
        """Read ``ids`` int64 [1, n >= 1] after what is there; returns the logits [1, keep, V] of the last ``keep``."""
        if ids.shape[-1] == 0:
            raise ValueError(_EMPTY_INPUT)
        logits = self._owner.forward(ids, self._cache, keep)
        self.length += ids.shape[-1]
        return logits

    def truncate(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens; a length that is not reached yet changes nothing.

        Call it after every round: sliding-window layers hold on to what they may have to give back until then.
        """
        surplus = max(0, self.length - length)
        self._cache.crop(-surplus)
        self.length -= surplus
