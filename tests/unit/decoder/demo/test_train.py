from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.demo.pair import EOS, load_model, load_tokenizer
from decoder.demo.tasks import demo_models_dir
from decoder.demo.tokenizer import train_tokenizer
from decoder.demo.train import (
    IGNORED,
    RECIPES,
    SHARD,
    Recipe,
    batches,
    learning_rate_scale,
    new_model,
    save,
    train,
    training_prompts,
)

SMALL = Recipe("small", "draft", 0.15, "wide", hidden=32, layers=1, feed_forward=64, heads=2, steps=40, batch=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    torch.set_num_threads(1)
    return load_tokenizer(demo_models_dir() / "target")


def test_training_the_tokenizer_gives_the_bundled_one() -> None:
    bundled = (demo_models_dir() / "target" / "tokenizer.json").read_text()
    assert json.loads(train_tokenizer().backend_tokenizer.to_str()) == json.loads(bundled)


def test_the_bundled_models_have_the_shape_of_their_recipes(tokenizer: Any) -> None:
    by_name = {recipe.name: recipe for recipe in RECIPES}
    for name in ("target", "draft"):
        config = load_model(demo_models_dir() / name).config
        wanted = new_model(by_name[name], len(tokenizer)).config
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            assert getattr(config, key) == getattr(wanted, key)


def test_every_recipe_continues_one_that_comes_before_it() -> None:
    names = [recipe.name for recipe in RECIPES]
    assert len(names) == len(set(names))
    for i, recipe in enumerate(RECIPES):
        assert recipe.init is None or recipe.init in names[:i]


def test_only_solutions_are_learnt(tokenizer: Any) -> None:
    for x, y in islice(batches(SMALL, tokenizer), 3):
        for asked, learnt in zip(x, y, strict=True):
            told = learnt[learnt != IGNORED]
            assert told[-1] == EOS
            assert tokenizer.decode(told[:-1]).lstrip().startswith(("First", "Initially", "Now", "Here"))
            start = int((learnt != IGNORED).nonzero()[0])
            assert tokenizer.decode(asked[1:start]).endswith("\nAnswer:")
            assert (asked[start : start + len(told)] == told).all()


def test_training_prompts_are_those_of_the_batches(tokenizer: Any) -> None:
    """Over several shards, so that the draws between them are in step as well."""
    recipe = replace(SMALL, steps=3 * SHARD)
    seen = set()
    for x, y in islice(batches(recipe, tokenizer), recipe.steps):
        for asked, learnt in zip(x, y, strict=True):
            seen.add(tokenizer.decode(asked[1 : int((learnt != IGNORED).nonzero()[0])]))
    assert seen == training_prompts(recipe)


def test_training_is_repeatable_and_learns(tokenizer: Any) -> None:
    """Twice the same numbers; the loss starts at chance, log(656) = 6.49 nats, and falls."""
    losses: list[list[float]] = []
    for _ in range(2):
        losses.append([])
        train(SMALL, tokenizer, report=lambda step, loss: losses[-1].append(loss))
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(656), abs=0.15)
    assert losses[0][-1] < losses[0][0] - 0.2


def test_training_can_continue_from_another_model(tokenizer: Any) -> None:
    first = train(SMALL, tokenizer)
    losses: list[float] = []
    train(replace(SMALL, seed=2), tokenizer, init=first, steps=1, report=lambda step, loss: losses.append(loss))
    assert losses[0] < math.log(656) - 0.2


def test_saved_weights_are_half_the_size_and_load_in_full_precision(tokenizer: Any, tmp_path: Path) -> None:
    model = new_model(SMALL, len(tokenizer))
    save(model, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 2.5 * sum(p.numel() for p in model.parameters())
    loaded = load_model(tmp_path)
    assert loaded.config.dtype == torch.float32
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.half().float(), b)


def test_the_learning_rate_warms_up_holds_and_falls_to_zero() -> None:
    assert [learning_rate_scale(s, 1000) for s in (25, 50, 300)] == [0.5, 1.0, 1.0]
    assert learning_rate_scale(651, 1000) == pytest.approx(0.5)
    assert 0 < learning_rate_scale(1000, 1000) < 0.002
