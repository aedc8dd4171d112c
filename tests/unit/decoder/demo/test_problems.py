from __future__ import annotations

import hashlib
import random
import re

import pytest

from decoder.demo.problems import BOXES, NAMES, STYLES, THINGS, WORDS, final_answer, make_problem

# SHA-256 over 2,000 problems of each domain and style, from the generator that the bundled weights were trained with.
TRAINED_ON = "cf5348592ff8baa3be825c0828ddbdef2be3cf221b8f479b743bff295ca6f766"

CASES = [(domain, style) for domain in ("easy", "hard", "wide") for style in ("target", "draft")]


def digest(per_case: int = 2000) -> str:
    found = hashlib.sha256()
    for domain, style in CASES:
        rng = random.Random(f"{domain} {style}")
        for _ in range(per_case):
            p = make_problem(rng, domain, style)
            found.update(f"{p.prompt}|{p.solution}|{p.answer}\n".encode())
    return found.hexdigest()


def test_problems_are_those_the_weights_were_trained_on() -> None:
    """Any change to the order of draws would make the recipes in train.py produce other weights."""
    assert digest() == TRAINED_ON


@pytest.mark.parametrize(("domain", "style"), CASES)
def test_every_calculation_is_right_and_leads_to_the_answer(domain: str, style: str) -> None:
    rng = random.Random(1)
    for _ in range(300):
        problem = make_problem(rng, domain, style)
        sums = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.solution)
        assert sums
        for a, op, b, result in sums:
            x, y = int(a), int(b)
            exact = {"+": x + y, "-": x - y, "*": x * y, "/": x / y}
            assert exact[op] == int(result)
        assert int(sums[-1][3]) == problem.answer == final_answer(problem.solution)


def test_easy_problems_start_with_at_most_two_digits_and_hard_ones_with_three() -> None:
    rng = random.Random(2)
    for domain, low, high in (("easy", 5, 30), ("hard", 100, 600), ("wide", 100, 600)):
        starts = [int(re.search(r"\d+", make_problem(rng, domain).prompt)[0]) for _ in range(300)]
        assert low <= min(starts) < max(starts) <= high


def test_the_same_seed_gives_the_same_problem_and_another_seed_another() -> None:
    one, same, other = (make_problem(random.Random(seed)) for seed in (3, 3, 4))
    assert one == same != other


def test_style_changes_the_wording_of_solutions_only() -> None:
    """Same draws, other weights: the question and the answer stay."""
    for seed in range(50):
        target, draft = (make_problem(random.Random(seed), "easy", style) for style in STYLES)
        assert (target.prompt, target.answer) == (draft.prompt, draft.answer)
    assert target.solution != draft.solution


def test_no_wording_stands_for_two_things() -> None:
    """The strict scorer reads wordings off the text, so each must be unique and differ from names and things."""
    wordings = [w for options in WORDS.values() for w in options]
    assert len(wordings) == len(set(wordings)) == 4 * len(WORDS)
    assert not set(wordings) & {*NAMES, *THINGS, *BOXES}


@pytest.mark.parametrize(
    ("text", "number"),
    [(" The final answer is #### 42", 42), ("####7", 7), ("#### -3", -3), ("#### 1 #### 2", 1), ("answer 42", None)],
)
def test_final_answer_is_the_number_after_the_mark(text: str, number: int | None) -> None:
    assert final_answer(text) == number


def test_an_unknown_domain_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="medium"):
        make_problem(random.Random(0), "medium")  # type: ignore[arg-type]
