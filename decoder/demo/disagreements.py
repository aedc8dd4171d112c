"""Where draft and target disagree: TV(p, q) along reference solutions, by the kind of the next token."""

from __future__ import annotations

import random

import torch

from decoder.demo.pair import EOS, Pair, prompt_ids
from decoder.demo.problems import WORDS, Domain, make_problem

KINDS = ("wording", "digit", "other")


@torch.inference_mode()
def disagreements(pair: Pair, domain: Domain, *, n: int = 150, seed: int = 4242) -> dict[str, dict[str, float]]:
    """For each kind of token: its share of the tokens, its mean TV, and its share of all TV; from ``n`` solutions.

    ``wording`` is the first token of a free wording, ``digit`` a digit, ``other`` everything else (names, the frame of
    the sentences, the end).
    """
    tokenizer = pair.tokenizer
    wording = {tokenizer(" " + w).input_ids[0] for options in WORDS.values() for w in options}
    rng = random.Random(seed)
    count, total = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
    for _ in range(n):
        problem = make_problem(rng, domain)
        asked, told = prompt_ids(tokenizer, problem.prompt), [*tokenizer(problem.solution).input_ids, EOS]
        x = torch.tensor([asked + told])
        p, q = (m(x).logits[0, len(asked) - 1 : -1].softmax(-1) for m in (pair.target, pair.draft))
        for token, tv in zip(told, (1 - torch.minimum(p, q).sum(-1)).tolist(), strict=True):
            is_digit = tokenizer.decode([token]).strip().isdigit()
            kind = "digit" if is_digit else "wording" if token in wording else "other"
            count[kind] += 1
            total[kind] += tv
    tokens, all_tv = sum(count.values()), sum(total.values())
    return {
        kind: {
            "share_of_tokens": round(count[kind] / tokens, 4),
            "mean_tv": round(total[kind] / max(count[kind], 1), 4),
            "share_of_tv": round(total[kind] / all_tv, 4),
        }
        for kind in KINDS
    }
