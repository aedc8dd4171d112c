"""Accept rules as pure functions on arrays (NumPy arrays and torch tensors alike).

At one position the drafter proposed ``x ~ q``. A rule is an acceptance probability ``A(x)``; on rejection the token is
drawn from the residual ``(p - q)+ / TV(p, q)``, or from ``p`` where the residual is all zero.
``A0(x) = min(1, p(x)/q(x))`` is the lossless rule (Leviathan et al. 2023, Chen et al. 2023).

Every rule here is *completed*: ``A >= A0`` everywhere with the same residual, so that at every position
``E_q[A] - E_q[A0] = TV(emitted, p)``: a unit of drift buys exactly one unit of acceptance (`docs/mathematics.md`).
Every rule has one knob ``theta = 1/mu`` in [0, 1]; ``theta = 0`` is lossless by definition, 1 is as lenient as the rule
goes. A mixing weight ``rho`` in [0, 1] makes drift rise smoothly from zero: ``A = A0 + rho (A_theta - A0)``.

A hard-masked token (``target_prob_raw == 0``) is never accepted by any rule at any knob.

To add a rule, decorate one function with `register`; sweeps, tests and tables read `RULES`. Forms that are not
completed, as their papers published them, have a registry of their own (`policies.published`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

Array = Any  # a NumPy array or a torch tensor; all arguments of one call are of one kind and broadcast together

# Knobs that a sweep compares when a rule names none: from a little leniency to nearly all of it.
DEFAULT_KNOBS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)


class Scalars(NamedTuple):
    """What completed rules need to know about proposed tokens; arrays of one broadcastable shape, values in [0, 1].

    ``target_prob`` and ``draft_prob`` are ``p(x)`` and ``q(x)`` after temperature, top-k and top-p; ``tv`` is
    ``TV(p, q)`` of those distributions. The ``*_raw`` fields are taken before temperature but after hard masks, so that
    they still mean something when decoding greedily: ``p(x)``, ``q(x)``, ``max p`` and ``max q``.
    """

    target_prob: Array
    draft_prob: Array
    target_prob_raw: Array
    draft_prob_raw: Array
    target_max_raw: Array
    draft_max_raw: Array
    tv: Array


@dataclass(frozen=True)
class Rule:
    """A completed accept rule.

    ``lenient(scalars, theta, lossless)`` returns the rule's own acceptance probability; `accept_prob` completes it,
    mixes it, and applies the zero knob and the hard mask. ``draft_confidence`` marks rules that read only ``q`` or
    compare ``max q``: with a drafter that emits one token deterministically (one-hot ``q``) they would accept
    everything, and are refused with it. ``knobs`` are the values in (0, 1] that a sweep compares;
    those of the rules here spread drift from about .01 to all there is on the bundled pair at temperature 1.
    """

    completed: ClassVar[bool] = True

    name: str
    source: str
    lenient: Callable[[Scalars, Array, Array], Array]
    draft_confidence: bool = False
    knobs: tuple[float, ...] = DEFAULT_KNOBS


RULES: dict[str, Rule] = {}


def register(
    name: str, source: str, *, draft_confidence: bool = False, knobs: tuple[float, ...] = DEFAULT_KNOBS
) -> Callable[..., Any]:
    """Add a rule to the registry under ``name`` (a decorator); raises ValueError if the name is taken."""

    def add(lenient: Callable[[Scalars, Array, Array], Array]) -> Callable[[Scalars, Array, Array], Array]:
        if name in RULES:
            raise ValueError(f"rule {name!r} is already registered")
        RULES[name] = Rule(name, source, lenient, draft_confidence, knobs)
        return lenient

    return add


def get_rule(name: str) -> Rule:
    """The rule of that name; raises ValueError that lists the names there are."""
    try:
        return RULES[name]
    except KeyError:
        raise ValueError(f"unknown accept rule {name!r}; known: {', '.join(sorted(RULES))}") from None


def lossless_accept(s: Scalars) -> Array:
    """``A0(x) = min(1, p(x)/q(x))``, in [0, 1]; 0 where the target's probability is 0, also for ``q(x) = 0``."""
    xp = namespace(s.target_prob)
    q = s.draft_prob
    ratio = s.target_prob / xp.where(q > 0, q, xp.ones_like(q))
    a0 = xp.where(q > 0, xp.clip(ratio, 0.0, 1.0), xp.where(s.target_prob > 0, xp.ones_like(q), xp.zeros_like(q)))
    return xp.where(s.target_prob_raw > 0, a0, xp.zeros_like(a0))


def accept_prob(rule: Rule, s: Scalars, theta: Array | float, rho: Array | float = 1.0) -> Array:
    """Completed acceptance probability ``A(x)`` of ``rule`` at knob ``theta`` and mixing weight ``rho``.

    ``theta`` and ``rho`` are scalars or arrays in [0, 1] that broadcast against the scalars (a leading axis of knobs
    evaluates a whole curve at once). Returns values in ``[A0, 1]``; exactly ``A0`` where either of them is 0.
    """
    xp = namespace(s.target_prob)
    a0 = lossless_accept(s)
    theta = _like(xp, theta, a0)
    rho = _like(xp, rho, a0)
    full = xp.maximum(rule.lenient(s, theta, a0), a0)
    mixed = xp.where(rho >= 1, full, xp.clip(a0 + rho * (full - a0), 0.0, 1.0))
    on = (theta > 0) & (rho > 0) & (s.target_prob_raw > 0)
    return xp.where(on, xp.maximum(mixed, a0), a0)


def _certain(test: Array, a0: Array) -> Array:
    """1 where ``test`` holds, the lossless acceptance elsewhere: how the deferral rules are completed."""
    xp = namespace(a0)
    return xp.where(test, xp.ones_like(a0), a0)


@register("lossless", "Leviathan et al. 2023; Chen et al. 2023", knobs=())
def _lossless(s: Scalars, theta: Array, a0: Array) -> Array:
    return a0


@register("threshold", "case study Eq. 12, completed", knobs=(0.45, 0.5, 0.6, 0.8, 0.85, 0.95))
def _threshold(s: Scalars, theta: Array, a0: Array) -> Array:
    return _certain(s.target_prob >= (1 - theta) * s.draft_prob, a0)


@register("forgive", "case study Eq. 6", knobs=(0.05, 0.1, 0.2, 0.4, 0.6, 0.8))
def _forgive(s: Scalars, theta: Array, a0: Array) -> Array:
    # (p + theta (q - p)+) / q: the emitted law is exactly (1 - theta) p + theta q.
    return a0 + theta * (1 - a0)


@register("lenience", "Leviathan et al. 2023, A.5, with l = 1 - 1/l_paper", knobs=(0.2, 0.4, 0.6, 0.7, 0.8, 0.9))
def _lenience(s: Scalars, theta: Array, a0: Array) -> Array:
    xp = namespace(a0)
    scaled = (1 - theta) * s.draft_prob
    return xp.where(s.target_prob >= scaled, xp.ones_like(a0), s.target_prob / xp.where(scaled > 0, scaled, 1.0))


@register("chow", "Narasimhan et al. 2025, Eq. 2", draft_confidence=True, knobs=(0.1, 0.2, 0.4, 0.5, 0.6, 0.8))
def _chow(s: Scalars, theta: Array, a0: Array) -> Array:
    return _certain(s.draft_max_raw >= 1 - theta, a0)


@register("diff", "Narasimhan et al. 2025, Eq. 5", draft_confidence=True, knobs=(0.01, 0.02, 0.05, 0.2, 0.4, 0.7))
def _diff(s: Scalars, theta: Array, a0: Array) -> Array:
    return _certain(s.draft_max_raw >= s.target_max_raw - theta, a0)


@register("opt", "Narasimhan et al. 2025, Eq. 10", draft_confidence=True, knobs=(0.01, 0.02, 0.05, 0.1, 0.4, 0.8))
def _opt(s: Scalars, theta: Array, a0: Array) -> Array:
    return _certain(s.draft_max_raw >= s.target_max_raw - theta * s.tv, a0)


@register("token_v1", "Narasimhan et al. 2025, Eq. 13", draft_confidence=True, knobs=(0.01, 0.02, 0.05, 0.2, 0.5, 0.9))
def _token_v1(s: Scalars, theta: Array, a0: Array) -> Array:
    return _certain(s.draft_prob_raw >= s.target_max_raw - theta, a0)


@register("token_v2", "Narasimhan et al. 2025, Eq. 14", knobs=(0.3, 0.33, 0.36, 0.4, 0.6, 0.9))
def _token_v2(s: Scalars, theta: Array, a0: Array) -> Array:
    return _certain(s.target_prob_raw >= s.target_max_raw - theta, a0)


@register("token_v3", "Narasimhan et al. 2025, Eq. 15", knobs=(0.65, 0.7, 0.75, 0.8, 0.85, 0.95))
def _token_v3(s: Scalars, theta: Array, a0: Array) -> Array:
    return _certain(s.target_prob_raw >= (1 - theta) * s.target_max_raw, a0)


def confidence_threshold(theta: float) -> float:
    """The confidence from which a cascade believes a whole draft answer at the knob ``theta`` in [0, 1]."""
    return 1.0 - theta


def theta_of_confidence(threshold: float) -> float:
    """The knob at which answers of this confidence are just believed; 0 above every confidence."""
    return min(1.0, max(0.0, 1.0 - threshold))


def namespace(a: Array) -> Any:
    """The module (numpy or torch) that ``a`` belongs to; torch is never imported here, only looked up."""
    name = "torch" if type(a).__module__.partition(".")[0] == "torch" else "numpy"
    return sys.modules[name]


def _like(xp: Any, value: Array | float, reference: Array) -> Array:
    """``value`` as an array of the same kind, precision and device as ``reference``."""
    if xp.__name__ == "torch":
        return xp.as_tensor(value, dtype=reference.dtype, device=reference.device)
    return xp.asarray(value, dtype=reference.dtype)
