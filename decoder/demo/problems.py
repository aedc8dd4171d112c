"""Generated grade-school word problems whose solutions leave the wording free.

A solution has a checkable end (``#### N``) and, at many places on the way, one of four interchangeable wordings. A
*style* says with which probabilities each is drawn: the target learned one style, the draft the reverse one, so that
many of their disagreements are harmless wording while others are wrong digits.

Everything is a function of the ``random.Random`` that is passed in, and the order of its draws is part of the
contract: the bundled weights were trained on exactly this sequence (`decoder.demo.train`).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

Domain = Literal["easy", "hard", "wide"]
Style = Literal["target", "draft"]

STYLES: dict[Style, tuple[float, float, float, float]] = {
    "target": (0.45, 0.30, 0.15, 0.10),
    "draft": (0.10, 0.15, 0.30, 0.45),
}

# fmt: off
NAMES = (
    "Mia", "Tom", "Ana", "Ben", "Leo", "Zoe", "Sam", "Eva", "Max", "Ida",
    "Noah", "Lily", "Omar", "Ruth", "Finn", "Nina", "Paul", "Kate", "Hugo", "Vera",
)
THINGS = (
    "apples", "pears", "books", "pens", "cards", "coins", "stamps", "shells",
    "marbles", "stickers", "cookies", "buttons", "flowers", "eggs", "balls", "keys",
)
BOXES = ("boxes", "bags", "packs", "baskets", "jars")
# fmt: on

# Every entry holds four interchangeable wordings, which differ in their first token.
WORDS: dict[str, tuple[str, str, str, str]] = {
    "first": ("First", "Initially", "Now", "Here"),
    "then": ("Then", "Next", "Afterwards", "Later"),
    "gets": ("gets", "receives", "gains", "obtains"),
    "more": ("more", "extra", "additional", "further"),
    "loses": ("loses", "drops", "gives up", "parts with"),
    "of": ("of the", "from the", "out of the", "among the"),
    "hold": ("hold", "contain", "carry", "have"),
    "count": ("number", "count", "amount", "quantity"),
    "doubles": ("doubles", "grows twofold", "becomes double", "increases twofold"),
    "halves": ("halves", "shrinks by half", "falls by half", "decreases by half"),
    "so": ("so", "thus", "hence", "therefore"),
    "total": ("total", "sum", "stock", "pile"),
    "is": ("is", "equals", "makes", "reaches"),
    "final": ("final", "last", "overall", "complete"),
    "answer": ("answer", "result", "value", "figure"),
}


@dataclass(frozen=True)
class Problem:
    """One word problem: what the model is asked, one right solution in some wording, and the number it ends with."""

    prompt: str
    solution: str
    answer: int
    domain: Domain


def make_problem(rng: random.Random, domain: Domain = "easy", style: Style = "target") -> Problem:
    """Draw one problem.

    ``domain`` is ``easy`` (1 to 3 steps of five kinds, numbers of at most two digits), ``hard`` (longer sums: 3 or 4
    steps that add two-digit numbers or products to a three-digit one) or ``wide`` (as hard, but also with subtraction
    and with three-digit numbers added; for training only). ``style`` weights the wordings of the solution; the
    question's wording is uniform whatever the style. Raises ValueError for an unknown domain or style.
    """
    if domain not in ("easy", "hard", "wide") or style not in STYLES:
        raise ValueError(
            f"unknown domain {domain!r} or style {style!r}; domains: easy, hard, wide; styles: target, draft"
        )
    story = _Story(rng, domain, style)
    question, solution = [story.opening()], []
    for i in range(story.steps):
        asked, told = story.step(is_first=i == 0)
        question.append(asked)
        solution.append(told)
    asked, told = story.ending()
    prompt = "Question: " + " ".join([*question, asked]) + "\nAnswer:"
    return Problem(prompt, " " + " ".join([*solution, told]), story.count, domain)


def final_answer(text: str) -> int | None:
    """The number after the first ``####`` of ``text``; None where there is none."""
    match = re.search(r"####\s*(-?\d+)", text)
    return int(match.group(1)) if match else None


class _Story:
    """One problem while it is being told: who has how many of what (``count``), and the random draws still to come."""

    def __init__(self, rng: random.Random, domain: Domain, style: Style) -> None:
        self.rng, self.domain, self.weights = rng, domain, STYLES[style]
        self.long = domain != "easy"
        self.name, self.other = rng.sample(NAMES, 2)
        self.thing, self.box = rng.choice(THINGS), rng.choice(BOXES)
        self.steps = rng.choice((3, 3, 4)) if self.long else rng.choice((1, 2, 2, 3))
        self.count = rng.randint(100, 600) if self.long else rng.randint(5, 30)

    def word(self, key: str) -> str:
        """One of the four interchangeable wordings, drawn with the style's probabilities."""
        return self.rng.choices(WORDS[key], self.weights)[0]

    def opening(self) -> str:
        name, has, thing = self.name, self.count, self.thing
        return self.rng.choice(
            (f"{name} has {has} {thing}.", f"{name} starts with {has} {thing}.", f"{name} owns {has} {thing}.")
        )

    def operations(self) -> list[str]:
        """What may happen next, as a list to choose from uniformly; keeps numbers in the domain's range."""
        has = self.count
        if self.long:
            return ["add", "add", "box"] + ["sub"] * 2 * (has > 320 and self.domain == "wide")
        return (
            ["add"] * (has <= 75)
            + ["box"] * (has <= 60)
            + ["sub"] * (has > 6)
            + ["double"] * (has <= 40)
            + ["half"] * (has % 2 == 0 and has > 3)
        )

    def amount(self) -> int:
        """How many are added or taken away."""
        if self.domain == "wide":
            return self.rng.randint(100, 299) if self.rng.random() < 0.3 else self.rng.randint(11, 99)
        return self.rng.randint(11, 99) if self.long else self.rng.randint(2, 20)

    def step(self, *, is_first: bool) -> tuple[str, str]:
        """The question's and the solution's sentence of one step; moves ``count``. The order of draws is fixed."""
        operation, amount = self.rng.choice(self.operations()), self.amount()
        lead = self.word("first" if is_first else "then")
        asked, text, calculation, self.count = getattr(self, f"_{operation}")(amount)
        so, total, equals = self.word("so"), self.word("total"), self.word("is")
        return asked, f"{lead} {text}, {so} the {total} {equals} {calculation} = {self.count}."

    def ending(self) -> tuple[str, str]:
        name, thing = self.name, self.thing
        asked = self.rng.choice((f"How many {thing} does {name} have now?", f"How many {thing} has {name} in the end?"))
        final, answer = self.word("final"), self.word("answer")
        return asked, f"The {final} {answer} is #### {self.count}"

    def _add(self, y: int) -> tuple[str, str, str, int]:
        name, other, thing, has = self.name, self.other, self.thing, self.count
        asked = self.rng.choice(
            (f"{other} gives {name} {y} more {thing}.", f"{name} finds {y} {thing}.", f"{name} buys {y} {thing}.")
        )
        gets, more = self.word("gets"), self.word("more")
        return asked, f"{name} {gets} {y} {more} {thing}", f"{has} + {y}", has + y

    def _sub(self, y: int) -> tuple[str, str, str, int]:
        name, other, thing, has = self.name, self.other, self.thing, self.count
        y = min(y, has - 1)
        asked = self.rng.choice(
            (f"{name} gives {y} {thing} to {other}.", f"{name} loses {y} {thing}.", f"{name} sells {y} {thing}.")
        )
        loses, of = self.word("loses"), self.word("of")
        return asked, f"{name} {loses} {y} {of} {thing}", f"{has} - {y}", has - y

    def _box(self, _: int) -> tuple[str, str, str, int]:
        name, thing, box, has = self.name, self.thing, self.box, self.count
        if self.domain == "hard":
            y, z = self.rng.randint(3, 9), self.rng.randint(4, 9)
        else:
            y, z = (self.rng.randint(2, 9 if self.long else 6) for _ in range(2))
        asked = self.rng.choice(
            (f"{name} buys {y} {box} with {z} {thing} each.", f"{self.other} brings {name} {y} {box} of {z} {thing}.")
        )
        text = f"the {y} {box} {self.word('hold')} {y} * {z} = {y * z} {thing}"
        return asked, text, f"{has} + {y * z}", has + y * z

    def _double(self, _: int) -> tuple[str, str, str, int]:
        name, thing, has = self.name, self.thing, self.count
        asked = self.rng.choice((f"{name} doubles the {thing}.", f"{self.other} brings as many {thing} as {name} has."))
        count, doubles = self.word("count"), self.word("doubles")
        return asked, f"the {count} {doubles}", f"{has} * 2", has * 2

    def _half(self, _: int) -> tuple[str, str, str, int]:
        name, thing, has = self.name, self.thing, self.count
        asked = self.rng.choice(
            (f"{name} gives half of the {thing} to {self.other}.", f"Half of the {thing} are lost.")
        )
        count, halves = self.word("count"), self.word("halves")
        return asked, f"the {count} {halves}", f"{has} / 2", has // 2
