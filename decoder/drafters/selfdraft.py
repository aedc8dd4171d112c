"""Drafts with the target's own first layers and its head: no second model to load or to find.

The small model shares every weight with the target and has a cache of its own, so it costs the keys and values of its
layers and no other memory. How good it is depends on the target: models that were not trained to be left early draft
poorly with few layers. Whatever it drafts, verification is lossless.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from decoder.drafters.model import ModelDrafter
from policies.errors import ModelError


class SelfDrafter(ModelDrafter):
    """The first ``layers`` >= 1 layers of a causal language model, then its final norm and head.

    Raises ModelError where there are not that many, or where the layers cannot be found. ``options`` are those of
    `CachedModel`.
    """

    def __init__(self, target: Any, layers: int, **options: Any):
        super().__init__(first_layers(target, layers), **options)


def first_layers(model: Any, layers: int) -> Any:
    """A model that ends after the first ``layers`` decoder layers of ``model`` and shares all weights with it.

    With all layers it is the model itself. Raises ModelError as `SelfDrafter` does.
    """
    config = model.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    name = type(model).__name__
    if not 1 <= layers <= depth:
        raise ModelError(f"a self-draft of {name} has 1 to {depth} layers, not {layers!r}")
    found = _stack(model, depth)
    if found is None:
        raise ModelError(f"{name}: cannot find its {depth} decoder layers; use a draft model instead")
    if layers == depth:
        return model
    path, stack = found
    small_config = copy.deepcopy(model.config)
    small_text = small_config.get_text_config(decoder=True)
    small_text.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        small_text.layer_types = list(config.layer_types[:layers])
    # Copies of the modules on the way to the stack; everything beside it is the target's own.
    small = parent = _shallow(model)
    small.config = small_config
    *way, last = path.split(".")
    for step in way:
        child = _shallow(getattr(parent, step))
        if getattr(child, "config", None) is not None:
            child.config = small_text
        setattr(parent, step, child)
        parent = child
    setattr(parent, last, torch.nn.ModuleList(list(stack)[:layers]))
    return small


def _stack(model: Any, depth: int) -> tuple[str, torch.nn.ModuleList] | None:
    """The outermost list of ``depth`` modules, and its dotted path; None if there is none or a tie."""
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth]
    if not lists:
        return None
    shallowest = min(path.count(".") for path, _ in lists)
    outer = [(path, stack) for path, stack in lists if path.count(".") == shallowest]
    return outer[0] if len(outer) == 1 and "." in outer[0][0] else None


def _shallow(module: Any) -> Any:
    """A copy of a module that shares parameters, buffers and children, but has its own table of children."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    made.__dict__.pop("forward", None)  # one that was set on the module itself is bound to it, and runs all its layers
    return made
