"""The card's figures can be measured again: other problems, few of them, compared with what the card says.

A figure of the card and its small twin are independent, so their difference has the variance of both. Each comparison
allows 4.5 standard errors (two-sided false alarm 7e-6 under the normal law; for shares the errors are those of the
card's value, so the twin cannot make its own limit wide). All is seeded: a failure means that something changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from decoder.demo.card import CARD
from decoder.demo.measure import Z, paired, ratio
from decoder.demo.pair import Pair, load_pair
from decoder.demo.simulation import FULL, LOSSLESS, Run, Setting, decode, fresh_problems

SEED, N = 577215, 150
SIGMAS = 4.5

Decoder = Callable[[Setting, float], Run]


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    return dict(json.loads(CARD.read_text()))


@pytest.fixture(scope="module")
def run() -> Decoder:
    """Decodes the same small set of problems at a setting and temperature; each only once."""
    torch.set_num_threads(1)
    pair: Pair = load_pair()
    problems = fresh_problems(SEED, N, "easy")
    done: dict[tuple[Setting, float], Run] = {}

    def at(setting: Setting, temperature: float) -> Run:
        if (setting, temperature) not in done:
            done[setting, temperature] = decode(pair, problems, setting, temperature=temperature)
        return done[setting, temperature]

    return at


def chosen(card: dict[str, Any]) -> Setting:
    return Setting(**card["setting_at_1_point"])


def sigmas_of_share(found: float, said: float, n_card: int) -> float:
    """How far a share of `N` is from the card's, in standard errors; at least one success and failure is assumed."""
    p = min(max(said, 1 / n_card), 1 - 1 / n_card)
    return abs(found - said) / float(np.sqrt(p * (1 - p) * (1 / N + 1 / n_card)))


def sigmas_of_mean(found: Any, said: float, interval: list[float]) -> float:
    """The same for an estimate with a normal interval."""
    error = np.hypot((found.high - found.low) / (2 * Z), (interval[1] - interval[0]) / (2 * Z))
    return abs(found.value - said) / float(error)


SHARES = [
    ("target_em_greedy", LOSSLESS, 0.0),
    ("target_em_t1", LOSSLESS, 1.0),
    ("draft_em_t1", FULL, 1.0),
]


@pytest.mark.parametrize(("key", "setting", "temperature"), SHARES, ids=[s[0] for s in SHARES])
def test_exact_match_is_what_the_card_says(
    card: dict[str, Any], run: Decoder, key: str, setting: Setting, temperature: float
) -> None:
    found = float(run(setting, temperature).exact.mean())
    assert sigmas_of_share(found, card[key], card["measured_on"]["problems"]) < SIGMAS


def test_the_strict_scorer_is_what_the_card_says(card: dict[str, Any], run: Decoder) -> None:
    found = float(run(LOSSLESS, 1.0).strict.mean())
    assert sigmas_of_share(found, card["strict_em_t1"], card["measured_on"]["problems"]) < SIGMAS


def test_acceptance_is_what_the_card_says(card: dict[str, Any], run: Decoder) -> None:
    found = ratio(run(LOSSLESS, 1.0))
    assert sigmas_of_mean(found, card["acceptance_t1"], card["intervals"]["acceptance_t1"]) < SIGMAS


def test_gain_and_loss_of_the_chosen_setting_are_what_the_card_says(card: dict[str, Any], run: Decoder) -> None:
    base, lenient = run(LOSSLESS, 1.0), run(chosen(card), 1.0)
    for key, found in (
        ("gain_at_1_point", ratio(lenient, base)),
        ("loss_at_1_point", paired(base.exact - lenient.exact)),
    ):
        assert sigmas_of_mean(found, card[key], card["intervals"][key]) < SIGMAS, key


def test_loss_of_full_leniency_is_what_the_card_says(card: dict[str, Any], run: Decoder) -> None:
    found = paired(run(LOSSLESS, 1.0).exact - run(FULL, 1.0).exact)
    said = card["full_leniency_loss"]
    assert sigmas_of_mean(found, said, card["intervals"]["full_leniency_loss"]) < SIGMAS
    assert found.low > 0.2  # leniency has something to lose


def test_figures_of_something_else_are_told_apart(card: dict[str, Any], run: Decoder) -> None:
    """Negative control: the draft for the target, the lossless rule for the chosen one, lenient text for lossless."""
    n = card["measured_on"]["problems"]
    draft, lenient = run(FULL, 1.0), run(chosen(card), 1.0)
    assert sigmas_of_share(float(draft.exact.mean()), card["target_em_t1"], n) > SIGMAS
    assert sigmas_of_share(float(lenient.strict.mean()), card["strict_em_t1"], n) > SIGMAS
    assert sigmas_of_mean(ratio(lenient), card["acceptance_t1"], card["intervals"]["acceptance_t1"]) > SIGMAS
