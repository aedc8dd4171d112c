"""The decision procedure of `lenity advise` on rounds with known acceptance and costs, and the command on the pair."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from controller.advise import advise
from controller.cli import app
from controller.speedup import best_block
from policies.errors import TooFewSamples
from storage.records import TokenBlock
from tests.support_blocks import coin_scalars, make_block


def measured(a: float, draft_s: float, slope: float, rounds: int = 400) -> list[TokenBlock]:
    """Rounds of 0 to 8 drafts with constant acceptance; a pass takes 20 ms (1 + slope g), a draft step ``draft_s``."""
    rng = np.random.default_rng(3)
    made = []
    for g in (8, 4, 6, 2, 1, 0) * 4:
        n = rounds // 24
        block = make_block(coin_scalars(np.full(g * n, a)), [g] * n, rng=rng)
        width = np.full(n, g, dtype=np.float32)
        made.append(
            replace(
                block,
                round_rows=np.ones(n, np.uint16),
                round_width=np.full(n, g, np.uint16),
                round_prefill=np.zeros(n, np.uint32),
                round_draft_s=(draft_s * width).astype(np.float32),
                round_verify_s=(0.020 * (1 + slope * width)).astype(np.float32),
                round_overhead_s=np.zeros(n, np.float32),
            )
        )
    return made


def answers(**options: float) -> list[str]:
    return [step.answer for step in advise(measured(**options)).steps]


def test_a_good_pair_is_advised_the_block_length_of_the_closed_form():
    advice = advise(measured(a=0.85, draft_s=0.001, slope=0.0))
    assert advice.acceptance == pytest.approx(0.85, abs=0.03)
    assert advice.draft_cost == pytest.approx(0.05, abs=0.005)
    assert abs(advice.g - best_block(0.85, 0.05, 12)) <= 1
    assert advice.speedup_plain == pytest.approx(advice.speedup_formula, rel=0.05)
    assert [step.answer for step in advice.steps[:3]] == ["high", "cheap", "nearly free"]
    assert advice.steps[-1].answer == "yes"
    assert all(h.gain > 1 for h in advice.helps)
    assert [h.gain for h in advice.helps] == sorted((h.gain for h in advice.helps), reverse=True)


def test_what_is_wrong_is_named():
    assert answers(a=0.1, draft_s=0.003, slope=0.0)[0] == "too low"
    assert answers(a=0.6, draft_s=0.014, slope=0.0)[1] == "too dear"
    assert answers(a=0.8, draft_s=0.001, slope=1.0)[2] == "not free"
    hopeless = advise(measured(a=0.1, draft_s=0.014, slope=0.5))
    assert hopeless.g == 0
    assert [hopeless.steps[3].answer, hopeless.steps[4].answer] == ["none: decode plainly", "not as it is"]


def test_what_helps_most_depends_on_what_limits():
    dear = advise(measured(a=0.9, draft_s=0.010, slope=0.0))
    assert dear.helps[0].change.startswith("a cheaper draft")
    wide = advise(measured(a=0.9, draft_s=0.0002, slope=0.6))
    assert wide.helps[0].change.startswith("verification that is free")


def test_nothing_measured_is_said():
    with pytest.raises(TooFewSamples):
        advise([])


def test_the_command_measures_the_bundled_pair():
    result = CliRunner().invoke(app, ["advise", "--json", "--count", "14", "--max-tokens", "24"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["prompts"] == 14
    assert 0.6 < told["acceptance"] < 0.95
    assert len(told["by_position"]) == 12
    assert told["steps"][0]["question"] == "is acceptance high enough?"


def test_a_file_without_prompts_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "2+2"}\n{"other": 1}\n')
    result = CliRunner().invoke(app, ["advise", "--prompts", str(path)])
    assert result.exit_code != 0
    assert "prompts.jsonl:2" in str(result.exception)
