"""Pools that cannot fork: the arm a touched request got is the evidence, its label asked for by rule."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from controller.evidence import EvidenceBuffer
from controller.governor import Governor
from storage.records import QualityScore, RequestRecord
from tests.statistical.test_governor import DEMO, request, score

FORKLESS = dataclasses.replace(DEMO, fork_cold=0.0, fork_warm=0.0, max_loss=0.2, window_s=1000.0, label_deadline_s=20.0)


def served(key: str, *, held: bool, touches: int = 2, label: bool = True, seq: int = 1) -> RequestRecord:
    """A touched request of a pool without forks."""
    made = request(
        key, arm="holdback" if held else "lenient", touches=1 if held else touches, fork=False, fork_prob=0.0, seq=seq
    )
    return dataclasses.replace(made, label_drawn=label, label_prob=1.0)


def labelled(key: str, value: float) -> QualityScore:
    """The score of what was served."""
    return score(key, "served", value)


def settled(*, held: bool, value: float | None) -> tuple[float, int]:
    """(estimate, touches) of one request after its deadline."""
    buffer = EvidenceBuffer(10.0)
    buffer.add_request(served("a", held=held), 0, 0, 0.0)
    if value is not None:
        buffer.add_score(labelled("a", value), 1.0)
    (e,) = buffer.release(20.0)
    assert e.arms and e.weight == 1.0 and e.labelled == (value is not None)
    return e.total, e.touches


def test_each_arm_speaks_by_its_probability_around_the_guess() -> None:
    """Guess .95, holdback .1: a bad lenient answer costs .95, a bad held one gives 8.55 back."""
    assert settled(held=False, value=0.0) == (pytest.approx(0.95), 2)
    assert settled(held=True, value=0.0) == (pytest.approx(-8.55), 0)


def test_a_missing_label_counts_as_its_arms_worst() -> None:
    """Lenient: lost. Held back: it would have been right."""
    assert settled(held=False, value=None) == settled(held=False, value=0.0)
    assert settled(held=True, value=None) == settled(held=True, value=1.0)


def test_a_label_that_was_not_asked_for_is_no_evidence() -> None:
    """Whoever volunteers a label chose to; only coins count."""
    buffer = EvidenceBuffer(10.0)
    buffer.add_request(served("a", held=False, label=False), 0, 0, 0.0)
    buffer.add_score(labelled("a", 1.0), 1.0)
    assert len(buffer) == 0 and list(buffer.release(20.0)) == []


def test_a_judge_is_asked_for_the_served_branch_only() -> None:
    """And the state continues exactly, the guess with it."""
    buffer = EvidenceBuffer(10.0)
    buffer.add_request(served("a", held=True), 0, 0, 0.0)
    buffer.add_request(served("b", held=False), 0, 0, 1.0)
    assert [branches for _, branches, _, _ in buffer.missing(5)] == [("served",), ("served",)]
    buffer.add_score(labelled("a", 0.0), 2.0)
    list(buffer.release(3.0))
    again = EvidenceBuffer.from_state(json.loads(json.dumps(buffer.to_state())), 10.0)
    buffer.add_score(labelled("b", 0.0), 4.0)
    again.add_score(labelled("b", 0.0), 4.0)
    assert [e.total for e in buffer.release(5.0)] == [e.total for e in again.release(5.0)] != [0.95]


def play(
    rng: np.random.Generator, *, labels: bool, loss: float, ticks: int = 400, n: int = 40
) -> tuple[Governor, float]:
    """A fork-less pool of ``n`` requests a tick for one window and more; returns it and the largest true loss rate of a
    window over the policy's."""
    governor, now, lost = Governor(FORKLESS, "token_v3"), 0.0, []
    for i in range(ticks):
        now += 2.5
        allowance = governor.decide(now)
        tau = min(allowance.tau_allowed, 6.0)
        governor.leased(1, i + 1, tau)
        spent = 0.0
        for k, t in enumerate(rng.poisson(tau, n)):
            held = bool(rng.random() < allowance.holdback)
            chance = min(1.0, float(t) * loss)
            spent += chance * (not held)
            if not t:
                made = request(f"{i}-{k}", arm="untouched", touches=0, fork=False, fork_prob=0.0, seq=i + 1)
            else:
                made = served(f"{i}-{k}", held=held, touches=int(t), seq=i + 1)
            governor.observe_request(made, now)
            if labels and t:
                right = rng.random() < 0.95 * (1.0 if held else 1 - chance)
                governor.observe_score(labelled(f"{i}-{k}", float(right)), now)
        lost.append(spent)
    per_window = np.convolve(lost, np.ones(400), mode="valid").max() / (400 * n * FORKLESS.max_loss)
    return governor, float(per_window)


def test_a_pool_without_forks_is_measured_by_its_arms() -> None:
    """Harmless touches widen beyond the certified ones, and no window costs more than the budget."""
    governor, used = play(np.random.default_rng(1), labels=True, loss=0.005)
    allowance = governor.decide(1001.0)
    assert allowance.state == "measured" and allowance.tau_allowed > 2 * FORKLESS.planned_loss
    assert used < 1


def test_without_labels_it_stays_certified() -> None:
    """Nobody scores: each touch costs one, as before, and no alert says that labels have stopped."""
    governor, used = play(np.random.default_rng(2), labels=False, loss=1.0)
    allowance = governor.decide(1001.0)
    assert allowance.state != "uncertified" and used < 1
    assert allowance.tau_allowed <= FORKLESS.planned_loss + 1e-9


def test_harm_is_seen_by_the_arms_alone() -> None:
    """Every second touch loses the answer: the budget holds."""
    governor, used = play(np.random.default_rng(3), labels=True, loss=0.5)
    assert used < 1 and governor.decide(1001.0).tau_allowed < 4 * FORKLESS.planned_loss
