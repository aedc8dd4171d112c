"""Loads models for decoding from local directories, and refuses pairs that do not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from decoder.attention import use_grouped
from decoder.demo.pair import load_model, load_tokenizer, quiet
from decoder.demo.tasks import demo_models_dir
from decoder.drafters import Drafter, ModelDrafter, NgramDrafter
from decoder.generate import Engine
from policies.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_engine(
    target: Path | None = None,
    draft: Path | None = None,
    *,
    ngram: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    static_length: int | None = None,
    compiler: str | None = None,
) -> tuple[Engine, Drafter, Any]:
    """The engine, its drafter and the tokenizer, from model directories (None: the bundled ones).

    ``ngram`` drafts without a model. ``device`` and ``dtype`` (a name of `DTYPES`) are those of both models;
    ``static_length`` and ``compiler`` are options of `decoder.cache.CachedModel`. Only ids of the tokenizer can come
    out. Raises ModelError for a model that cannot be read or used, a draft with another tokenizer, and options that
    cannot work here.
    """
    place = _device(device)
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    options: dict[str, Any] = {"static_length": static_length, "compiler": compiler}
    bundled = demo_models_dir()
    target, draft = target or bundled / "target", draft or bundled / "draft"
    model, tokenizer = _model(target, DTYPES[dtype], place), load_tokenizer(target)
    if ngram:
        proposer: Drafter = NgramDrafter()
    else:
        check_tokenizers(tokenizer, _tokenizer_of(draft, target))
        proposer = ModelDrafter(_model(draft, DTYPES[dtype], place), **options)
    known = max(tokenizer.get_vocab().values()) + 1
    if proposer.vocab_size is not None and proposer.vocab_size < known:
        raise ModelError(f"the draft model in {draft} has {proposer.vocab_size} ids; the tokenizer needs {known}")
    ends = end_ids(model, tokenizer)
    return Engine(model, proposer, eos_ids=ends, device=place, vocab_size=known, **options), proposer, tokenizer


def check_tokenizers(target: Any, draft: Any) -> None:
    """Raise ModelError unless both tokenizers give every id the same token; says the first id that differs.

    Ids are what drafting and verifying exchange: two vocabularies of one size with other words in them would decode,
    and mean nothing.
    """
    mine, other = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    for i in sorted(mine.keys() | other.keys()):
        if mine.get(i) != other.get(i):
            said = [f"{ids[i]!r}" if i in ids else "no token" for ids in (mine, other)]
            raise ModelError(
                f"the draft model has another tokenizer: id {i} is {said[0]} to the target and {said[1]} to the draft "
                f"({len(mine)} and {len(other)} tokens); use a draft model over the target's tokenizer, or n-grams"
            )


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer, as model and tokenizer say (none, one or several)."""
    found: set[int] = set()
    for said in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found |= {said} if isinstance(said, int) else set(said or ())
    return frozenset(found)


def _tokenizer_of(draft: Path, target: Path) -> Any:
    """The draft's tokenizer; the target's where they lie side by side, as our pairs do, and the draft has none."""
    for path in (draft, draft.parent / "target"):
        if (path / "tokenizer.json").is_file():
            return load_tokenizer(path)
    raise ModelError(
        f"no tokenizer in {draft}: cannot tell whether it is that of {target}; put the draft's tokenizer.json there"
    )


def _model(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    if path.parent == demo_models_dir():
        return load_model(path, dtype).to(device)
    if not (path / "config.json").is_file():
        raise ModelError(f"no model in {path}: expected config.json and weights")
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval().to(device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as e:
        raise ModelError(f"cannot load the model in {path}: {e!s:.300}") from e
    use_grouped(model)
    return model


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ModelError(f"unknown device {name!r}; write cpu, cuda or cuda:0") from e
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ModelError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device
