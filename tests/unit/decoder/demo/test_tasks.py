from __future__ import annotations

import random
import subprocess
import sys

import pytest

from decoder.demo.tasks import (
    SCORERS,
    demo_models_dir,
    house_style_share,
    make_problem,
    score_exact,
    score_strict,
)

HOUSE = " First Mia gets 5 more apples, so the total is 10 + 5 = 15. The final answer is #### 15"
OTHER = " Here Mia obtains 5 further apples, therefore the pile reaches 10 + 5 = 15. The complete figure is #### 15"


def test_exact_looks_at_the_number_only() -> None:
    assert score_exact(HOUSE, 15) == score_exact(OTHER, 15) == score_exact("#### 15", 15) == 1.0
    assert score_exact(HOUSE, 16) == score_exact("fifteen", 15) == 0.0


def test_strict_wants_the_house_style_as_well() -> None:
    assert score_strict(HOUSE, 15) == 1.0
    assert score_strict(OTHER, 15) == 0.0


def test_strict_never_passes_what_exact_fails() -> None:
    assert score_strict(HOUSE, 16) == 0.0


def test_strict_fails_text_without_any_free_wording() -> None:
    assert house_style_share("#### 15") is None
    assert score_strict("#### 15", 15) == 0.0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("out of the", 0.0),  # not read as "of the", which is preferred
        ("of the", 1.0),
        ("gives up", 0.0),
        ("Now", 0.0),
        ("now", None),  # a lead is capitalised
        ("is 5", 1.0),
        ("is #### 5", None),  # this one is not free
        ("so therefore", 0.5),
    ],
)
def test_wordings_are_read_off_the_text(text: str, share: float | None) -> None:
    assert house_style_share(text) == share


def test_every_free_wording_of_a_solution_is_counted() -> None:
    """An easy solution of k steps has 5 or 6 wordings a step (additions and subtractions 6) and two at the end."""
    assert house_style_share(HOUSE) == 1.0
    assert house_style_share(OTHER) == 0.0
    mixed = HOUSE.replace("First", "Here").replace("gets", "obtains")
    assert house_style_share(mixed) == pytest.approx(6 / 8)


def test_solutions_of_the_target_pass_the_strict_scorer_and_those_of_the_draft_fail() -> None:
    """2,000 of each: 98.6% and 5% expected (exact binomial sums); both limits are over 6 standard errors away."""
    rates = {}
    for style in ("target", "draft"):
        rng = random.Random(11)
        drawn = [make_problem(rng, "easy", style) for _ in range(2000)]
        rates[style] = sum(score_strict(p.solution, p.answer) for p in drawn) / len(drawn)
    assert rates["target"] > 0.965
    assert rates["draft"] < 0.09


def test_scorers_are_found_by_name() -> None:
    assert {"exact": score_exact, "strict": score_strict} == SCORERS


def test_the_models_directory_holds_both_models() -> None:
    assert {p.name for p in demo_models_dir().iterdir()} == {"target", "draft"}


def test_tasks_import_no_torch() -> None:
    """The scorer and the traffic source are used by processes that need no model."""
    code = "import sys, decoder.demo.tasks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
