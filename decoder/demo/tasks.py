"""What the bundled pair is asked to do, and how its answers are scored. No torch here.

Two scorers read the same text. ``exact`` looks at the final number only, so wording is free. ``strict`` also wants the
house style: most free wordings must be among the two that the target prefers. Lossless output is nearly always in the
house style; leniency lets the draft's wordings through, so switching the scorer is a quality regression that only
lenient decoding suffers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from decoder.demo.problems import WORDS, Problem, final_answer, make_problem

__all__ = [
    "HOUSE_STYLE_SHARE",
    "SCORERS",
    "SCORER_VERSION",
    "Problem",
    "demo_models_dir",
    "final_answer",
    "house_style_share",
    "make_problem",
    "score_exact",
    "score_strict",
]

SCORER_VERSION = "1"

# At least this share of the free wordings must be preferred ones. Lossless output has .75 of them, the draft .25;
# one half separates them on as few as eight wordings (a one-step solution). Measured effect: `decoder/demo/README.md`.
HOUSE_STYLE_SHARE = 0.5

_PREFERRED = {wording: rank < 2 for options in WORDS.values() for rank, wording in enumerate(options)}
# Longer wordings first, so that "out of the" is not read as "of the"; the "is" before "####" is not a free one.
_WORDING = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, _PREFERRED), key=len, reverse=True)) + r")\b(?! ####)")


def demo_models_dir() -> Path:
    """The directory that holds ``target/`` (with the tokenizer of both) and ``draft/``."""
    return Path(__file__).parent / "models"


def house_style_share(text: str) -> float | None:
    """Share of the free wordings in ``text`` that are among the target's two preferred ones; None if there are none."""
    found = _WORDING.findall(text)
    return sum(_PREFERRED[w] for w in found) / len(found) if found else None


def score_exact(text: str, answer: int) -> float:
    """1.0 if the solution ends with the right number, else 0.0 (also when it names none)."""
    return float(final_answer(text) == answer)


def score_strict(text: str, answer: int) -> float:
    """1.0 if the number is right and the solution is in the house style (`HOUSE_STYLE_SHARE`), else 0.0."""
    share = house_style_share(text)
    return score_exact(text, answer) if share is not None and share >= HOUSE_STYLE_SHARE else 0.0


SCORERS: dict[str, Callable[[str, int], float]] = {"exact": score_exact, "strict": score_strict}
