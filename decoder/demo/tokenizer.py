"""Trains the pair's tokenizer: byte-level BPE over generated problems, every digit its own token."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decoder.demo.problems import Domain, Style, make_problem

SEED = 99
PROBLEMS = 1500  # of each domain and style
DOMAINS: tuple[Domain, ...] = ("easy", "wide")
STYLES: tuple[Style, ...] = ("target", "draft")
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}  # ids 0, 1, 2


def corpus() -> list[str]:
    """The texts it is trained on, always the same ones."""
    rng = random.Random(SEED)
    drawn = (make_problem(rng, d, s) for _ in range(PROBLEMS) for d in DOMAINS for s in STYLES)
    return [problem.prompt + problem.solution for problem in drawn]


def train_tokenizer() -> Any:
    """A fast tokenizer of at most 1024 tokens (the texts need only about 650)."""
    tokenizer = Tokenizer(models.BPE())
    # A word, a digit, punctuation (each with or without a space before it), or white space.
    pattern = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL)
