"""Record what drafts do along real texts, for `bench.regret`: ``python -m bench.record NAME [--data DIR]``.

NAME is ``bundled`` (the bundled pair at temperature 1, both domains) or ``smollm2`` (SmolLM2-135M, greedy, with the
n-gram drafter, on GSM8K and Spec-Bench of ``--data DIR``). A file of `bench/data` holds numbers per output position of
the recorded texts and the seconds of rounds by width; no text, no token ids.

`length` is how many drafts are accepted if a round starts at that position, for blocks of up to `G` drafts, `width` how
many are proposed at all. A draft continues the text that is there, so as long as everything is accepted it does not
depend on where the block is cut: a round of block length g accepts ``min(g, length)`` and the next one starts after
those and one more token. That replays every policy exactly, token by token. At temperature 1 the drafts and coins
belong to the position (as in the decoder), and `accept` is the probability that the position's coin was tossed with.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import transformers

from bench.offpolicy import Stream
from bench.prompts import Asker, BenchError, Prompt, bundled_prompts, load_chat_model
from bench.smollm2 import DESTINATION
from decoder.demo.pair import EOS, Pair, load_pair
from decoder.demo.simulation import distributions, fresh_problems, inverse_cdf
from decoder.demo.tasks import Problem
from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.drafters.ngram import NgramDraftState
from decoder.generate import Engine, Knobs, Request, RoundTrace, SamplingParams

G = 16
WIDTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # timed
DATA = Path(__file__).with_name("data")
ENOUGH = 6  # rounds of a width that give a median
LONGEST_PROMPT = 700
KINDS = {  # of SmolLM2: categories of Spec-Bench by trace kind, GSM8K besides
    "copy": ("summarization", "rag"),
    "chat": ("writing", "reasoning", "coding", "extraction"),
    "translation": ("translation",),
}

Columns = dict[str, npt.NDArray[Any]]


def main() -> None:
    """Record one source and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("bundled", "smollm2"))
    parser.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl and spec_bench_questions.jsonl")
    parser.add_argument("--smollm2", type=Path, default=DESTINATION, help="directory of the real model")
    parser.add_argument("--prompts", type=int, help="how many a kind (bundled: 200, smollm2: 32)")
    parser.add_argument("--tokens", type=int, default=128, help="most output tokens of SmolLM2")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    if args.name == "bundled":
        columns = bundled(args.prompts or 200)
    else:
        if args.data is None:
            raise BenchError("recording real prompts needs --data DIR")
        columns = smollm2(args.smollm2, args.data, args.prompts or 32, args.tokens)
    DATA.mkdir(exist_ok=True)
    np.savez_compressed(DATA / f"{args.name}.npz", **columns)  # type: ignore[arg-type]
    print({name: (str(values.dtype), values.shape) for name, values in columns.items()})


# -- the bundled pair --------------------------------------------------------------------------------------------------


def bundled(problems: int) -> Columns:
    """Both domains, and seconds of rounds."""
    pair = load_pair()
    columns = seconds(
        Engine(pair.target, ModelDrafter(pair.draft)),
        bundled_prompts(pair.tokenizer, 4, seed=3),
        tokens=96,
        temperature=1,
    )
    for domain in ("easy", "hard"):
        rows = sample(pair, fresh_problems(31, problems, domain))
        order = np.random.default_rng(0).permutation(len(rows))  # they came sorted by length
        found = [_positions(*rows[i]) for i in order]
        for name in found[0]:
            columns[f"{domain}_{name}"] = np.concatenate([part[name] for part in found])
    return columns


@torch.inference_mode()
def sample(pair: Pair, problems: Sequence[Problem], longest: int = 160) -> list[tuple[list[float], list[bool]]]:
    """Per problem and output position the lossless acceptance of a draft drawn there, and whether it was accepted.

    The text is the target's own: an accepted draft, or a token of the residual.
    """
    generator = torch.Generator().manual_seed(7)
    stream = Stream(pair, problems)
    live = torch.arange(len(problems))
    found: list[tuple[list[float], list[bool]]] = [([], []) for _ in problems]
    for _ in range(longest):
        p, q = (distributions(x, 1.0) for x in stream.logits())
        u = torch.rand(3, len(live), generator=generator)
        x = inverse_cdf(q, u[0])[:, None]
        accept = (p.gather(1, x) / q.gather(1, x)).clamp_max(1.0)[:, 0]
        taken = u[1] <= accept
        residual = (p - q).clamp_min(0)
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
        y = torch.where(taken, x[:, 0], inverse_cdf(residual, u[2]))
        for i, a, t in zip(live.tolist(), accept.tolist(), taken.tolist(), strict=True):
            found[i][0].append(a)
            found[i][1].append(t)
        keep = (y != EOS).nonzero()[:, 0]
        if not len(keep):
            break
        live = live[keep]
        stream.append(y, keep)
    return found


def _positions(accept: list[float], taken: list[bool]) -> Columns:
    n = len(accept)
    length = np.zeros(n + 1, dtype=np.int64)
    for i in range(n - 1, -1, -1):
        length[i] = length[i + 1] + 1 if taken[i] else 0
    width = np.minimum(G, n - 1 - np.arange(n))  # a round emits one token of its own
    first = np.zeros(n, dtype=np.uint8)
    first[0] = 1
    return {
        "length": np.minimum(length[:n], width).astype(np.uint8),
        "width": width.astype(np.uint8),
        "accept": np.array(accept, dtype=np.float16),
        "first": first,
    }


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------


def smollm2(directory: Path, data: Path, prompts: int, tokens: int) -> Columns:
    """GSM8K and kinds of Spec-Bench, and seconds of rounds."""
    model, tokenizer = load_chat_model(directory, torch.bfloat16)
    asker = Asker(tokenizer, data)
    end = int(model.config.eos_token_id)
    asked = {"gsm8k": asker.arithmetic(prompts)}
    for kind, categories in KINDS.items():
        asked[kind] = asker._pick(categories, prompts, LONGEST_PROMPT)
    engine = Engine(model, NgramDrafter(), eos_ids=[end])
    columns = seconds(engine, asked["copy"][:2], tokens=40, temperature=0)
    print("seconds", {name: values.round(4).tolist() for name, values in columns.items()}, flush=True)
    for kind, rows in asked.items():
        began = time.process_time()
        texts = greedy(model, rows, tokens, end)
        parts = [
            lookups(prompt.ids, text, int(model.config.vocab_size), end)
            for prompt, text in zip(rows, texts, strict=True)
        ]
        for name in parts[0]:
            columns[f"{kind}_{name}"] = np.concatenate([part[name] for part in parts])
        print(kind, sum(map(len, texts)), "tokens", f"{time.process_time() - began:.0f} s", flush=True)
    return columns


@torch.inference_mode()
def greedy(model: Any, prompts: Sequence[Prompt], tokens: int, end: int, batch: int = 8) -> list[list[int]]:
    """The model's greedy continuations, with their end token."""
    texts: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    for start in range(0, len(prompts), batch):
        rows = by_length[start : start + batch]
        longest = max(len(prompts[i].ids) for i in rows)
        ids = torch.tensor([[end] * (longest - len(prompts[i].ids)) + prompts[i].ids for i in rows])
        mask = torch.tensor([[0] * (longest - len(prompts[i].ids)) + [1] * len(prompts[i].ids) for i in rows])
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=end)
        for i, row in zip(rows, out[:, longest:].tolist(), strict=True):
            texts[i] = row[: row.index(end) + 1] if end in row else row
    return texts


def lookups(prompt: list[int], text: list[int], vocabulary: int, end: int) -> Columns:
    """What the n-gram drafter proposes at each position of ``text``, and how much of it is right."""
    state = NgramDraftState(vocabulary, frozenset({end}))
    whole = prompt + text
    n = len(text)
    length, width = np.zeros(n, dtype=np.uint8), np.zeros(n, dtype=np.uint8)
    uniforms = torch.zeros(G)
    for i in range(n):
        room = min(G, n - 1 - i)
        if not room:
            continue
        proposed = state.propose(whole[: len(prompt) + i], room, uniforms).tokens[0].tolist()
        right = 0
        while right < len(proposed) and proposed[right] == text[i + right]:
            right += 1
        length[i], width[i] = right, len(proposed)
    first = np.zeros(n, dtype=np.uint8)
    first[0] = 1
    return {"length": length, "width": width, "first": first}


# -- seconds -----------------------------------------------------------------------------------------------------------


class _Seconds:
    """Collects the seconds of rounds that read no prompt, by width drafted."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[float, float, float]]] = defaultdict(list)

    def on_round(self, trace: RoundTrace, /) -> None:
        if not trace.prefill:
            self.seen[trace.width].append((trace.draft_s, trace.verify_s, trace.overhead_s))


def seconds(engine: Engine, prompts: Sequence[Prompt], *, tokens: int, temperature: float) -> Columns:
    """Draft, verify and overhead seconds of the decoder's rounds at widths 0 to G: [G + 1] each.

    CPU seconds, which a busy machine moves least (there is one thread): the median of each width, made not to fall with
    width and interpolated where a width was not timed often enough.
    """
    watch = _Seconds()
    params = SamplingParams(temperature=temperature, max_tokens=tokens)
    with mock.patch.object(time, "perf_counter", time.process_time):
        for g in (WIDTHS[-1], *WIDTHS):  # the first one warms up
            if watch.seen and g == WIDTHS[0]:
                watch.seen.clear()
            knobs = Knobs.lossless(g)
            for prompt in prompts:
                engine.generate(Request("r", prompt.ids, params), functools.partial(_same, knobs), watch)
    widths = sorted(w for w, rows in watch.seen.items() if len(rows) >= ENOUGH)
    table = np.array([np.median(watch.seen[w], axis=0) for w in widths])
    every = np.arange(G + 1)
    draft, verify, overhead = (np.interp(every, widths, column) for column in table.T)
    return {
        "draft_s": np.where(every > 0, np.maximum.accumulate(draft), 0.0),
        "verify_s": np.maximum.accumulate(verify),
        "overhead_s": np.full(G + 1, np.median(overhead)),
    }


def _same(knobs: Knobs) -> Knobs:
    return knobs


if __name__ == "__main__":
    main()
