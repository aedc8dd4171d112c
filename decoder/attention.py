"""Attention on a CPU for models whose heads share keys (grouped-query attention).

transformers repeats the keys and values of a group for each of its heads before PyTorch sees them, wherever there is a
mask. On a CPU PyTorch can do without: the result is the same bit for bit, and a pass that verifies a few tokens over a
long context takes a fifth less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

GROUPED = "lenity_grouped"  # its name as an `attn_implementation`


def grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of ``query`` [B, H, n, D] over ``key`` and ``value`` [B, K, S, D], as [B, n, H, D].

    ``attention_mask`` [B, 1, n, S] is bool or additive; without one it is transformers' own.
    """
    if attention_mask is None or options.get("dropout") or options.get("position_bias") is not None:
        said: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return said
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=options.get("scaling"), enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def use_grouped(model: Any) -> None:
    """Let a model that is on a CPU and shares keys between heads decode that way; others stay as they are."""
    config = model.config.get_text_config(decoder=True)
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if model.device.type == "cpu" and shared and shared != heads and config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
