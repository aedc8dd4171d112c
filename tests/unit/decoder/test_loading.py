"""Pairs that do not belong together are refused, and padded ones work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from decoder.demo.tasks import demo_models_dir
from decoder.drafters import ModelDrafter
from decoder.generate import Engine, Knobs
from decoder.loading import check_tokenizers, end_ids, load_engine
from policies.errors import ModelError
from tests.decoding import EOS, pair, prompts, run, tiny


def tokenizer(*words: str) -> Any:
    vocab = {word: i for i, word in enumerate(("<unk>", "<eos>", *words))}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def test_the_same_tokenizer_is_accepted() -> None:
    check_tokenizers(tokenizer("a", "b"), tokenizer("a", "b"))
    check_tokenizers(pair().tokenizer, pair().tokenizer)


def test_an_equally_large_but_different_tokenizer_is_refused_with_the_first_difference() -> None:
    with pytest.raises(ModelError, match=r"id 3 is 'b' to the target and 'c' to the draft \(4 and 4 tokens\)"):
        check_tokenizers(tokenizer("a", "b"), tokenizer("a", "c"))


def test_a_larger_tokenizer_is_refused_too() -> None:
    with pytest.raises(ModelError, match="id 4 is no token to the target and 'c' to the draft"):
        check_tokenizers(tokenizer("a", "b"), tokenizer("a", "b", "c"))


def saved(path: Path, words: tuple[str, ...], **changes: Any) -> Path:
    tiny(**({"vocab_size": 2 + len(words), "eos_token_id": 1} | changes)).save_pretrained(path)
    tokenizer(*words).save_pretrained(path)
    return path


def test_directories_are_checked_when_they_are_loaded(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", ("x", "y"))
    padded = saved(tmp_path / "b", ("x", "y"), vocab_size=9)
    engine, drafter, _ = load_engine(target, padded)
    assert drafter.vocab_size == 9 and engine.eos_ids == {1}
    assert max(run(engine, [2], Knobs.lossless(3), max_tokens=40).token_ids) < 4
    with pytest.raises(ModelError, match="another tokenizer"):
        load_engine(target, saved(tmp_path / "c", ("x", "z")))
    (padded / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer in"):
        load_engine(target, padded)
    with pytest.raises(ModelError, match="expected config"):
        load_engine(tmp_path / "nothing")
    with pytest.raises(ModelError, match="has 3 ids; the tokenizer needs 4"):
        load_engine(target, saved(tmp_path / "d", ("x", "y"), vocab_size=3))


def test_the_bundled_pair_loads_in_another_dtype_and_ends_at_its_end_token() -> None:
    engine, drafter, words = load_engine(dtype="bfloat16")
    assert engine.target.model.dtype == torch.bfloat16 and engine.eos_ids == {EOS}
    assert drafter.vocab_size == 656 and end_ids(pair().target, words) == {EOS}
    done = run(engine, prompts(1)[0], Knobs.lossless(4), max_tokens=8)
    assert len(done.token_ids) == 8
    by_name, ngrams, _ = load_engine(demo_models_dir() / "target", ngram=True)
    assert ngrams.deterministic and by_name.eos_ids == {EOS}


@pytest.mark.parametrize(("options", "why"), [
    ({"device": "cuda:7"}, "is not there"),
    ({"device": "toaster"}, "unknown device"),
    ({"dtype": "int3"}, "unknown dtype"),
    ({"compiler": "inductor"}, "static_length"),
])  # fmt: skip
def test_options_that_cannot_work_here_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        load_engine(**options)


def test_padding_ids_of_two_sizes_never_come_out_even_if_they_are_what_the_models_like_best() -> None:
    target, draft = tiny(vocab_size=48), tiny(seed=2, vocab_size=64)
    text = list(range(8))
    free = run(Engine(target, None), text, Knobs.lossless(0), max_tokens=150)
    assert max(free.token_ids) >= 40  # else this tests nothing
    for knobs in (Knobs.lossless(3), Knobs(g=3, rule="threshold", theta=1.0)):
        done = run(Engine(target, ModelDrafter(draft), vocab_size=40), text, knobs, max_tokens=150)
        assert max(done.token_ids) < 40 and len(set(done.token_ids)) > 10
