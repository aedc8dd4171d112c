"""Loads the bundled target, draft and tokenizer: offline, silent, in a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from decoder.demo.tasks import demo_models_dir
from policies.errors import ModelError

PAD, BOS, EOS = 0, 1, 2

# What a model's forward calls its KV cache; transformers renamed the argument within version 5.
CACHE_ARGUMENT = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class Pair(NamedTuple):
    """Two causal language models over one tokenizer (``<bos>`` is not added by it: prompts start with `BOS`)."""

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(dtype: torch.dtype = torch.float32, directory: Path | None = None) -> Pair:
    """The target, the draft and their tokenizer, in evaluation mode on the CPU.

    Weights are stored in fp16 and loaded in ``dtype``. ``directory`` holds ``target/`` (with the tokenizer) and
    ``draft/``; by default the bundled ones. Raises ModelError when a model is missing or cannot be read.
    """
    directory = directory or demo_models_dir()
    with quiet():
        target, draft = (load_model(directory / name, dtype) for name in ("target", "draft"))
    return Pair(target, draft, load_tokenizer(directory / "target"))


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """One causal language model from a local directory, in evaluation mode; raises ModelError if it cannot be read."""
    if not (path / "model.safetensors").is_file():
        raise ModelError(f"no model in {path}: expected config.json and model.safetensors (is the package complete?)")
    try:
        with quiet():
            return LlamaForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    except (OSError, ValueError, SafetensorError) as e:
        raise ModelError(f"cannot load the model in {path}: {e}") from e


def load_tokenizer(path: Path) -> Any:
    """The tokenizer saved in a local directory; raises ModelError if it cannot be read."""
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"no tokenizer in {path}: expected tokenizer.json (is the package complete?)")
    return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt as the pair was trained to see it: `BOS`, then the text."""
    return [BOS, *tokenizer(prompt).input_ids]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside; puts the setting back afterwards."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
