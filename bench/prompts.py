"""Prompts of the decode benchmarks: generated problems, or real questions from a data folder.

The folder of ``--data`` holds ``gsm8k_test.jsonl`` (openai/grade-school-math, MIT) and ``spec_bench_questions.jsonl``
(hemingkx/Spec-Bench, Apache-2.0); they are no part of the repository.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from decoder.demo.pair import load_model, load_tokenizer, prompt_ids
from decoder.demo.problems import make_problem

GSM8K, SPEC_BENCH = "gsm8k_test.jsonl", "spec_bench_questions.jsonl"
COPY = ("summarization", "rag")  # the answer repeats what the prompt says
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class BenchError(Exception):
    """A benchmark cannot run here; says why and what to do."""


class Prompt(NamedTuple):
    """What a model is asked: a name for reports, and token ids."""

    name: str
    ids: list[int]


def bundled_prompts(tokenizer: Any, count: int, seed: int) -> list[Prompt]:
    """Generated word problems, as the bundled pair was trained to see them."""
    rng = random.Random(seed)
    return [Prompt(f"problem {i}", prompt_ids(tokenizer, make_problem(rng).prompt)) for i in range(count)]


def read_lines(data: Path | None, name: str) -> list[dict[str, Any]] | None:
    """The objects of a JSON-lines file of the data folder (None without a folder); BenchError if it cannot be read."""
    if data is None:
        return None
    try:
        return [json.loads(line) for line in (data / name).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as e:
        raise BenchError(
            f"cannot read {data / name}: {e}. The folder of --data holds {GSM8K} (openai/grade-school-math) and "
            f"{SPEC_BENCH} (hemingkx/Spec-Bench); without --data generated problems are used"
        ) from e


class Asker:
    """Texts as prompts of a chat model."""

    def __init__(self, tokenizer: Any, data: Path | None):
        self._tokenizer = tokenizer
        self._gsm8k = read_lines(data, GSM8K)
        self._spec = read_lines(data, SPEC_BENCH)
        self.source = "generated problems" if data is None else "GSM8K and Spec-Bench"

    def ask(self, name: str, text: str) -> Prompt:
        """One user message, in the model's chat template."""
        messages = [{"role": "user", "content": text}]
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return Prompt(name, list(ids))

    def arithmetic(self, count: int) -> list[Prompt]:
        """The first ``count`` questions of GSM8K, or generated problems."""
        if self._gsm8k is None:
            texts = [problem.removesuffix("\nAnswer:") for problem in _problems(count, seed=5)]
            return [self.ask(f"problem {i}", text) for i, text in enumerate(texts)]
        return [self.ask(f"gsm8k {i}", row["question"]) for i, row in enumerate(self._gsm8k[:count])]

    def mixed(self, count: int) -> list[Prompt]:
        """``count`` questions spread evenly over Spec-Bench, or generated problems of both kinds."""
        if self._spec is None:
            return [*self.copying(count // 2, 10**6), *self.chat(count - count // 2, 10**6)]
        step = len(self._spec) / count
        return [self._spec_prompt(self._spec[int(i * step)]) for i in range(count)]

    def copying(self, count: int, longest: int) -> list[Prompt]:
        """Prompts of at most ``longest`` tokens whose answers repeat them: summaries, and answers from passages."""
        if self._spec is None:
            stories = _problems(8 * count, seed=6)
            texts = ["\n".join(stories[8 * i : 8 * i + 8]) for i in range(count)]
            return [self.ask(f"repeat {i}", f"Repeat these problems word by word.\n{t}") for i, t in enumerate(texts)]
        return self._pick(COPY, count, longest)

    def chat(self, count: int, longest: int) -> list[Prompt]:
        """Prompts of at most ``longest`` tokens with free answers, one of each kind in turn."""
        return self.arithmetic(count) if self._spec is None else self._pick(CHAT, count, longest)

    def _spec_prompt(self, row: dict[str, Any]) -> Prompt:
        return self.ask(f"{row['category']} {row['question_id']}", row["turns"][0])

    def _of(self, category: str, longest: int) -> Iterator[Prompt]:
        """Its prompts of at most ``longest`` tokens, in the file's order."""
        assert self._spec is not None
        asked = (self._spec_prompt(row) for row in self._spec if row["category"] == category)
        return (prompt for prompt in asked if len(prompt.ids) <= longest)

    def _pick(self, categories: Sequence[str], count: int, longest: int) -> list[Prompt]:
        rows = {category: self._of(category, longest) for category in categories}
        picked: list[Prompt] = []
        while len(picked) < count and rows:
            for category in list(rows):
                prompt = next(rows[category], None)
                if prompt is None:
                    del rows[category]
                elif len(picked) < count:
                    picked.append(prompt)
        if len(picked) < count:
            raise BenchError(
                f"Spec-Bench has only {len(picked)} prompts of {longest} tokens in {', '.join(categories)}"
            )
        return picked


def _problems(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [make_problem(rng, "hard").prompt for _ in range(count)]


def load_chat_model(directory: Path, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, Any]:
    """A chat model and its tokenizer from a local directory; BenchError if it is not there."""
    if not (directory / "model.safetensors").is_file():
        raise BenchError(f"no model in {directory}: run `make smollm2`, or name its directory with --smollm2")
    return load_model(directory, dtype).to(device), load_tokenizer(directory)
