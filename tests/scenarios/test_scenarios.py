"""Every scenario file is played and judged; what each checks, and why, stands in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.simulate import Run, load_scenario, scenario_files, simulate

HERE = Path(__file__).parent
FILES = scenario_files(HERE)


def failures(run: Run) -> str:
    """What a failed run must say."""
    return "\n".join(
        f"{v.check.quantity} {v.check.how} {v.check.during}: {v.detail}, allowed {v.check.allowed} ({v.check.why})"
        for v in run.verdicts
        if not v.passed
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_controller_does_what_the_scenario_allows(path: Path) -> None:
    scenario = load_scenario(path)
    run = simulate(scenario)
    if scenario.expect == "known_gap" and not run.passed:
        pytest.xfail(f"{scenario.reason}: {failures(run)}")
    assert run.as_expected, failures(run) or "every check holds, but the scenario is meant to fail"


def test_each_wrong_claim_of_the_negative_control_fails() -> None:
    """Not only the scenario as a whole: a kind of check that cannot fail would hide behind the others."""
    run = simulate(load_scenario(HERE / "meant_to_fail.yaml"))
    assert [v.check.quantity for v in run.verdicts if v.passed] == []


def test_there_are_enough_scenarios_and_each_says_why() -> None:
    scenarios = [load_scenario(path) for path in FILES]
    assert len(scenarios) >= 20
    assert [s.name for s in scenarios if s.expect == "fail"] == ["meant_to_fail"]
    assert [path.stem for path in FILES if not path.read_text().startswith("#")] == []
