"""Key-value caches of causal language models for one or several rows, and their rollback.

A `RowCache` gives every row a run of slots, one per position, and the next tokens of a row are written right after the
ones that stand. So to take tokens back is to say that a row is shorter: what lies beyond its length is never seen and
is written over. Rows may have different lengths, and a pass may read padding after a row's own tokens, which is taken
back in the same way. Layers with a sliding window keep all positions and show the ones inside the window.

Models whose state cannot be rolled back (recurrent layers and other kinds) are refused at load; models that cannot
decode rows of different lengths in one pass are refused when a batch of several rows is made.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from decoder.attention import GROUPED
from decoder.devices import send
from policies.errors import ModelError

_EMPTY_INPUT = "a model pass needs at least one token"
_FIRST_SLOTS, _SLOTS = 128, 64  # slots of a new cache; it grows to twice the need, in multiples of the second
_PADDING = 64  # slots of a static cache beyond its length, for the blocks of one pass
_COMPILED = 16  # widest pass that is compiled; prompts come in every length and are read as they are
_GRAPHS = 128  # rows times widths that may be compiled
_MASKS = ("sdpa", "eager", GROUPED)  # attention implementations that take a mask for every row


class CachedModel:
    """A causal language model that was checked at load: its cache can be rolled back.

    ``context`` is the longest sequence it can read (None: unlimited), ``vocab_size`` the width of its logits.
    ``static_length`` gives caches a fixed number of slots, so that every pass has the same shapes; ``compiler`` (a
    `torch.compile` backend; "inductor" also records CUDA graphs) then compiles the model's pass. Raises ModelError for
    an encoder-decoder, a model with recurrent state, a cache of another kind, and options that cannot work.
    """

    def __init__(self, model: Any, *, static_length: int | None = None, compiler: str | None = None):
        self.name = name = type(model).__name__
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
        self._takes_positions = "position_ids" in parameters
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.vocab_size: int = config.vocab_size
        self.device: torch.device = model.device
        self.windows = self._check_layers()  # refuses what cannot be rolled back now, not at the first request
        kinds = set(getattr(config, "layer_types", None) or ())
        self._kinds = kinds if len(kinds) > 1 else set()
        # A mask of ours is cheaper than the model's own.
        known = getattr(config, "_attn_implementation", None) in _MASKS and self._takes_positions
        self.masks = known and self.device.type == "cpu" and self.windows == [None] * len(self.windows)
        self._checked_rows = False
        self.static_length = static_length
        self._forward = model
        if static_length is not None:
            self.check_rows()
            self.context = min(static_length, self.context or static_length)
        if compiler is not None:
            self._forward = self._compile(compiler)

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self.new_rows(1))

    def new_rows(self, rows: int) -> RowCache:
        """An empty cache for up to ``rows`` sequences; raises ModelError where several cannot be read in one pass."""
        if rows > 1:
            self.check_rows()
        return RowCache(self, rows)

    @torch.inference_mode()
    def check_rows(self) -> None:
        """Read two rows of different lengths in one pass and alone; raises ModelError if that is not the same.

        Done once. Finds positions, windows and masks that this model treats in a way of its own.
        """
        if self._checked_rows:
            return
        attention = getattr(self.config.get_text_config(decoder=True), "_attn_implementation", None)
        if attention not in _MASKS or not self._takes_positions:
            raise ModelError(
                f"{self.name} with attention {attention!r} cannot decode several rows in one pass; load it with "
                "attn_implementation='sdpa', or use batches of one row"
            )
        ids = torch.arange(24, device=self.device).view(2, 12) * 7 % self.vocab_size
        try:
            alone = torch.cat([RowCache(self, 1).extend(ids[r : r + 1, r : 6 + 2 * r], 2) for r in (0, 1)])
            both = RowCache(self, 2, masked=True)
            for r, n in ((0, 4), (1, 5)):
                both.extend(ids[r : r + 1, r : r + n], 1, first=r)
            together = both.extend(torch.stack([ids[0, 4:6], ids[1, 6:8]]), 2)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            raise ModelError(f"{self.name} cannot decode several rows in one pass: {e!s:.200}") from e
        scale = float(alone.float().abs().max())
        off = float((alone.float() - together.float()).abs().max())
        if not off <= scale * (1e-3 if alone.dtype == torch.float32 else 0.1):
            raise ModelError(f"{self.name}: rows read in one pass differ from rows read alone; use batches of one row")
        self._checked_rows = True

    def forward(
        self, ids: Tensor, cache: Cache, keep: int, positions: Tensor, mask: dict[str, Tensor] | None
    ) -> Tensor:
        """Logits [B, keep, V] of the last ``keep`` of ``ids`` [B, n], which are written to ``cache``.

        ``positions`` int64 [B, n]; ``mask`` float [B, 1, n, slots] by kind of layer, None for the model's own.
        """
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if self._cuts_logits:
            arguments["logits_to_keep"] = keep
        if self._takes_positions:
            arguments["position_ids"] = positions
        if mask is not None:
            arguments["attention_mask"] = mask if self._kinds else next(iter(mask.values()))
        model = self._forward if mask is not None and ids.shape[-1] <= _COMPILED else self.model
        logits: Tensor = model(input_ids=ids, **arguments).logits
        return logits if self._cuts_logits else logits[:, -keep:]

    def _check_layers(self) -> list[int | None]:
        """The sliding window of every layer (None: it sees everything)."""
        try:
            layers = DynamicCache(config=self.config).layers
        except (KeyError, ValueError, TypeError) as e:
            raise ModelError(f"{self.name}: no dynamic cache for this model: {e}") from e
        for layer in layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ModelError(
                    f"{self.name}: cannot roll back a cache layer of type {type(layer).__name__}; "
                    "full and sliding-window attention work"
                )
        return [getattr(layer, "sliding_window", None) for layer in layers]

    def _compile(self, backend: str) -> Any:
        if self.static_length is None:
            raise ModelError("a compiled pass needs a static cache: give static_length too")
        if not getattr(self.model, "_can_compile_fullgraph", False):
            raise ModelError(f"{self.name} cannot be compiled as one graph; leave the compiler out")
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _GRAPHS)
        graphs = backend == "inductor" and self.device.type == "cuda"
        mode = "reduce-overhead" if graphs else None
        try:
            return torch.compile(self.model, backend=backend, dynamic=False, mode=mode)
        except RuntimeError as e:
            raise ModelError(f"cannot compile {self.name} with {backend!r} here: {e!s:.200}") from e


class _Plan:
    """Where the tokens of the pass at hand go, and what it sees; the layers of a cache share it."""

    first: int = 0  # rows first..last-1 take part
    last: int = 1
    start: int = 0  # slot of the first token, where all rows have the same
    end: int = 0  # slots that may be seen
    begins: dict[int, int]  # by window: the first slot that may be seen
    index: Tensor | None = None  # int64 [B * n]: row * capacity + slot, where rows differ
    capacity: tuple[int, int] = (0, 0)  # rows, slots


class _Slots(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer, [rows, slots, heads, size] each."""

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool
    _views: tuple[Tensor, Tensor] | None = None  # keys and values of rows `_seen`, [rows, heads, slots, size] each
    _seen: tuple[int, int] = (0, 0)

    def __init__(self, plan: _Plan, window: int | None):
        super().__init__()
        self._plan, self._window = plan, window
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, slots = self._plan.capacity
        # Zeros: what is never seen must be finite, for a weight of 0 times a NaN is a NaN.
        shapes = [(rows, slots, x.shape[1], x.shape[3]) for x in (key_states, value_states)]
        keys, values = (torch.zeros(shape, dtype=key_states.dtype, device=key_states.device) for shape in shapes)
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            old = self.keys.shape
            keys[: old[0], : old[1]] = self.keys
            values[: old[0], : old[1]] = self.values
        self.keys, self.values = keys, values
        self._views = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        plan = self._plan
        if self.keys is None or self.keys.shape[:2] != plan.capacity:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        n = key_states.shape[-2]
        begin = 0 if self._window is None else plan.begins[self._window]
        if self._views is None or self._seen != (plan.first, plan.last):
            keys, values = (slots[plan.first : plan.last].transpose(1, 2) for slots in (self.keys, self.values))
            self._views, self._seen = (keys, values), (plan.first, plan.last)
        keys, values = self._views
        if plan.index is None:
            keys.narrow(2, plan.start, n).copy_(key_states)
            values.narrow(2, plan.start, n).copy_(value_states)
        else:
            for slots, states in ((self.keys, key_states), (self.values, value_states)):
                new = states.transpose(1, 2).reshape(-1, *slots.shape[2:])
                slots.view(-1, *slots.shape[2:]).index_copy_(0, plan.index, new)
        return keys.narrow(2, begin, plan.end - begin), values.narrow(2, begin, plan.end - begin)

    def get_seq_length(self) -> int:
        return self._plan.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        begin = 0 if self._window is None else self._plan.begins[self._window]
        return self._plan.end - begin, begin

    def get_max_length(self) -> int:
        return -1

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of a row to another."""
        if self.keys is not None and self.values is not None:
            self.keys[target, :length] = self.keys[source, :length]
            self.values[target, :length] = self.values[source, :length]

    def clear(self, row: int) -> None:
        """Zero a row."""
        if self.keys is not None and self.values is not None and row < self.keys.shape[0]:
            self.keys[row].zero_()
            self.values[row].zero_()


class RowCache:
    """The caches of up to ``max_rows`` sequences; ``lengths[r]`` tokens stand in row r, rows being numbered from 0.

    Slots are made as they are needed, rows too. ``masked`` shows the mask to the model even where it could do without.
    """

    def __init__(self, owner: CachedModel, max_rows: int, *, masked: bool = False):
        self._owner = owner
        self._max_rows = max_rows
        self._plan = _Plan()
        self._slots = [_Slots(self._plan, window) for window in owner.windows]
        self._cache = Cache(layers=list(self._slots))
        self._windows = sorted({window for window in owner.windows if window is not None})
        static = owner.static_length is not None
        self._static, self._masked = static, masked or static
        self._used = 0
        self.lengths = [0] * max_rows

    def extend(self, ids: Tensor, keep: int, first: int = 0) -> Tensor:
        """Read ``ids`` int64 [B, n >= 1] after what stands in the B rows from ``first`` on.

        Returns the logits [B, keep, V] of the last ``keep``. Afterwards all of ``ids`` stand; see `truncate`.
        """
        rows, n = ids.shape
        if n == 0:
            raise ValueError(_EMPTY_INPUT)
        plan, last = self._plan, first + rows
        lengths = self.lengths[first:last]
        shortest, longest = min(lengths), max(lengths)
        self._reserve(last, longest + n)
        plan.first, plan.last, plan.start = first, last, shortest
        plan.end = plan.capacity[1] if self._static else longest + n
        plan.begins = {w: 0 if self._static else max(0, shortest - w + 1) for w in self._windows}
        places = torch.arange(shortest, shortest + n, device=ids.device).unsqueeze(0)
        if shortest != longest:
            behind = send([length - shortest for length in lengths], ids.device)
            places = places + behind.unsqueeze(1)
        if shortest != longest or self._static:
            row = torch.arange(first, last, device=ids.device).unsqueeze(1)
            plan.index = (row * plan.capacity[1] + places).flatten()
        else:
            plan.index = None
        masked = self._masked or shortest != longest or (n > 1 and (rows > 1 or (self._owner.masks and shortest)))
        mask = self._mask(places) if masked else None
        context = self._owner.context
        if context is not None and longest + n > context:  # padding only: tokens that count stay below
            places = places.clamp_max(context - 1)
        logits = self._owner.forward(ids, self._cache, keep, places, mask)
        for row_number in range(first, last):
            self.lengths[row_number] += n
        return logits

    def truncate(self, row: int, length: int) -> None:
        """Forget everything after the first ``length`` tokens of a row; a length beyond its own changes nothing."""
        self.lengths[row] = min(self.lengths[row], length)

    def leave(self, row: int, rows: int) -> None:
        """Take out one of the first ``rows`` rows; the last of them takes its place."""
        last = rows - 1
        if row != last:
            for slots in self._slots:
                slots.move(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths[last] = 0
        for slots in self._slots:
            slots.clear(last)

    def _reserve(self, rows: int, slots: int) -> None:
        """Room for so many rows and slots; more than is needed, so that it is rarely asked for."""
        have_rows, have_slots = self._plan.capacity
        if self._static:
            assert self._owner.static_length is not None
            limit = self._owner.static_length + _PADDING
            if slots > limit:
                raise ValueError(f"a pass that ends at position {slots} does not fit a static cache of {limit} slots")
            self._plan.capacity = (self._max_rows, limit)
            return
        if rows > have_rows:
            have_rows = min(self._max_rows, max(rows, 2 * have_rows))
        if slots > have_slots:
            have_slots = max(_FIRST_SLOTS, -(-(slots + min(slots, 8 * _FIRST_SLOTS)) // _SLOTS) * _SLOTS)
        self._plan.capacity = (have_rows, have_slots)

    def _mask(self, places: Tensor) -> dict[str, Tensor]:
        """Additive masks [B, 1, n, slots]: every token sees the slots up to its own, and of those its window."""
        plan = self._plan
        dtype = self._owner.model.dtype
        masks = {}
        kinds = [("full_attention", None)] if None in self._owner.windows or not self._windows else []
        for kind, window in [*kinds, *(("sliding_attention", w) for w in self._windows)]:
            begin = 0 if window is None else plan.begins[window]
            slots = torch.arange(begin, plan.end, device=places.device)
            ahead = slots - places[..., None]
            hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=places.device)
            masks[kind] = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
        return masks


class KVCache:
    """The cache of one sequence; ``length`` tokens are in it."""

    def __init__(self, rows: RowCache):
        self._rows = rows

    @property
    def length(self) -> int:
        """Tokens that stand."""
        return self._rows.lengths[0]

    def extend(self, ids: Tensor, keep: int) -> Tensor:
        """Read ``ids`` int64 [1, n >= 1] after what is there; returns the logits [1, keep, V] of the last ``keep``."""
        return self._rows.extend(ids, keep)

    def truncate(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens; a length that is not reached yet changes nothing."""
        self._rows.truncate(0, length)
