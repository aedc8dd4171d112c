"""How fast Lenity decodes, next to the library people would use otherwise: ``python -m bench.decode [--quick] --json``.

All methods run in one process with one thread, on the same prompts, in turn; times are CPU seconds (the wall's beside
them), because the machine may be shared. A ratio compares medians over the repeats; ``spread`` has the least and
greatest of the single repeats.

- *Bundled pair*, float32, greedy: plain, lossless with the draft model at the best block length, ``token_v3`` at 0.8,
  and ``generate(assistant_model=)`` of transformers, as it comes and at the best number of drafted tokens.
- *SmolLM2-135M*, bfloat16, greedy, on prompts whose answers copy them and on chat prompts: plain, lossless with the
  n-gram drafter, and ``generate(prompt_lookup_num_tokens=)``.

``--equality`` compares the texts themselves in float32 instead (`bench.equality`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench import equality
from bench.common import CPU, WALL, Clock, Method, Ratio, Timings, interleave, library, ours
from bench.prompts import Asker, BenchError, Prompt, bundled_prompts, load_chat_model
from bench.smollm2 import DESTINATION
from decoder.attention import use_grouped
from decoder.batch import Batch
from decoder.demo.pair import EOS, PAD, load_pair
from decoder.drafters import ModelDrafter, NgramDrafter
from decoder.generate import Engine, Knobs, Request, SamplingParams

GOALS = {
    "ours_vs_assisted": (">=", 1.25),
    "overhead_bundled": ("<=", 1.25),
    "overhead_smollm2": ("<=", 1.05),
    "ngram_vs_prompt_lookup": (">=", 1.1),
}
THETA = 0.8  # of token_v3
ROWS = 4  # of the batch


class Size(NamedTuple):
    """How much is measured."""

    repeats: int
    pilot_prompts: int  # on which block lengths are chosen
    prompts: int
    tokens: int
    real_repeats: int
    real_prompts: int  # of each kind
    real_tokens: int
    longest: int  # prompt tokens
    lengths: tuple[int, ...]  # tried block lengths of the draft model
    lookups: tuple[int, ...]  # tried block lengths of n-gram drafts


QUICK = Size(3, 2, 4, 96, 1, 2, 32, 320, (3, 4), (4,))
FULL = Size(7, 6, 12, 120, 3, 6, 96, 1000, (1, 2, 3, 4, 5, 6, 8), (4, 7, 10))


class Setup(NamedTuple):
    """Where it runs, and who is told how far it got."""

    device: str
    dtype: torch.dtype
    clock: Clock
    say: Callable[[str], None]


class Figures:
    """Figures of one run, under their names."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.values: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.spread: dict[str, tuple[float, float]] = {}
        self.details: dict[str, Any] = {}

    def ratio(self, name: str, timings: Timings, fast: str, slow: str) -> None:
        """How much faster one method is, over whole requests."""
        self.note(name, timings.ratio(fast, slow))
        self.wall[name] = timings.ratio(fast, slow, WALL).value

    def note(self, name: str, found: Ratio) -> None:
        """Keep a figure and its spread."""
        self.values[name] = found.value
        self.spread[name] = (found.low, found.high)

    def missed(self) -> list[str]:
        """Goals that were measured and missed."""
        return [
            f"{name} is {value}, goal {sign} {goal}"
            for name, (sign, goal) in GOALS.items()
            if (value := self.values.get(name)) is not None and (value < goal if sign == ">=" else value > goal)
        ]

    def json(self) -> dict[str, Any]:
        """One object: the keys of the goals at the top."""
        setup = {
            "device": self._setup.device,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        goals = {name: f"{sign} {goal}" for name, (sign, goal) in GOALS.items()}
        parts = {"wall": self.wall, "spread": self.spread, "goals": goals, "missed": self.missed(), "setup": setup}
        return {**self.values, **parts, **self.details}


# -- the bundled pair --------------------------------------------------------------------------------------------------


def bundled(size: Size, setup: Setup, figures: Figures) -> None:
    """Model drafts of the bundled pair against plain decoding and against assisted generation."""
    pair = load_pair(setup.dtype)
    target, draft = pair.target.to(setup.device), pair.draft.to(setup.device)
    engine = Engine(target, ModelDrafter(draft), eos_ids=[EOS], device=setup.device)
    prompts = bundled_prompts(pair.tokenizer, size.pilot_prompts + size.prompts, seed=3)
    pilot, prompts = prompts[: size.pilot_prompts], prompts[size.pilot_prompts :]

    def speculative(name: str, g: int) -> Method:
        return ours(name, engine, Knobs.lossless(g), size.tokens)

    def lenient(name: str, g: int) -> Method:
        return ours(name, engine, Knobs(g=g, rule="token_v3", theta=THETA), size.tokens)

    def assisted(name: str, g: int | None) -> Method:
        arguments = {"assistant_model": draft, "assistant_tokens": g}
        return library(name, target, EOS, PAD, size.tokens, **arguments)

    def best(make: Callable[[str, int], Method]) -> int:
        timings = interleave([make(str(g), g) for g in size.lengths], pilot, [target], setup.clock, repeats=1)
        return int(timings.fastest([str(g) for g in size.lengths]))

    setup.say("bundled pair: choosing block lengths")
    chosen = {name: best(make) for name, make in (("ours", speculative), ("lenient", lenient), ("assisted", assisted))}
    methods = [
        ours("plain", engine, Knobs.lossless(0), size.tokens),
        library("generate", target, EOS, PAD, size.tokens),
        speculative("ours", chosen["ours"]),
        lenient("ours_token_v3", chosen["lenient"]),
        assisted("assisted", chosen["assisted"]),
        assisted("assisted_default", None),
    ]
    setup.say(f"bundled pair: {len(prompts)} problems, {size.repeats} times, best block lengths {chosen}")
    timings = interleave(methods, prompts, [target, draft], setup.clock, repeats=size.repeats)
    rival = timings.fastest(["assisted", "assisted_default"])
    figures.ratio("ours_vs_assisted", timings, "ours", rival)
    figures.ratio("ours_vs_plain", timings, "ours", "plain")
    figures.ratio("token_v3_vs_plain", timings, "ours_token_v3", "plain")
    figures.ratio("plain_vs_generate", timings, "plain", "generate")
    if setup.device != "cpu":  # there a forward's time is its own only when it is waited for
        timings_waited = interleave(methods[2:3], prompts, [target, draft], setup.clock, repeats=3, every=True)
    else:
        timings_waited = timings
    figures.note("overhead_bundled", timings_waited.overhead("ours"))
    figures.details["bundled"] = {
        "block_length": chosen,
        "rival": rival,
        "same_output_as_generate": timings.same_output("ours", "generate"),
        "methods": timings.table(),
    }
    figures.details["batch"] = batch(engine, prompts, chosen["ours"], size, setup, figures)


def batch(
    engine: Engine, prompts: Sequence[Prompt], g: int, size: Size, setup: Setup, figures: Figures
) -> dict[str, Any]:
    """Throughput of a batch of `ROWS` rows over that of one row, on the same requests, ours at block length ``g``."""
    params = SamplingParams(temperature=0.0, max_tokens=size.tokens)
    knobs = Knobs.lossless(g)

    def run(rows: int) -> tuple[tuple[float, float], list[list[int]]]:
        seats, waiting, done = Batch(engine, rows), list(enumerate(prompts)), {}
        wall, cpu = setup.clock.now()
        while waiting or seats.rows:
            while waiting and seats.free:
                i, prompt = waiting.pop(0)
                seats.add(Request(str(i), prompt.ids, params), lambda: knobs)
            for completion in seats.step():
                done[int(completion.request.request_id)] = completion.token_ids
        ended = setup.clock.now()
        return (ended[WALL] - wall, ended[CPU] - cpu), [done[i] for i in range(len(prompts))]

    setup.say(f"bundled pair: {len(prompts)} problems in a batch of {ROWS}")
    same = sum(alone == beside for alone, beside in zip(run(1)[1], run(ROWS)[1], strict=True))
    pairs = [(run(1)[0], run(ROWS)[0]) for _ in range(size.repeats)]
    for kind, into in ((WALL, figures.wall), (setup.clock.kind, figures.values)):
        one, four = (statistics.median(times[kind] for times in runs) for runs in zip(*pairs, strict=True))
        into["batch4_vs_1"] = round(one / four, 3)
    single = [one[setup.clock.kind] / four[setup.clock.kind] for one, four in pairs]
    figures.spread["batch4_vs_1"] = (round(min(single), 3), round(max(single), 3))
    return {"rows": ROWS, "same_output": (same, len(prompts))}


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------


def smollm2(size: Size, setup: Setup, directory: Path, data: Path | None, figures: Figures) -> None:
    """N-gram drafts for a real model against plain decoding and against prompt lookup."""
    model, tokenizer = load_chat_model(directory, setup.dtype, setup.device)
    asker = Asker(tokenizer, data)
    end = int(model.config.eos_token_id)
    mine = model
    if setup.device == "cpu":
        mine, _ = load_chat_model(directory, setup.dtype, setup.device)
        use_grouped(mine)  # as the worker does; the library's stays as it is
    engine = Engine(mine, NgramDrafter(), eos_ids=[end], device=setup.device)
    copies = (model,) if mine is model else (model, mine)
    methods = [
        ours("plain", engine, Knobs.lossless(0), size.real_tokens),
        *(ours(f"ngram {g}", engine, Knobs.lossless(g), size.real_tokens) for g in size.lookups),
        *(library(f"lookup {g}", model, end, end, size.real_tokens, prompt_lookup_num_tokens=g) for g in size.lookups),
    ]
    if size.real_repeats > 1:
        methods.insert(1, library("generate", model, end, end, size.real_tokens))
    found: dict[str, Any] = {"dtype": str(setup.dtype).removeprefix("torch."), "prompts_from": asker.source}
    kinds = {"copy": asker.copying, "chat": asker.chat}
    for name, ask in kinds.items():
        prompts = ask(size.real_prompts, size.longest)
        setup.say(f"SmolLM2: {len(prompts)} {name} prompts of {asker.source}")
        timings = interleave(methods, prompts, [copies], setup.clock, repeats=size.real_repeats)
        fast = timings.fastest([f"ngram {g}" for g in size.lookups])
        rival = timings.fastest([f"lookup {g}" for g in size.lookups])
        figures.ratio(f"ngram_vs_prompt_lookup_{name}", timings, fast, rival)
        figures.note(f"ngram_vs_prompt_lookup_{name}_decode", timings.decode_ratio(fast, rival))
        figures.ratio(f"ngram_vs_plain_{name}", timings, fast, "plain")
        if setup.device != "cpu":
            waiting = [m for m in methods if m.name == fast]
            timings_waited = interleave(waiting, prompts, [model], setup.clock, repeats=1, every=True)
        else:
            timings_waited = timings
        figures.note(f"overhead_smollm2_{name}", timings_waited.overhead(fast))
        found[name] = {
            "fastest": [fast, rival],
            "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
            "same_output_as_lookup": timings.same_output(fast, rival),
            "methods": timings.table(),
        }
    figures.details["smollm2"] = found
    # The goals are for both kinds: the worse one counts.
    figures.values["ngram_vs_prompt_lookup"] = min(figures.values[f"ngram_vs_prompt_lookup_{kind}"] for kind in kinds)
    figures.values["overhead_smollm2"] = max(figures.values[f"overhead_smollm2_{kind}"] for kind in kinds)


# -- the command -------------------------------------------------------------------------------------------------------


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that the benchmark has on every device."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="about 45 seconds of CPU time instead of many minutes")
    made.add_argument("--json", action="store_true", help="one JSON object on the last line")
    made.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl and spec_bench_questions.jsonl")
    made.add_argument("--smollm2", type=Path, default=DESTINATION, help="directory of the real model (make smollm2)")
    return made


def measure(args: argparse.Namespace, setup: Setup, real_dtype: torch.dtype) -> dict[str, Any]:
    """Everything that can be measured here."""
    size = QUICK if args.quick else FULL
    figures = Figures(setup)
    began = setup.clock.now()
    bundled(size, setup, figures)
    try:
        smollm2(size, setup._replace(dtype=real_dtype), args.smollm2, args.data, figures)
    except BenchError as e:
        setup.say(f"SmolLM2 was left out: {e}")
        figures.details["smollm2"] = None
    ended = setup.clock.now()
    figures.details["seconds"] = {"wall": round(ended[WALL] - began[WALL]), "cpu": round(ended[CPU] - began[CPU])}
    return figures.json()


def compare(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Texts against those of transformers, in float32."""
    share = 0.05 if args.quick else 1.0
    found: dict[str, Any] = {"bundled": equality.bundled(round(equality.GSM8K_PROMPTS * share), say)}
    try:
        found["smollm2"] = equality.chat_model(args.smollm2, args.data, share, say)
    except BenchError as e:
        say(f"SmolLM2 was left out: {e}")
        found["smollm2"] = None
    return found


def show(found: dict[str, Any], as_json: bool) -> None:
    """Print the figures: a line each, or one JSON object."""
    print(json.dumps(found) if as_json else "\n".join(f"{name}: {value}" for name, value in found.items()))


def stderr(text: str) -> None:
    """Progress, apart from the figures."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the CPU and print."""
    options = parser(__doc__)
    options.add_argument("--equality", action="store_true", help="compare texts instead of times")
    args = options.parse_args(argv)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    if args.data is None:
        stderr("no --data DIR: generated problems stand in for GSM8K and Spec-Bench")
    if args.equality:
        found = compare(args, stderr)
    else:
        found = measure(args, Setup("cpu", torch.float32, Clock(), stderr), torch.bfloat16)
    show(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
