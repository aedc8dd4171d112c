from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from decoder.demo.card import CARD, MEANING, README, REQUIRED, card_text, readme, unmet, weights
from decoder.demo.tasks import HOUSE_STYLE_SHARE, demo_models_dir
from decoder.demo.train import RECIPES


@pytest.fixture
def card() -> dict[str, Any]:
    return dict(json.loads(CARD.read_text()))


def test_the_card_meets_every_requirement(card: dict[str, Any]) -> None:
    assert unmet(card) == []


@pytest.mark.parametrize(("key", "low", "high"), REQUIRED)
def test_a_figure_outside_its_range_is_reported(card: dict[str, Any], key: str, low: float, high: float) -> None:
    for value in (low - 0.001, high + 0.001):
        assert key in unmet({**card, key: value})[0]


def test_the_readme_shows_the_figures_of_the_card(card: dict[str, Any]) -> None:
    """Run `python -m decoder.demo.card` when this fails after a new measurement."""
    assert README.read_text() == readme(card)


def test_every_figure_of_the_card_can_be_read_off_the_readme(card: dict[str, Any]) -> None:
    """Independent of the renderer: the row of a key shows the value that card.json has."""
    shown = dict(re.findall(r"^\|[^|]*\| (-?[\d.]+) \|[^|]*\| `(\w+)` \|$", README.read_text(), re.M))
    shown = {key: float(value) for value, key in shown.items()}
    assert shown == {key: card[key] for key in MEANING}


def test_another_figure_gives_another_readme(card: dict[str, Any]) -> None:
    changed = copy.deepcopy(card)
    changed["target_em_t1"] -= 0.01
    assert readme(changed) != README.read_text()


def test_every_value_lies_in_its_interval(card: dict[str, Any]) -> None:
    assert set(card["intervals"]) == set(MEANING)
    for key, (low, high) in card["intervals"].items():
        assert low <= card[key] <= high


def test_the_card_describes_the_weights_recipes_and_scorer_that_are_here(card: dict[str, Any]) -> None:
    for name in ("target", "draft"):
        assert card["weights"][name] == weights(demo_models_dir() / name / "model.safetensors")
    assert card["training"] == {recipe.name: asdict(recipe) for recipe in RECIPES}
    assert card["house_style_share"] == HOUSE_STYLE_SHARE


def test_card_text_is_the_card_as_json(card: dict[str, Any]) -> None:
    assert json.loads(card_text(card)) == card
    assert CARD.read_text() == card_text(card)


def test_lossless_output_passes_the_strict_scorer_nearly_as_often_as_the_exact_one(card: dict[str, Any]) -> None:
    """The scorer costs lossless output at most two points, and most of what full wording leniency lets through."""
    rows = {(r["domain"], r["temperature"], r["rule"], r["theta"]): r for r in card["fresh"]}
    for domain in ("easy", "hard"):
        for temperature in (0.0, 1.0):
            row = rows[domain, temperature, "lossless", 0.0]
            assert row["exact"][0] - row["strict"][0] <= 0.02
    assert rows["easy", 1.0, "token_v3", 0.8]["strict"][0] < 0.25


def test_the_hard_domain_is_harder_for_the_draft_only(card: dict[str, Any]) -> None:
    assert card["hard_target_em_t1"] > 0.85
    assert card["hard_draft_em_t1"] < 0.05
    assert card["hard_acceptance_t1"] < card["acceptance_t1"] - 0.05
