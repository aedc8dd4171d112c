"""Is greedy lossless output that of transformers, token by token? ``python -m bench.decode --equality``.

Both in float32, where drafting must not change a single token. Where a text does differ, the first place is named with
the margin between the two most probable tokens there: a near-tie is rounding, anything else is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import Method, library, ours
from bench.prompts import Asker, Prompt, bundled_prompts, load_chat_model
from decoder.attention import use_grouped
from decoder.demo.pair import EOS, PAD, load_pair
from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.generate import Engine, Knobs

GSM8K_PROMPTS, SPEC_PROMPTS = 200, 40
BUNDLED_TOKENS, REAL_TOKENS = 120, 32
SEED = 200
Say = Callable[[str], None]


@torch.inference_mode()
def margin(model: Any, ids: Sequence[int]) -> float:
    """Difference of the two greatest logits of the token after ``ids``."""
    top = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def compare(
    model: Any, prompts: Sequence[Prompt], reference: Method, methods: Sequence[Method], say: Say = lambda _: None
) -> dict[str, Any]:
    """How many texts are equal to the reference's; prompt i is decoded by ``methods[i % len(methods)]``."""
    equal = tokens = 0
    differences: list[dict[str, Any]] = []
    for i, prompt in enumerate(prompts):
        method = methods[i % len(methods)]
        want, got = reference.decode(prompt.ids), method.decode(prompt.ids)
        equal += want == got
        tokens += len(want)
        if want != got:
            at = next((j for j, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
            gap = margin(model, [*prompt.ids, *want[:at]])
            differences.append({"prompt": prompt.name, "method": method.name, "position": at, "logit_margin": gap})
        if (i + 1) % 10 == 0:
            say(f"{i + 1}/{len(prompts)} prompts, {equal} equal")
    return {"prompts": len(prompts), "equal": equal, "tokens": tokens, "differences": differences}


def bundled(count: int = GSM8K_PROMPTS, say: Say = lambda _: None) -> dict[str, Any]:
    """The bundled pair on generated problems; drafts by its draft model with g = 1..8, and by n-grams."""
    pair = load_pair()
    prompts = bundled_prompts(pair.tokenizer, count, SEED)
    engines = {
        "model": Engine(pair.target, ModelDrafter(pair.draft), eos_ids=[EOS]),
        "ngram": Engine(pair.target, NgramDrafter(), eos_ids=[EOS]),
    }
    methods = [
        ours(f"{name} drafter, g = {g}", engine, Knobs.lossless(g), BUNDLED_TOKENS)
        for g in range(1, 9)
        for name, engine in engines.items()
    ]
    return compare(pair.target, prompts, library("generate", pair.target, EOS, PAD, BUNDLED_TOKENS), methods, say)


def chat_model(directory: Path, data: Path | None, share: float = 1.0, say: Say = lambda _: None) -> dict[str, Any]:
    """A real model in float32 with the n-gram drafter, g = 1..8, on GSM8K and Spec-Bench questions.

    ``share`` of the prompts in (0, 1]. Raises BenchError where the model or the data are not there.
    """
    model, tokenizer = load_chat_model(directory, torch.float32)
    asker = Asker(tokenizer, data)
    end = int(model.config.eos_token_id)
    mine, _ = load_chat_model(directory, torch.float32)
    use_grouped(mine)  # as the worker does; the library's stays as it is
    engine = Engine(mine, NgramDrafter(), eos_ids=[end])
    methods = [ours(f"ngram drafter, g = {g}", engine, Knobs.lossless(g), REAL_TOKENS) for g in range(1, 9)]
    reference = library("generate", model, end, end, REAL_TOKENS)
    found: dict[str, Any] = {"prompts_from": asker.source, "max_tokens": REAL_TOKENS}
    for name, prompts in (
        ("spec_bench", asker.mixed(round(SPEC_PROMPTS * share))),
        ("gsm8k", asker.arithmetic(round(GSM8K_PROMPTS * share))),
    ):
        found[name] = compare(model, prompts, reference, methods, lambda text, name=name: say(f"{name}: {text}"))  # type: ignore[misc]
    return found
