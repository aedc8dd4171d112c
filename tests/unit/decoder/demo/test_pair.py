from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decoder.demo.pair import BOS, EOS, PAD, Pair, load_pair, load_tokenizer, prompt_ids
from decoder.demo.tasks import demo_models_dir
from policies.errors import ModelError

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.set_num_threads(1)
    return load_pair()


def test_the_pair_loads_silently_from_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar and no warning reach the terminal: a demo's table stays whole."""
    target, draft, tokenizer = load_pair()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert target.config.vocab_size == draft.config.vocab_size >= len(tokenizer)


def test_weights_run_in_the_precision_asked_for(pair: Pair) -> None:
    assert {p.dtype for m in pair[:2] for p in m.parameters()} == {torch.float32}
    assert {p.dtype for p in load_pair(torch.bfloat16).draft.parameters()} == {torch.bfloat16}


def test_all_files_together_stay_below_ten_megabytes() -> None:
    assert sum(p.stat().st_size for p in demo_models_dir().rglob("*") if p.is_file()) < 10 * MEGABYTE


def test_the_tokenizer_is_stored_once() -> None:
    assert [p.parent.name for p in demo_models_dir().rglob("tokenizer.json")] == ["target"]


def test_every_digit_is_a_token_and_text_survives_the_round_trip(pair: Pair) -> None:
    text = "Question: Mia has 205 eggs.\nAnswer:"
    ids = pair.tokenizer(text).input_ids
    pieces = [pair.tokenizer.decode([i]).strip() for i in ids]
    assert [p for p in pieces if p.isdigit()] == ["2", "0", "5"]
    assert pair.tokenizer.decode(ids) == text


def test_prompts_begin_with_the_token_that_training_put_there(pair: Pair) -> None:
    ids = prompt_ids(pair.tokenizer, "Question:")
    assert ids[0] == BOS == pair.tokenizer.bos_token_id
    assert (pair.tokenizer.eos_token_id, pair.tokenizer.pad_token_id) == (EOS, PAD)
    assert ids[1:] == pair.tokenizer("Question:").input_ids


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model in .*target"):
        load_pair(directory=tmp_path)


def test_a_broken_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=r"cannot load the model in .*target"):
        load_pair(directory=tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(tmp_path)
