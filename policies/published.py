"""Accept rules as their papers published them, which are not completed; for comparison, sweeps and tests.

Completed rules (`policies.rules`) need a few numbers about the proposed token. These forms need the whole distributions
``p`` and ``q`` of a position, and say for every token how likely it is accepted and by which weights a rejected one is
replaced. Both together give the emitted law exactly (`emitted`).

The cascades of Narasimhan et al. 2025 choose a law ``pi(v) = q(v) 1[ok(v)] + R p(v)``, with ``R`` the mass that ``q``
has on tokens that are not ok, and verify the draft losslessly against it: accept with probability ``min(1, pi/q)``,
replace by a draw from ``(pi - q)+``. So ``pi`` comes out. Where ``ok`` depends on the token they reject more than
lossless verification does, and drift even when nothing extra is accepted. Where it does not (`chow`, `diff`, `opt`),
``pi`` is ``p`` or ``q`` and the form is the completed rule, except at knob 0, where it does what its formula says.

*Lossy speculative sampling* (Tran-Thien 2023; Narasimhan et al. 2025, Table 1) accepts with probability
``min(1, p/((1 - alpha) q))`` and replaces by ``(p/beta - q)+``. With ``beta = 1`` it is the completed `lenience`, with
``beta = 1 - alpha`` Leviathan et al. A.5 read as "multiply q wherever Algorithm 1 has it", and with the one ``beta`` at
which nothing needs to be normalised it emits ``max(min(q, p/(1 - alpha)), p/beta)``.

NumPy arrays and torch tensors alike. A token that a hard mask excludes (``target_raw == 0``) is never accepted.
To add a form, decorate one function with `register_published`; sweeps, tests and tables read `PUBLISHED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from policies.rules import DEFAULT_KNOBS, RULES, Array, Rule, Scalars, accept_prob, get_rule, namespace


class Laws(NamedTuple):
    """The distributions of one or more positions, each [..., V]: processed (``p``, ``q``) and before temperature."""

    target_probs: Array
    draft_probs: Array
    target_raw: Array
    draft_raw: Array


class Outcome(NamedTuple):
    """What a rule does with any token: acceptance [..., V] in [0, 1], and weights [..., V] that replace a rejected one.

    Weights are not normalised; each row has a positive one.
    """

    accept: Array
    residual: Array


@dataclass(frozen=True)
class Published:
    """A rule as published. ``examine(laws, theta)`` gives its `Outcome` at a knob in [0, 1].

    ``completion`` names the completed rule that was made of it, whose knobs a sweep takes unless told others. ``same``
    says that the two are one and the same at any knob above 0, so that a sweep need not measure both.
    """

    completed: ClassVar[bool] = False

    name: str
    source: str
    examine: Callable[[Laws, float], Outcome]
    completion: str
    same: bool = False
    draft_confidence: bool = False
    knobs: tuple[float, ...] = DEFAULT_KNOBS


Form = Rule | Published

PUBLISHED: dict[str, Published] = {}


def register_published(
    name: str,
    source: str,
    *,
    completion: str,
    same: bool = False,
    draft_confidence: bool = False,
    knobs: tuple[float, ...] | None = None,
) -> Callable[..., Any]:
    """Add a published form under ``name`` (a decorator).

    Raises ValueError if the name is taken, also by a rule, or if there is no rule of the name ``completion``.
    """

    def add(examine: Callable[[Laws, float], Outcome]) -> Callable[[Laws, float], Outcome]:
        if name in PUBLISHED or name in RULES:
            raise ValueError(f"rule {name!r} is already registered")
        swept = get_rule(completion).knobs if knobs is None else knobs
        PUBLISHED[name] = Published(name, source, examine, completion, same, draft_confidence, swept)
        return examine

    return add


def all_forms() -> dict[str, Form]:
    """Every completed rule and every published form by name, the lossless rule first."""
    return {**RULES, **PUBLISHED}


def get_form(name: str) -> Form:
    """The rule or published form of that name; raises ValueError that lists the names there are."""
    forms = all_forms()
    if name not in forms:
        raise ValueError(f"unknown rule {name!r}; known: {', '.join(sorted(forms))}")
    return forms[name]


def examine(form: Form, laws: Laws, theta: float, rho: float = 1.0) -> Outcome:
    """What ``form`` does with every token at a knob ``theta`` in [0, 1]; the mixing weight is for completed rules only.

    Raises ValueError for a knob out of range, or a published form with ``rho`` other than 1.
    """
    if not (0 <= theta <= 1 and 0 <= rho <= 1):
        raise ValueError(f"theta and rho must lie in [0, 1], not {theta!r} and {rho!r}")
    if isinstance(form, Rule):
        weights = _or_target(_positive(laws.target_probs - laws.draft_probs), laws)
        return Outcome(accept_prob(form, scalars_of_every_token(laws), theta, rho), weights)
    if rho != 1:
        raise ValueError(f"{form.name} has no mixing weight")
    accept, weights = form.examine(laws, theta)
    xp = namespace(accept)
    return Outcome(xp.where(laws.target_raw > 0, accept, xp.zeros_like(accept)), weights)


def emitted(outcome: Outcome, draft_probs: Array) -> Array:
    """The law [..., V] of the token that comes out of one examined position whose proposal was drawn from ``q``."""
    accepted = draft_probs * outcome.accept
    rejected = 1 - accepted.sum(axis=-1, keepdims=True)
    return accepted + rejected * outcome.residual / outcome.residual.sum(axis=-1, keepdims=True)


def drift(outcome: Outcome, laws: Laws) -> Array:
    """Total variation [...] between what comes out and the target's law."""
    return abs(emitted(outcome, laws.draft_probs) - laws.target_probs).sum(axis=-1) / 2


def scalars_of_every_token(laws: Laws) -> Scalars:
    """The scalars of every token of the vocabulary as if it had been proposed: [..., V], maxima and TV [..., 1]."""
    p, q, p_raw, q_raw = laws
    xp = namespace(p)
    tv = _positive(p - q).sum(axis=-1, keepdims=True)
    highest = [xp.amax(a, axis=-1, keepdims=True) for a in (p_raw, q_raw)]
    return Scalars(p, q, p_raw, q_raw, highest[0], highest[1], tv)


def against(pi: Array, laws: Laws) -> Outcome:
    """Lossless verification against another law ``pi`` [..., V] than the target's; ``pi`` is what comes out."""
    q, xp = laws.draft_probs, namespace(pi)
    ratio = pi / xp.where(q > 0, q, xp.ones_like(q))
    accept = xp.where(q > 0, xp.clip(ratio, 0.0, 1.0), xp.where(pi > 0, xp.ones_like(pi), xp.zeros_like(pi)))
    return Outcome(accept, _or_target(_positive(pi - q), laws))


def trusting(ok: Array, laws: Laws) -> Outcome:
    """Verification against ``q`` on the tokens that are ok (bool [..., V]) and ``p`` for the mass of the others."""
    p, q = laws.target_probs, laws.draft_probs
    xp = namespace(q)
    trusted = xp.where(ok & (laws.target_raw > 0), q, xp.zeros_like(q))
    return against(trusted + (q - trusted).sum(axis=-1, keepdims=True) * p, laws)


def lossy(laws: Laws, alpha: float, beta: Array | float) -> Outcome:
    """Lossy speculative sampling: accept by ``min(1, p/((1 - alpha) q))``, replace by ``(p/beta - q)+``.

    ``alpha`` in [0, 1], ``beta > 0`` a number or an array [..., 1]. (0, 1) is lossless; at alpha = 1 everything that is
    not masked is accepted.
    """
    p, q = laws.target_probs, laws.draft_probs
    return Outcome(_lossy_accept(laws, alpha), _or_target(_positive(p / beta - q), laws))


def matching_beta(laws: Laws, alpha: float) -> Array:
    """The ``beta >= 1`` [..., 1] at which ``(p/beta - q)+`` has exactly the mass of the rejected tokens.

    With tokens ordered by ``q/p``, ``sum (s p - q)+`` is the largest of ``s P_k - Q_k`` over the sums of the first k,
    so the ``s = 1/beta`` at which it is ``R`` is the smallest ``(R + Q_k) / P_k``. Infinite where nothing is rejected
    and ``q`` is 0 somewhere that ``p`` is not.
    """
    p, q = laws.target_probs, laws.draft_probs
    xp = namespace(p)
    rejected = 1 - (q * _lossy_accept(laws, alpha)).sum(axis=-1, keepdims=True)
    order = xp.argsort(xp.where(p > 0, q / xp.where(p > 0, p, xp.ones_like(p)), xp.full_like(p, float("inf"))))
    take = xp.take_along_dim if xp.__name__ == "torch" else xp.take_along_axis
    p_sums, q_sums = (xp.cumsum(take(a, order, -1), -1) for a in (p, q))
    scale = xp.amin((xp.clip(rejected, 0.0, 1.0) + q_sums) / p_sums, axis=-1, keepdims=True)
    scale = xp.clip(scale, 0.0, 1.0)
    return xp.where(scale > 0, 1 / xp.where(scale > 0, scale, xp.ones_like(scale)), xp.full_like(scale, float("inf")))


def _lossy_accept(laws: Laws, alpha: float) -> Array:
    p, q = laws.target_probs, laws.draft_probs
    xp = namespace(p)
    scaled = (1 - alpha) * q
    accept = xp.where(p >= scaled, xp.ones_like(p), p / xp.where(scaled > 0, scaled, xp.ones_like(scaled)))
    return xp.where(laws.target_raw > 0, accept, xp.zeros_like(accept))


def _positive(a: Array) -> Array:
    xp = namespace(a)
    return xp.where(a > 0, a, xp.zeros_like(a))


def _or_target(weights: Array, laws: Laws) -> Array:
    """The weights, or the target's law where they are all zero (then nothing is rejected, up to rounding)."""
    return namespace(weights).where(weights.sum(axis=-1, keepdims=True) > 0, weights, laws.target_probs)


def _highest(raw: Array) -> Array:
    return namespace(raw).amax(raw, axis=-1, keepdims=True)


@register_published("chow_paper", "Narasimhan et al. 2025, Eq. 2", completion="chow", same=True, draft_confidence=True)
def _chow(laws: Laws, theta: float) -> Outcome:
    return trusting(_highest(laws.draft_raw) >= 1 - theta, laws)


@register_published("diff_paper", "Narasimhan et al. 2025, Eq. 5", completion="diff", same=True, draft_confidence=True)
def _diff(laws: Laws, theta: float) -> Outcome:
    return trusting(_highest(laws.draft_raw) >= _highest(laws.target_raw) - theta, laws)


@register_published("opt_paper", "Narasimhan et al. 2025, Eq. 10", completion="opt", same=True, draft_confidence=True)
def _opt(laws: Laws, theta: float) -> Outcome:
    tv = _positive(laws.target_probs - laws.draft_probs).sum(axis=-1, keepdims=True)
    return trusting(_highest(laws.draft_raw) >= _highest(laws.target_raw) - theta * tv, laws)


@register_published("token_v1_paper", "Narasimhan et al. 2025, Eq. 13", completion="token_v1", draft_confidence=True)
def _token_v1(laws: Laws, theta: float) -> Outcome:
    return trusting(laws.draft_raw >= _highest(laws.target_raw) - theta, laws)


@register_published("token_v2_paper", "Narasimhan et al. 2025, Eq. 14", completion="token_v2")
def _token_v2(laws: Laws, theta: float) -> Outcome:
    return trusting(laws.target_raw >= _highest(laws.target_raw) - theta, laws)


@register_published("token_v3_paper", "Narasimhan et al. 2025, Eq. 15", completion="token_v3")
def _token_v3(laws: Laws, theta: float) -> Outcome:
    return trusting(laws.target_raw >= (1 - theta) * _highest(laws.target_raw), laws)


@register_published(
    "lenience_paper", "Leviathan et al. 2023, A.5, with l = 1 - theta throughout", completion="lenience"
)
def _lenience(laws: Laws, theta: float) -> Outcome:
    # beta = 1 - alpha; multiplied by it, so that alpha = 1 needs no division
    rest = _positive(laws.target_probs - (1 - theta) * laws.draft_probs)
    return Outcome(_lossy_accept(laws, theta), _or_target(rest, laws))


@register_published("lossy_paper", "Tran-Thien 2023; Narasimhan et al. 2025, Table 1", completion="lenience")
def _lossy(laws: Laws, theta: float) -> Outcome:
    return lossy(laws, theta, matching_beta(laws, theta))
