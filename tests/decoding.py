"""What tests of the decoder share: the bundled pair, prompts of its task, and small helpers around the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.demo.pair import EOS, Pair, load_pair, prompt_ids
from decoder.demo.problems import make_problem
from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.generate import Completion, Engine, Knobs, Request, RoundTrace, SamplingParams

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny(cls: Any = LlamaForCausalLM, config: Any = LlamaConfig, seed: int = 1, **changes: Any) -> Any:
    """A random model, sharp enough for its argmax to be stable and to vary."""
    torch.manual_seed(seed)
    model = cls(config(**(SMALL | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model


@cache
def pair() -> Pair:
    """The bundled target, draft and tokenizer, loaded once for all tests."""
    return load_pair()


@cache
def engine(drafter: str = "model") -> Engine:
    """An engine on the bundled target with its draft model, or with the n-gram drafter."""
    made = ModelDrafter(pair().draft) if drafter == "model" else NgramDrafter()
    return Engine(pair().target, made, eos_ids=[EOS])


@cache
def problems(n: int, domain: Any = "easy", seed: int = 11) -> tuple[Any, ...]:
    """Fresh problems of the bundled task."""
    rng = random.Random(seed)
    return tuple(make_problem(rng, domain) for _ in range(n))


@cache
def prompts(n: int, seed: int = 11) -> tuple[list[int], ...]:
    """Token ids of the prompts of `problems`."""
    return tuple(prompt_ids(pair().tokenizer, problem.prompt) for problem in problems(n, seed=seed))


class Rounds(list[RoundTrace]):
    """An observer that keeps what it saw."""

    def on_round(self, trace: RoundTrace) -> None:
        self.append(trace)


def run(
    engine: Engine,
    prompt: Sequence[int],
    knobs: Knobs | Callable[[], Knobs],
    observer: Any = None,
    *,
    pinned: bool = False,
    **params: Any,
) -> Completion:
    """Decode one prompt; ``params`` go to `SamplingParams` (160 tokens unless told)."""
    request = Request("r", list(prompt), SamplingParams(**({"max_tokens": 160} | params)), pinned=pinned)
    return engine.generate(request, knobs if callable(knobs) else lambda: knobs, observer)


def chi_square_p(counts: Any, probs: Any, *, least: float = 5.0) -> float:
    """P-value of Pearson's test of ``counts`` against ``probs``; cells expecting fewer than ``least`` are pooled."""
    counts, probs = np.asarray(counts, float).ravel(), np.asarray(probs, float).ravel()
    expected = counts.sum() * probs / probs.sum()
    small = expected < least
    cells = [(counts[~small], expected[~small])]
    if small.any() and expected[small].sum() > 0:
        cells.append((counts[small].sum(keepdims=True), expected[small].sum(keepdims=True)))
    elif counts[small].sum():
        return 0.0  # something came out that cannot
    statistic = sum(((c - e) ** 2 / e).sum() for c, e in cells)
    degrees = sum(len(c) for c, _ in cells) - 1
    return float(chi2.sf(statistic, degrees))
