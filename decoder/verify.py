"""Verification of drafted blocks: accept, reject, residual, bonus, and the coupling. Pure functions on tensors.

Words. A row drafted ``width`` tokens ``x_j ~ q_j``; the target gave ``p_j`` for each of them and for one more
position. Token ``j`` is *examined* if all before it were accepted, and accepted iff ``u_j <= A(x_j)``. The first
rejected token is replaced by a draw from the *residual* ``(p_j - q_j)+``; if none is rejected, a *bonus* token is drawn
from the extra ``p``. Both branches are computed from the same uniforms: *lossless* uses ``A0(x) = min(1, p(x)/q(x))``,
*lenient* the rule's ``A >= A0``. They agree until the first *touch*, an examined token with ``A0(x) < u <= A(x)``,
which is at index ``lossless.accepted``. (Leviathan et al. 2023, Chen et al. 2023; `docs/mathematics.md` for rules and
coupling.)

Shapes: B rows, g drafted positions (the widest row's), V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.devices import send
from decoder.sampling import draw
from policies.rules import Rule, Scalars, accept_prob, lossless_accept

# Below this total variation float32 distributions are equal up to rounding: what is left of (p - q)+ is noise.
EQUAL_TV = 1e-6


class Block(NamedTuple):
    """Drafted tokens and what both models say about them.

    tokens int64 [B, g]; target_probs, target_raw float [B, g + 1, V]; draft_probs, draft_raw float [B, g, V], processed
    and raw as `sampling.process` gives them; widths int64 [B], how many of the g positions each row drafted (None:
    all).
    """

    tokens: Tensor
    target_probs: Tensor
    target_raw: Tensor
    draft_probs: Tensor
    draft_raw: Tensor
    widths: Tensor | None = None


class Branch(NamedTuple):
    """Outcome of a round: accepted int64 [B] in 0..width, and the token after them int64 [B] (residual or bonus)."""

    accepted: Tensor
    token: Tensor


class Verdict(NamedTuple):
    """Both branches of one round (one object when leniency is off), and the touches of the lenient one, bool [B, g]."""

    lossless: Branch
    lenient: Branch
    touch: Tensor
    scalars: Scalars


def verify(
    block: Block,
    rule: Rule | Sequence[Rule | None] | None,
    theta: Tensor | float,
    rho: Tensor | float,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
) -> Verdict:
    """Examine a block under ``rule`` (None: lossless; or one for each row) and, on the same numbers, losslessly.

    ``theta`` and ``rho`` in [0, 1] are numbers or tensors that broadcast to [B, g]. ``accept_uniforms`` [B, g] in
    (0, 1] (a 0 never accepts what has acceptance 0); ``residual_uniforms`` [B, g + 1] in [0, 1). At width 0 the bonus
    token is plain sampling from the target.
    """
    scalars = scalars_of(block)
    a0 = lossless_accept(scalars)
    passed = _passes(accept_uniforms, a0, block.widths)
    rules = {r.name: r for r in (rule if isinstance(rule, Sequence) else [rule]) if r is not None}
    rules.pop("lossless", None)
    if not rules:
        lossless = _branches(block, passed.unsqueeze(0), residual_uniforms)[0]
        return Verdict(lossless, lossless, torch.zeros_like(passed), scalars)
    accept = a0
    for name, one in rules.items():
        accept_one = accept_prob(one, scalars, theta, rho)
        if isinstance(rule, Sequence):
            its = send([r is not None and r.name == name for r in rule], a0.device)
            accept_one = torch.where(its.unsqueeze(-1), accept_one, accept)
        accept = accept_one
    passed_rule = _passes(accept_uniforms, accept, block.widths)
    lossless, lenient = _branches(block, torch.stack([passed, passed_rule]), residual_uniforms)
    examined = torch.arange(passed.shape[-1], device=passed.device) <= lenient.accepted.unsqueeze(-1)
    return Verdict(lossless, lenient, passed_rule & ~passed & examined, scalars)


def scalars_of(block: Block) -> Scalars:
    """What rules and telemetry need to know about each drafted token; every field is float [B, g]."""
    x = block.tokens.unsqueeze(-1)
    g = block.tokens.shape[-1]
    p, q = block.target_probs[:, :g], block.draft_probs
    p_raw, q_raw = block.target_raw[:, :g], block.draft_raw
    target_prob, draft_prob = p.gather(-1, x).squeeze(-1), q.gather(-1, x).squeeze(-1)
    same = block.target_raw is block.target_probs and block.draft_raw is block.draft_probs
    return Scalars(
        target_prob=target_prob,
        draft_prob=draft_prob,
        target_prob_raw=target_prob if same else p_raw.gather(-1, x).squeeze(-1),
        draft_prob_raw=draft_prob if same else q_raw.gather(-1, x).squeeze(-1),
        target_max_raw=p_raw.amax(-1),
        draft_max_raw=q_raw.amax(-1),
        tv=total_variation(p, q),
    )


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """``TV(p, q)`` of distributions [..., V], in [0, 1], shape [...]."""
    return (p - q).clamp_min(0).sum(-1).clamp_max(1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights [..., V] that replace a rejected token: ``(p - q)+``, or ``p`` where p and q are equal (within rounding).

    With q = 0 this is p itself, so a bonus token is the residual of a position where nothing was drafted.
    """
    rest = (p - q).clamp_min(0)
    return torch.where(rest.sum(-1, keepdim=True) > EQUAL_TV, rest, p)


def _passes(uniforms: Tensor, accept: Tensor, widths: Tensor | None) -> Tensor:
    """Whether each token would be accepted if examined, bool [B, g]; never one of acceptance 0 or beyond the width."""
    passed = (uniforms <= accept) & (accept > 0)
    if widths is not None:
        passed &= torch.arange(accept.shape[-1], device=accept.device) < widths[:, None]
    return passed


def _branches(block: Block, passed: Tensor, uniforms: Tensor) -> list[Branch]:
    """Accept up to the first token that does not pass, then draw the one after; for each of ``passed`` [K, B, g]."""
    rows, g = block.tokens.shape
    accepted = passed.long().cumprod(-1).sum(-1)
    row = torch.arange(rows, device=accepted.device)
    flat = (accepted + row * (g + 1)).flatten()
    p = block.target_probs.flatten(0, 1).index_select(0, flat)
    if g:
        # Nothing was drafted at the bonus position: q = 0, and the residual is p itself.
        drafted = accepted < (g if block.widths is None else block.widths)
        q = block.draft_probs.flatten(0, 1).index_select(0, (accepted.clamp_max(g - 1) + row * g).flatten())
        p = residual(p, q * drafted.flatten().unsqueeze(-1))
    tokens = draw(p, uniforms.flatten().index_select(0, flat)).view(accepted.shape)
    return [Branch(*outcome) for outcome in zip(accepted, tokens, strict=True)]
