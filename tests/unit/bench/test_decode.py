"""The decode benchmarks count, time and compare what they say, on prompts that they name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import decode, equality, gpu
from bench.common import CPU, WALL, Clock, Method, Probe, Run, Timings, interleave, library, ours
from bench.prompts import Asker, BenchError, Prompt, bundled_prompts, load_chat_model, read_lines
from decoder.demo.pair import EOS, PAD
from decoder.generate import Knobs
from tests.decoding import engine, pair


def timings(**methods: Sequence[Sequence[float]]) -> Timings:
    """Per method and prompt the CPU seconds of each repeat, for ten tokens a run; the first pass takes 0.1 s."""
    made = Timings(CPU)
    for method, prompts in methods.items():
        for i, repeats in enumerate(prompts):
            for seconds in repeats:
                run = Run([7] * 10, 5, seconds=(2 * seconds, seconds), inside=seconds / 2, first=0.1)
                made.add(method, f"prompt {i}", run)
    return made


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_medians_and_its_spread_that_of_the_repeats() -> None:
    found = timings(a=[[1.0, 1.0, 9.0]], b=[[2.0, 3.0, 3.6]])
    assert found.ratio("a", "b", CPU) == (3.0, 0.4, 3.0)
    assert found.ratio("b", "a", CPU).value == 0.333


def test_prompts_add_up_and_do_not_average_ratios() -> None:
    found = timings(a=[[1.0], [1.0]], b=[[1.0], [5.0]])
    assert found.ratio("a", "b", CPU).value == 3.0
    assert found.seconds_per_token("b", WALL) == pytest.approx(12 / 20)


def test_decoding_alone_leaves_out_the_pass_that_reads_the_prompt() -> None:
    found = timings(a=[[1.0]], b=[[1.9]])
    assert found.decode_ratio("a", "b").value == 2.0
    assert found.ratio("a", "b").value == 1.9


def test_overhead_compares_with_the_time_inside_the_models() -> None:
    low, high = round(2.0 / 0.95, 3), round(1.0 / 0.45, 3)
    assert timings(a=[[1.1, 2.1]]).overhead("a")[1:] == (low, high)


def test_a_missed_goal_is_named_and_a_figure_that_was_not_measured_is_not() -> None:
    figures = decode.Figures(decode.Setup("cpu", torch.float32, Clock(), lambda _: None))
    figures.values = {"ours_vs_assisted": 1.24, "overhead_bundled": 1.26}
    assert figures.missed() == ["ours_vs_assisted is 1.24, goal >= 1.25", "overhead_bundled is 1.26, goal <= 1.25"]
    figures.values = {"ours_vs_assisted": 1.25, "overhead_bundled": 1.25}
    assert figures.missed() == []


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_passes_are_counted_and_the_model_is_left_as_it_was() -> None:
    """Plain decoding needs one target pass a token, of ours and of the library."""
    prompts = bundled_prompts(pair().tokenizer, 2, seed=1)
    before = pair().target.forward
    methods = [
        ours("plain", engine(), Knobs.lossless(0), 12),
        ours("ours", engine(), Knobs.lossless(4), 12),
        library("generate", pair().target, EOS, PAD, 12),
    ]
    found = interleave(methods, prompts, [pair().target, pair().draft], Clock(), repeats=2)
    assert found.passes("plain") == found.passes("generate") == found.tokens("plain") == 24
    assert found.passes("ours") < 24
    assert found.same_output("ours", "generate") == (2, 2)
    assert found.overhead("ours").low > 1
    assert pair().target.forward == before


def test_every_method_sees_every_prompt_in_each_repeat_in_a_rotating_order() -> None:
    seen: list[tuple[str, int]] = []

    def method(name: str) -> Method:
        def decode(ids: list[int]) -> list[int]:
            seen.append((name, ids[0]))
            pair().target(input_ids=torch.tensor([[1]]))
            return ids

        return Method(name, decode)

    prompts = [Prompt("x", [3]), Prompt("y", [4])]
    interleave([method("a"), method("b")], prompts, [pair().target], Clock(), repeats=2)
    order = "".join(name for name, _ in seen[2:])
    assert order == "abbabaab"  # after the warm-up
    assert sorted(seen[2:]) == sorted(2 * [(m, t) for m in "ab" for t in (3, 4)])


def test_an_assistant_is_put_back_as_it_was() -> None:
    """The library adapts an assistant's settings and keeps them: the next run would not be the same."""
    config = pair().draft.generation_config
    kept = vars(config).copy()
    prompt = bundled_prompts(pair().tokenizer, 1, seed=1)[0].ids
    for count in (None, 3):
        found = library("a", pair().target, EOS, PAD, 8, assistant_model=pair().draft, assistant_tokens=count)
        assert found.decode(prompt) == library("g", pair().target, EOS, PAD, 8).decode(prompt)
        assert vars(config) == kept


def test_more_drafted_tokens_mean_fewer_passes_of_the_library() -> None:
    """So `assistant_tokens` does reach the library."""
    prompt = bundled_prompts(pair().tokenizer, 1, seed=2)[0].ids
    passes = []
    for count in (1, 6):
        with Probe(pair().target, Clock()).installed() as probe:
            library("a", pair().target, EOS, PAD, 40, assistant_model=pair().draft, assistant_tokens=count).decode(
                prompt
            )
            passes.append(probe.passes)
    assert passes[1] < passes[0]


# -- prompts -----------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer that makes one token of every word."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return list(range(len(messages[0]["content"].split())))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A small data folder: two questions of each category, the second one long."""
    rows = [
        {"question_id": 10 * i + j, "category": category, "turns": ["word " * (3 + 100 * j), "more"]}
        for i, category in enumerate([*decode_categories(), "qa"])
        for j in range(2)
    ]
    (tmp_path / "spec_bench_questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "How many now?", "answer": "#### 2"}\n')
    return tmp_path


def decode_categories() -> list[str]:
    from bench.prompts import CHAT, COPY

    return [*COPY, *CHAT]


def test_prompts_take_turns_over_their_categories_and_keep_to_the_length(data: Path) -> None:
    asker = Asker(Words(), data)
    assert [p.name.split()[0] for p in asker.copying(2, 50)] == ["summarization", "rag"]
    assert [p.name.split()[0] for p in asker.chat(3, 50)] == ["writing", "roleplay", "reasoning"]
    assert max(len(p.ids) for p in asker.chat(8, 50)) == 3
    with pytest.raises(BenchError, match="only 2 prompts of 50 tokens in summarization, rag"):
        asker.copying(3, 50)
    assert len({p.name for p in asker.mixed(11)}) == 11
    assert asker.arithmetic(1)[0] == Prompt("gsm8k 0", [0, 1, 2])


def test_without_a_data_folder_generated_problems_stand_in() -> None:
    asker = Asker(Words(), None)
    assert asker.source == "generated problems"
    assert [len(asker.copying(2, 10)), len(asker.chat(3, 10)), len(asker.mixed(5)), len(asker.arithmetic(4))] == [
        2,
        3,
        5,
        4,
    ]


def test_a_data_folder_without_the_files_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"gsm8k_test\.jsonl"):
        read_lines(tmp_path, "gsm8k_test.jsonl")
    with pytest.raises(BenchError, match="make smollm2"):
        load_chat_model(tmp_path, torch.float32)


# -- equality ----------------------------------------------------------------------------------------------------------


def test_a_text_that_differs_is_named_with_its_first_place_and_the_margin_there() -> None:
    prompts = bundled_prompts(pair().tokenizer, 2, seed=3)
    reference = library("generate", pair().target, EOS, PAD, 12)

    def broken(ids: list[int]) -> list[int]:
        tokens = reference.decode(ids)
        return [*tokens[:5], (tokens[5] + 1) % 100, *tokens[6:]] if ids == prompts[1].ids else tokens

    found = equality.compare(pair().target, prompts, reference, [Method("broken", broken)])
    assert (found["prompts"], found["equal"], found["tokens"]) == (2, 1, 24)
    [difference] = found["differences"]
    assert (difference["prompt"], difference["method"], difference["position"]) == ("problem 1", "broken", 5)
    assert difference["logit_margin"] > 0


def test_a_text_that_ends_early_differs_where_it_ends() -> None:
    prompts = bundled_prompts(pair().tokenizer, 1, seed=3)
    reference = library("generate", pair().target, EOS, PAD, 12)
    found = equality.compare(
        pair().target, prompts, reference, [Method("short", lambda ids: reference.decode(ids)[:4])]
    )
    assert found["differences"][0]["position"] == 4


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_bundled_pair_gives_every_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command at its smallest, on a machine without SmolLM2: one JSON object on the last line."""
    tiny = decode.QUICK._replace(repeats=1, pilot_prompts=1, prompts=2, tokens=8, lengths=(2,))
    monkeypatch.setattr(decode, "QUICK", tiny)
    assert decode.main(["--quick", "--json", "--smollm2", "nowhere"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    keys = {"ours_vs_assisted", "ours_vs_plain", "token_v3_vs_plain", "overhead_bundled", "batch4_vs_1"}
    assert keys <= found.keys() and all(found[key] > 0 for key in keys)
    assert found["bundled"]["same_output_as_generate"] == [2, 2] and found["batch"]["same_output"] == [2, 2]
    assert found["smollm2"] is None and "overhead_smollm2" not in found
    assert "make smollm2" in printed.err and "no --data DIR" in printed.err


def test_the_real_model_gives_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled target stands in for SmolLM2."""
    monkeypatch.setattr(decode, "load_chat_model", lambda *_: (pair().target, WordsOfThePair()))
    setup = decode.Setup("cpu", torch.float32, Clock(), lambda _: None)
    figures = decode.Figures(setup)
    size = decode.FULL._replace(real_repeats=2, real_prompts=1, real_tokens=6, lookups=(3,))
    decode.smollm2(size, setup, Path(), None, figures)
    found = figures.json()
    assert found["ngram_vs_prompt_lookup"] == min(found[f"ngram_vs_prompt_lookup_{kind}"] for kind in ("copy", "chat"))
    assert found["overhead_smollm2"] == max(found[f"overhead_smollm2_{kind}"] for kind in ("copy", "chat"))
    assert found["smollm2"]["copy"]["methods"].keys() == {"plain", "generate", "ngram 3", "lookup 3"}


class WordsOfThePair:
    """The pair's tokenizer, with a chat template that adds nothing."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return list(pair().tokenizer(messages[0]["content"]).input_ids)[:60]


def test_without_a_gpu_the_gpu_script_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "sees no GPU here" in capsys.readouterr().err
    assert gpu.main(["--device", "cpu"]) == 2
    assert "python -m bench.decode" in capsys.readouterr().err
    assert gpu.main(["--device", "toaster"]) == 2
    assert "no device" in capsys.readouterr().err


def test_the_gpu_script_measures_on_the_device_and_in_the_type_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def measure(args: argparse.Namespace, setup: decode.Setup, real_dtype: torch.dtype) -> dict[str, Any]:
        seen.append((setup.device, setup.dtype, setup.clock.kind, real_dtype, args.quick))
        return {"ours_vs_plain": 2.0}

    monkeypatch.setattr(gpu, "refusal", lambda _: None)
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert gpu.main(["--device", "cuda:0", "--dtype", "float16", "--quick"]) == 0
    assert seen == [("cuda:0", torch.float16, WALL, torch.float16, True)]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == {"ours_vs_plain": 2.0, "gpu": "a GPU", "dtype": "float16"}


def test_caches_of_fixed_length_are_measured_beside_those_that_grow() -> None:
    size = decode.QUICK._replace(repeats=1, prompts=2, tokens=12)
    found = gpu.static(size, decode.Setup("cpu", torch.float32, Clock(), lambda _: None), 256, None, 3)
    assert found["same_output"] == (2, 2)
    assert found["tokens_per_s"].keys() == {"plain", "ours", "plain_static", "ours_static"}
    assert found["ours_static_vs_ours"] > 0


def test_a_compiler_without_fixed_caches_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--compiler", "inductor"])
    assert "--compiler needs --static-length" in capsys.readouterr().err
