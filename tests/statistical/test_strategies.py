"""Strict strategies sample from the target, and so do held answers, whatever made them be held.

Chi-square tests at significance 1e-4 on fixed seeds, of the first two tokens together. Each is shown to reject
something wrong: a lenient knob, or answers of the target that do not come from the draft that was looked at. Tiny
random models that disagree a lot make for many draws; the speculative sequence cascade is tested on the bundled pair
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.demo.pair import BOS
from decoder.drafters import Draft, ModelDrafter
from decoder.drafters.cascade import HorizontalDrafter
from decoder.generate import Engine, Knobs, Request, SamplingParams
from decoder.sampling import draw
from decoder.strategies import Bild, Models, Strategy, get_strategy
from tests.decoding import chi_square_p, pair, run

SIGNIFICANCE = 1e-4
REJECTED = 1e-12  # what a negative control must fall below
N = 400
VOCABULARY, PROMPT = 6, [1, 4, 2]
ALMOST_NEVER = 1e-9


def tiny(seed: int, temperature: float) -> Any:
    """A random model of one layer over six tokens; logits are about ``1 / temperature`` wide."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, **heads, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_()
        model.lm_head.weight *= 8**-0.5 / temperature
    return model.eval()


@cache
def models() -> Models:
    return Models(tiny(1, 1.0), ModelDrafter(tiny(2, 1.0)))


@cache
@torch.inference_mode()
def law(temperature: float = 1.0) -> np.ndarray:
    """The target's law of the first two tokens, [V, V]."""
    target = tiny(1, temperature)
    first = target(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
    ids = torch.tensor([[*PROMPT, token] for token in range(VOCABULARY)])
    pairs: np.ndarray = (first[:, None] * target(ids).logits[:, -1].double().softmax(-1)).numpy()
    return pairs


def p_value(sample: Callable[[int], list[int]], n: int = N, temperature: float = 1.0) -> float:
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for seed in range(n):
        first, second, *_ = sample(seed)
        counts[first, second] += 1
    return chi_square_p(counts, law(temperature))


def by(
    strategy: str | Strategy, rule: str, theta: float, using: Callable[[], Models] = models, **changes: Any
) -> Callable[[int], Any]:
    """The completion of a seed."""
    made = get_strategy(strategy) if isinstance(strategy, str) else strategy
    knobs = Knobs(g=2, rule=rule, theta=theta, **changes)

    def complete(seed: int) -> Any:
        return made.generate(using(), Request("r", PROMPT, SamplingParams(seed=seed, max_tokens=3)), lambda: knobs)

    return complete


CASCADES: dict[str, tuple[str | Strategy, str]] = {
    "speculative_sequence_cascade": ("speculative_sequence_cascade", "confidence_min"),
    "token_cascade": ("token_cascade", "chow"),
    "bild": (Bild(fallback=0.4), "bild"),
}


@pytest.mark.parametrize("name", CASCADES)
def test_strict_strategies_sample_from_the_target(name: str) -> None:
    looked = rejected = 0

    def sample(seed: int) -> list[int]:
        nonlocal looked, rejected
        done = by(*CASCADES[name], ALMOST_NEVER)(seed)
        looked, rejected = looked + done.examined, rejected + done.examined - done.accepted
        return list(done.token_ids)

    assert p_value(sample) > SIGNIFICANCE
    assert looked > N and rejected > looked / 10  # the draft was looked at, and was not always right


@pytest.mark.parametrize("name", CASCADES)
def test_the_same_test_rejects_lenient_strategies(name: str) -> None:
    """Negative control."""
    assert p_value(lambda seed: by(*CASCADES[name], 1.0)(seed).token_ids, 300) < REJECTED


SHARP, MANY = 0.5, 800


class Opinionated:
    """Drafts the target's likeliest first token with probability .7, whatever the context, and then nearly always one
    token. So it is confident of an answer nearly always when it begins like that, and never otherwise."""

    deterministic, context, vocab_size = False, None, VOCABULARY

    def start(self, params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> Opinionated:
        return self

    def propose(self, tokens: Sequence[int], width: int, uniforms: torch.Tensor) -> Draft:
        first = torch.full((VOCABULARY,), 0.06)
        first[int(law(SHARP).sum(1).argmax())] = 0.7
        later = torch.full((VOCABULARY,), 0.01)
        later[0] = 0.95
        q = torch.stack([first if len(tokens) + j == len(PROMPT) else later for j in range(width)])[None]
        return Draft(draw(q, uniforms[None, :width]), q, q)

    def commit(self, length: int) -> None:
        pass


@cache
def opinionated() -> Models:
    return Models(tiny(1, SHARP), Opinionated())


held = by("speculative_sequence_cascade", "confidence_min", 0.5, opinionated, holdback=1.0)


def test_answers_of_the_target_do_not_depend_on_whether_the_draft_would_have_been_believed() -> None:
    """All believed answers are held, so that the target answers all: from its law, though most were selected."""
    arms = Counter[str]()

    def tokens(seed: int) -> list[int]:
        done = held(seed)
        arms[done.arm] += 1
        return list(done.token_ids)

    assert p_value(tokens, MANY, SHARP) > SIGNIFICANCE
    assert MANY / 4 < arms["holdback"] < 3 * MANY / 4 and arms["lenient"] == 0


def test_held_answers_must_come_from_the_draft_that_was_looked_at() -> None:
    """Negative control: where an answer is held the target answers afresh, from its law. But the other answers were
    selected by their draft's confidence, and all together they are not of the target's law."""
    afresh = by("plain", "lossless", 0.0, opinionated)

    def tokens(seed: int) -> list[int]:
        done = held(seed)
        return list(afresh(seed + MANY).token_ids if done.arm == "holdback" else done.token_ids)

    assert p_value(tokens, MANY, SHARP) < SIGNIFICANCE


def test_a_horizontal_cascade_of_drafters_leaves_the_law_alone() -> None:
    made = Engine(tiny(1, 1.0), HorizontalDrafter(ModelDrafter(tiny(2, 1.0)), head=1))
    knobs = Knobs.lossless(2)
    assert p_value(lambda seed: run(made, PROMPT, knobs, seed=seed, max_tokens=3).token_ids) > SIGNIFICANCE


# -- the bundled pair --------------------------------------------------------------------------------------------------

# The next two tokens are free wording, about which the models disagree.
WORDING = (
    "Question: Mia has 5 pens. Mia finds 3 pens. How many pens does Mia have now?\nAnswer: First Mia gets 3 more pens, "
    "so the"
)


def first_tokens(theta: float, n: int) -> Iterator[int]:
    bundled = Models(pair().target, ModelDrafter(pair().draft))
    prompt = [BOS, *pair().tokenizer(WORDING).input_ids]
    strategy = get_strategy("speculative_sequence_cascade")
    for seed in range(n):
        request = Request("r", prompt, SamplingParams(seed=seed, max_tokens=2))
        yield strategy.generate(bundled, request, lambda: Knobs(2, "confidence_min", theta)).token_ids[0]


@torch.inference_mode()
def test_on_the_bundled_pair_a_verified_draft_is_of_the_target_s_law_and_a_believed_one_is_not() -> None:
    ids = torch.tensor([[BOS, *pair().tokenizer(WORDING).input_ids]])
    exact = pair().target(ids).logits[0, -1].double().softmax(-1).numpy()
    verified, believed = (np.bincount([*first_tokens(t, 120)], minlength=len(exact)) for t in (ALMOST_NEVER, 1.0))
    assert chi_square_p(verified, exact) > SIGNIFICANCE
    assert chi_square_p(believed, exact) < REJECTED
