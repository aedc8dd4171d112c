"""Trains the bundled pair: ``python -m decoder.demo.train --all`` (about 35 minutes on one core).

Four steps, all on generated problems, each a fixed number of optimizer steps from a fixed seed: the draft; the target
on easy and wide problems, then twice more on easy and hard ones with lower rates. Only solutions are learnt, prompts
are masked. Muon moves the matrices, AdamW the embeddings and norms. The matrix products run in bfloat16, so another
kind of CPU or another thread count may round differently; the bundled weights were made with these recipes and one
thread.

Weights are saved in fp16 with ``"dtype": "float32"`` in config.json, so that they load, and run, in fp32.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.demo.pair import BOS, EOS, PAD, load_model, prompt_ids, quiet
from decoder.demo.problems import Domain, Problem, Style, make_problem
from decoder.demo.tokenizer import train_tokenizer

IGNORED = -100  # label of a token that is not learnt
SHARD = 16  # batches that are drawn together and sorted by length, to save padding


@dataclass(frozen=True)
class Recipe:
    """One training step of the pair; everything its result depends on.

    ``other_share`` of the problems come from ``other_domain``, the rest are easy. ``init`` continues from the weights
    of another recipe (with fresh optimizers).
    """

    name: str
    style: Style
    other_share: float
    other_domain: Domain
    hidden: int
    layers: int
    feed_forward: int
    heads: int
    steps: int
    batch: int = 24
    lr: float = 3e-3  # AdamW: embeddings and norms
    muon_lr: float = 0.02  # Muon: matrices
    seed: int = 1
    init: str | None = None


RECIPES = (
    Recipe("draft", "draft", 0.15, "wide", hidden=128, layers=1, feed_forward=256, heads=4, steps=700),
    Recipe("target_stage1", "target", 0.4, "wide", hidden=192, layers=6, feed_forward=512, heads=6, steps=2200),
    Recipe(
        "target_stage2",
        "target",
        0.4,
        "hard",
        hidden=192,
        layers=6,
        feed_forward=512,
        heads=6,
        steps=640,
        lr=1.5e-3,
        muon_lr=0.01,
        seed=2,
        init="target_stage1",
    ),
    Recipe(
        "target",
        "target",
        0.25,
        "hard",
        hidden=192,
        layers=6,
        feed_forward=512,
        heads=6,
        steps=900,
        lr=1e-3,
        muon_lr=0.008,
        seed=3,
        init="target_stage2",
    ),
)


def shards(recipe: Recipe, rng: random.Random) -> Iterator[list[Problem]]:
    """The problems of a recipe, endlessly, one shard of `SHARD` batches at a time."""
    while True:
        yield [
            make_problem(rng, recipe.other_domain if rng.random() < recipe.other_share else "easy", recipe.style)
            for _ in range(SHARD * recipe.batch)
        ]


def batches(recipe: Recipe, tokenizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, labels), both (batch, length); labels are `IGNORED` on the prompt and on padding."""
    rng = random.Random(recipe.seed + 1000)
    for drawn in shards(recipe, rng):
        told = tokenizer([p.solution for p in drawn]).input_ids
        pairs = [(prompt_ids(tokenizer, p.prompt), [*ids, EOS]) for p, ids in zip(drawn, told, strict=True)]
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        shard = [pairs[i : i + recipe.batch] for i in range(0, len(pairs), recipe.batch)]
        rng.shuffle(shard)
        yield from map(_padded, reversed(shard))


def _padded(batch: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(asked) + len(told) for asked, told in batch)
    x, y = torch.full((len(batch), width), PAD), torch.full((len(batch), width), IGNORED)
    for i, (asked, told) in enumerate(batch):
        x[i, : len(asked) + len(told)] = torch.tensor(asked + told)
        y[i, len(asked) : len(asked) + len(told)] = torch.tensor(told)
    return x, y


def training_prompts(recipe: Recipe) -> set[str]:
    """Every prompt the recipe trained on (what a fresh problem must not be)."""
    rng = random.Random(recipe.seed + 1000)
    seen: set[str] = set()
    drawn = 0
    for shard in shards(recipe, rng):
        seen.update(problem.prompt for problem in shard)
        drawn += SHARD
        if drawn >= recipe.steps:  # of the last shard a few batches may not have been used
            break
        rng.shuffle(list(range(SHARD)))
    return seen


def new_model(recipe: Recipe, vocabulary: int) -> Any:
    """An untrained model of the recipe's shape; the vocabulary is padded to a multiple of 8."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=(vocabulary + 7) // 8 * 8,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.feed_forward,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


def learning_rate_scale(step: int, steps: int) -> float:
    """Factor of the learning rate at ``step`` of 1..steps: 50 steps of warm-up, then constant, then linearly to 0."""
    left = 1 - (step - 1) / steps
    return min(1, step / 50) * min(1, left / 0.7)


def train(
    recipe: Recipe,
    tokenizer: Any,
    *,
    init: Any = None,
    steps: int | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Any:
    """The trained model of a recipe.

    ``init`` is a model of the same shape to continue from. ``steps`` ends early, on the schedule of the entire recipe.
    ``report(step, loss)`` is called after every step, ``loss`` in nats per learnt token.
    """
    torch.manual_seed(recipe.seed)
    model = new_model(recipe, len(tokenizer))
    if init is not None:
        model.load_state_dict(init.state_dict())
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (
            torch.optim.Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"),
            recipe.muon_lr,
        ),
        (torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0), recipe.lr),
    ]
    last = recipe.steps if steps is None else min(steps, recipe.steps)
    for step, (x, y) in enumerate(islice(batches(recipe, tokenizer), last), start=1):
        for optimizer, lr in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * learning_rate_scale(step, recipe.steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(x, use_cache=False).last_hidden_state[:, :-1]
            learnt = y[:, 1:] != IGNORED
            loss = functional.cross_entropy(model.lm_head(hidden[learnt]).float(), y[:, 1:][learnt])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        report(step, loss.item())
    return model.eval()


def save(model: Any, path: Path) -> None:
    """Write fp16 weights whose config says float32."""
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    with quiet():
        half.half().save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": "float32"}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="the tokenizer and all four steps")
    what.add_argument("--only", choices=[r.name for r in RECIPES], help="one step (its init must be in --out)")
    parser.add_argument("--out", type=Path, default=Path("build/demo_pair"), help="directory for the models")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    tokenizer = train_tokenizer()
    args.out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    for recipe in RECIPES:
        if args.only not in (None, recipe.name):
            continue
        init = load_model(args.out / recipe.init) if recipe.init else None
        smooth: float | None = None
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(recipe.name, total=recipe.steps)

            def report(step: int, loss: float, task: Any = task, recipe: Recipe = recipe) -> None:
                nonlocal smooth
                smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
                progress.update(task, completed=step, description=f"{recipe.name}: loss {smooth:.4f}")
                if step % 100 == 0:
                    console.print(f"{recipe.name}: step {step}, loss {smooth:.4f}", soft_wrap=True)

            model = train(recipe, tokenizer, init=init, report=report)
        save(model, args.out / recipe.name)
        if recipe.name == "target":
            tokenizer.save_pretrained(args.out / recipe.name)
    console.print(f"wrote {args.out}; to use it, copy its target/ and draft/ to decoder/demo/models/")


if __name__ == "__main__":
    main()
