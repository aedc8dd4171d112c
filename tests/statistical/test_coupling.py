"""The identities of the accept rules and the coupling bound, on what the bundled pair really does.

`docs/mathematics.md`: a unit of drift buys a unit of acceptance; `forgive` emits a mixture; a touch happens with the
probability that the drift says; and the loss of leniency is at most the share of touched requests.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from decoder.demo.tasks import score_exact
from decoder.generate import Completion, Knobs
from policies.rules import RULES, Scalars, accept_prob, get_rule, lossless_accept
from storage.records import EXAMINED, TOUCH
from tests.decoding import Rounds, engine, pair, problems, prompts, run

REQUESTS = 40
KNOBS = [("threshold", 0.8), ("token_v3", 0.8), ("forgive", 0.1)]


# -- identities of one position ----------------------------------------------------------------------------------------


@cache
@torch.inference_mode()
def real_laws() -> tuple[np.ndarray, np.ndarray]:
    """Distributions of target and draft [n, V] at every position of a few sampled answers, in double precision."""
    out: list[list[torch.Tensor]] = [[], []]
    for seed, prompt in enumerate(prompts(4)):
        text = torch.tensor([[*prompt, *run(engine(), prompt, Knobs.lossless(4), seed=seed).token_ids]])
        for laws, model in zip(out, pair()[:2], strict=True):
            laws.append(model(text).logits[0, len(prompt) - 1 : -1].double().softmax(-1))
    p, q = (torch.cat(laws).numpy() for laws in out)
    return p, q


def everywhere(p: np.ndarray, q: np.ndarray) -> Scalars:
    """The scalars of every token of the vocabulary as if it had been proposed, [n, V]."""
    shape = np.ones_like(p)
    tv = np.maximum(p - q, 0).sum(-1, keepdims=True)
    return Scalars(p, q, p, q, shape * p.max(-1, keepdims=True), shape * q.max(-1, keepdims=True), shape * tv)


def emitted(p: np.ndarray, q: np.ndarray, a: np.ndarray) -> np.ndarray:
    rest = np.maximum(p - q, 0)
    return q * a + (1 - (q * a).sum(-1, keepdims=True)) * rest / rest.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize(("theta", "rho"), [(0.3, 1.0), (0.8, 1.0), (0.8, 0.5), (1.0, 1.0)])
def test_acceptance_gained_equals_drift_at_every_real_position(name: str, theta: float, rho: float) -> None:
    p, q = real_laws()
    s = everywhere(p, q)
    a, a0 = accept_prob(get_rule(name), s, theta, rho), lossless_accept(s)
    drift = np.abs(emitted(p, q, a) - p).sum(-1) / 2
    assert len(p) > 200 and np.allclose((q * (a - a0)).sum(-1), drift, atol=1e-9)


@pytest.mark.parametrize("theta", [0.05, 0.4, 1.0])
def test_forgive_emits_the_mixture_at_every_real_position(theta: float) -> None:
    p, q = real_laws()
    law = emitted(p, q, accept_prob(get_rule("forgive"), everywhere(p, q), theta))
    assert np.allclose(law, (1 - theta) * p + theta * q, atol=1e-9)


# -- touches of whole requests -----------------------------------------------------------------------------------------


@cache
def served(rule: str, theta: float) -> tuple[list[Completion], list[Rounds]]:
    """The same requests with the same seeds under a rule."""
    done, traces = [], []
    for seed, prompt in enumerate(prompts(REQUESTS)):
        traces.append(Rounds())
        done.append(run(engine(), prompt, Knobs(g=4, rule=rule, theta=theta), traces[-1], seed=seed))
    return done, traces


def touch_z(rule: str, theta: float, claimed: float) -> float:
    """Touches minus what the rule at the ``claimed`` knob says, in standard deviations.

    Given an examined token, it is a touch with probability (A - A0)(x), whatever happened before: the sum of the
    differences is a martingale, and its variance is known.
    """
    surplus = variance = 0.0
    for t in (trace for rounds in served(rule, theta)[1] for trace in rounds):
        s = Scalars(**{name: getattr(t, name).astype(float) for name in Scalars._fields})
        gain = accept_prob(get_rule(rule), s, claimed) - lossless_accept(s)
        examined = (t.flags & EXAMINED) > 0
        surplus += float((((t.flags & TOUCH) > 0) - gain)[examined].sum())
        variance += float((gain * (1 - gain))[examined].sum())
    return surplus / math.sqrt(variance)


@pytest.mark.parametrize(("rule", "theta"), KNOBS)
def test_tokens_are_touched_as_often_as_the_rule_says(rule: str, theta: float) -> None:
    """Within 4 standard deviations; chance to fail 6e-5 each."""
    assert abs(touch_z(rule, theta, theta)) < 4


def test_touches_of_another_knob_are_told_apart() -> None:
    """Negative control."""
    assert abs(touch_z("token_v3", 0.8, 0.4)) > 6


@pytest.mark.parametrize(("rule", "theta"), KNOBS)
def test_loss_is_at_most_the_share_of_touched_requests_and_comes_from_them_alone(rule: str, theta: float) -> None:
    """No chance to fail: under the coupling this holds for every sample."""
    plain, lenient = served("lossless", 0.0)[0], served(rule, theta)[0]
    decode = pair().tokenizer.decode
    loss, touched = 0.0, 0
    for problem, exact, other in zip(problems(REQUESTS), plain, lenient, strict=True):
        difference = score_exact(decode(exact.token_ids), problem.answer)
        difference -= score_exact(decode(other.token_ids), problem.answer)
        if other.arm == "untouched":
            assert exact.token_ids == other.token_ids
        touched += other.arm != "untouched"
        loss += difference
    mean_touches = sum(c.touches for c in lenient) / REQUESTS
    assert touched > 0 and loss / REQUESTS <= touched / REQUESTS <= mean_touches


def test_leniency_saves_target_passes() -> None:
    def passes_per_token(rule: str, theta: float) -> float:
        done = served(rule, theta)[0]
        return sum(c.target_passes for c in done) / sum(len(c.token_ids) for c in done)

    assert passes_per_token("token_v3", 0.8) < 0.9 * passes_per_token("lossless", 0.0)
