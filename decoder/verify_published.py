"""Verification of drafted blocks under a published form, with the coupling: the counterpart of `decoder.verify.verify`.

A published form is not completed: it may reject what lossless verification accepts, and replace by other weights. So
both outcomes are computed at every step from the same numbers, and a touch is an examined position where they differ,
be it in acceptance or in the token that comes out. Up to the first one both branches are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.sampling import draw
from decoder.verify import Block, Branch, Verdict, scalars_of
from policies.published import Laws, Outcome, Published, examine
from policies.rules import get_rule


def verify_published(
    block: Block, form: Published, theta: float, accept_uniforms: Tensor, residual_uniforms: Tensor
) -> Verdict:
    """Examine a block under ``form`` at knob ``theta`` in [0, 1] and, on the same numbers, losslessly.

    Uniforms as in `decoder.verify.verify`. The token after a wholly accepted block is drawn from the target.
    """
    g = block.tokens.shape[-1]
    laws = Laws(block.target_probs[:, :g], block.draft_probs, block.target_raw[:, :g], block.draft_raw)
    steps = []
    for outcome in (examine(get_rule("lossless"), laws, 0.0), examine(form, laws, theta)):
        passed = _passes(outcome, block, accept_uniforms)
        replaced = draw(outcome.residual, residual_uniforms[:, :g]) if g else block.tokens
        steps.append((passed, torch.where(passed, block.tokens, replaced), replaced))
    (passed0, token0, _), (passed, token, _) = steps
    lossless, published = (_branch(block, one, replaced, residual_uniforms) for one, _, replaced in steps)
    place = torch.arange(g, device=block.tokens.device)
    examined = place <= published.accepted[:, None]
    if block.widths is not None:
        examined &= place < block.widths[:, None]
    touch = examined & ((passed != passed0) | (token != token0))
    return Verdict(lossless, published, touch, scalars_of(block))


def _passes(outcome: Outcome, block: Block, uniforms: Tensor) -> Tensor:
    """Whether each token would be accepted if examined, bool [B, g]."""
    accept = outcome.accept.gather(-1, block.tokens.unsqueeze(-1)).squeeze(-1)
    return (uniforms <= accept) & (accept > 0)


def _branch(block: Block, passed: Tensor, replaced: Tensor, uniforms: Tensor) -> Branch:
    """Accept up to the first token that does not pass; then its replacement, or a bonus token after the last."""
    rows = torch.arange(len(passed), device=passed.device)
    g = passed.shape[-1]
    if block.widths is not None:
        passed = passed & (torch.arange(g, device=passed.device) < block.widths[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)
    bonus = draw(block.target_probs[rows, accepted], uniforms[rows, accepted])
    if not g:
        return Branch(accepted, bonus)
    whole = accepted >= (g if block.widths is None else block.widths)
    return Branch(accepted, torch.where(whole, bonus, replaced[rows, accepted.clamp_max(g - 1)]))
