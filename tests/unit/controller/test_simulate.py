"""The simulator: its text has the acceptance asked for, its rounds are those of a loop, its records are real ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from controller.estimate import CurveEstimator
from controller.simulate import Run, ScenarioError, command, parse_scenario, simulate
from controller.simulation.document import Kind, Scenario
from controller.simulation.judge import judge
from controller.simulation.plant import LeaseStore, Plant
from controller.simulation.plot import plot_run
from controller.simulation.rounds import Texts, chop, chop_deep
from controller.simulation.signals import Signal
from controller.simulation.source import Source, frozen_truth, load_recording, population, save_recording
from policies.errors import PolicyError
from policies.rules import RULES, accept_prob
from storage.records import (
    ACCEPTED,
    EXAMINED,
    ForkRecord,
    KnobRow,
    Lease,
    QualityScore,
    RequestRecord,
    TokenBlock,
    from_fields,
    to_fields,
)

MINIMAL = """
about: A short run for the tests of the runner
duration: 10m
tick: 20s
ttl: 1m
plant:
  rate: 1
  kinds: {chat: {tokens: 40, acceptance: 0.8}}
policy:
  version: lenity/v1
  pool: sim
  objective: {metric: correct, max_loss: 20%, window: 5m}
  leniency: {rules: [threshold]}
  evidence: {label_deadline: 1m, min_labels: 80}
  block: {max: 6}
  pull_back: {cooldown: 1m}
  alerts: {page: []}
checks:
  - {quantity: g, every: [0, 6], why: the policy allows no longer block}
"""


def scenario(**replacements: str) -> Scenario:
    """The minimal scenario with some text replaced, `key=new` for the line that begins with the key."""
    lines = MINIMAL.strip().splitlines()
    for key, text in replacements.items():
        lines = [text if line.strip().startswith(f"{key}:") else line for line in lines]
    return parse_scenario("\n".join(lines), "minimal.yaml")


def kind(**values: object) -> Kind:
    """One kind of request."""
    return Kind.model_validate(values)


def lease(theta: float, *, g: int = 6, rule: str = "threshold", explore: float = 0.0) -> Lease:
    """A lease of these knobs with every fork drawn."""
    return Lease("sim", "default", 1, 1, 1, 0.0, 3600.0, rule, (KnobRow(1, g, theta, 1.0),), (), 0.2, 1.0, 1.0, explore)


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("plausible", [0.0, 0.5, 1.0])
def test_a_population_accepts_as_asked(acceptance: float, plausible: float) -> None:
    """``E_q[min(1, p/q)]`` is the rate, in every context: exact up to rounding."""
    made = population(acceptance, plausible)
    a0 = np.minimum(1, made.scalars.target_prob / np.maximum(made.scalars.draft_prob, 1e-300))
    weight = np.diff(made.cumulative, prepend=0.0)
    assert float((weight * a0).sum()) == pytest.approx(acceptance, abs=1e-9)


def test_drift_equals_the_acceptance_gained_under_every_rule() -> None:
    """The atoms are a real draft and target: E_q[A] - E_q[A0] is the mass that the emitted law has moved."""
    made = population(0.7, 0.5)
    weight = np.diff(made.cumulative, prepend=0.0)
    for rule in RULES.values():
        a0 = accept_prob(rule, made.scalars, 0.0)
        gained = weight * (accept_prob(rule, made.scalars, 0.8) - a0)
        assert gained.min() >= 0
        assert gained.sum() <= 0.3 + 1e-9, rule.name


def test_easy_and_hard_stretches_last_as_long_as_asked() -> None:
    """Mean run lengths of 40 and 10 tokens over 40,000: 800 runs each, so 10 % is three standard errors."""
    spec = {"easy": 0.95, "hard": 0.3, "easy_tokens": 40, "hard_tokens": 10}
    source = Source({"kind": kind(acceptance=spec)})
    tokens = np.full(400, 100)
    which, _ = source.write(np.zeros(400, dtype=np.int64), tokens, 0.0, np.random.default_rng(5))
    runs = np.diff(np.flatnonzero(np.diff(which, prepend=-1)))
    first_is_easy = which[0] == 0
    assert runs[0 if first_is_easy else 1 :: 2].mean() == pytest.approx(40, rel=0.1)
    assert runs[1 if first_is_easy else 0 :: 2].mean() == pytest.approx(10, rel=0.1)


# -- rounds ------------------------------------------------------------------------------------------------------------


def one_by_one(accept: list[bool], lengths: list[int], g: int) -> list[tuple[int, int, int]]:
    """(start, width, emitted) of the rounds as the decoder's loop makes them."""
    rounds, first = [], 0
    for length in lengths:
        at = first
        while at < first + length:
            width = min(g, first + length - at - 1)
            emitted = 1
            while emitted <= width and accept[at + emitted - 1]:
                emitted += 1
            rounds.append((at, width, emitted))
            at += emitted
        first += length
    return rounds


@pytest.mark.parametrize("g", [0, 1, 3, 8])
def test_rounds_at_once_are_those_of_the_loop(g: int) -> None:
    rng = np.random.default_rng(g)
    lengths = rng.integers(1, 30, 60)
    accept = rng.random(int(lengths.sum())) < 0.75
    rounds = chop(Texts.of(lengths), accept, g, np.zeros(len(accept), dtype=bool))
    found = list(zip(rounds.start.tolist(), rounds.width.tolist(), rounds.emitted.tolist(), strict=True))
    assert found == one_by_one(accept.tolist(), lengths.tolist(), g)


@pytest.mark.parametrize(("g", "whole"), [(1, 0), (3, 0), (4, 2), (8, 3), (8, 7)])
def test_rounds_that_are_lenient_at_their_first_positions_are_those_of_the_loop(g: int, whole: int) -> None:
    rng = np.random.default_rng(g)
    lengths = rng.integers(1, 30, 60)
    u = rng.random(int(lengths.sum()))
    by_place = [u < 0.9, u < 0.7, u < 0.5]  # lenient, part of it, lossless
    explore = rng.random(len(u)) < 0.2
    rounds, accept = chop_deep(Texts.of(lengths), *by_place, whole, g, explore)
    found, first = [], 0
    for length in lengths.tolist():
        at = first
        while at < first + length:
            width = min(g + int(explore[at]), first + length - at - 1)
            kept = 0
            while kept < width and by_place[0 if kept < whole else 1 if kept == whole else 2][at + kept]:
                kept += 1
            found.append((at, width, kept + 1))
            at += kept + 1
        first += length
    assert list(zip(rounds.start.tolist(), rounds.width.tolist(), rounds.emitted.tolist(), strict=True)) == found
    assert accept[rounds.examined_at].sum() == sum(emitted - 1 for _, _, emitted in found)


def test_longer_blocks_are_explored_at_about_the_asked_rate() -> None:
    rng = np.random.default_rng(2)
    lengths = np.full(500, 200)
    accept, explore = rng.random(100_000) < 0.6, rng.random(100_000) < 0.1
    for g in (0, 4):
        width = chop(Texts.of(lengths), accept, g, explore).width
        assert np.mean(width == g + 1) == pytest.approx(0.1, abs=0.01)


# -- the plant ---------------------------------------------------------------------------------------------------------


def served(
    theta: float, *, seconds: float = 400.0, rate: float = 2.0, positions: int = 100_000, **spec: object
) -> tuple[list[object], dict[str, float]]:
    """Records and true sums of a plant under one fixed lease."""
    s = scenario()
    plant_spec = s.plant.model_copy(
        update={"kinds": {"k": kind(acceptance=0.7, tokens=60, **spec)}, "report_positions": positions}
    )
    plant = Plant(plant_spec.model_copy(update={"rate": Signal((0.0,), (rate,))}), "sim", "correct", 3)
    store = LeaseStore(lease(theta), 1e9)
    records: list[object] = []
    sums: dict[str, float] = {}
    for i in range(round(seconds / 20)):
        arrived, tick = plant.step(i * 20.0, i * 20.0 + 20.0, store)
        records += arrived
        for name, value in tick.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    late, _ = plant.step(1e7, 1e7 + 1e-6, store)
    return records + list(late), sums


def test_records_add_up_to_the_truth() -> None:
    """Touches, tokens and passes in the records are those that happened; every fork and score belongs to a request."""
    records, sums = served(0.9)
    requests = {r.request_id: r for r in records if isinstance(r, RequestRecord)}
    assert len(requests) == sums["requests"]
    assert sum(r.tokens for r in requests.values()) == sums["tokens"]
    assert sum(r.target_passes for r in requests.values()) == sums["rounds"]
    assert sum(r.touches for r in requests.values() if r.arm == "lenient") == sums["touches"]
    forks = [r for r in records if isinstance(r, ForkRecord)]
    assert len(forks) == sums["touched"] == sum(r.arm != "untouched" for r in requests.values())
    assert {r.request_id for r in records if isinstance(r, QualityScore)} == {f.request_id for f in forks}
    held = np.mean([r.arm == "holdback" for r in requests.values() if r.arm != "untouched"])
    assert held == pytest.approx(0.2, abs=0.06)  # about 600 touched requests: 3.7 standard errors


def test_every_record_passes_the_stream_and_its_checks() -> None:
    records, _ = served(0.9, seconds=100)
    kinds = {type(r) for r in records}
    assert kinds == {TokenBlock, RequestRecord, ForkRecord, QualityScore}
    for record in records:
        assert type(from_fields(to_fields(record))) is type(record)  # type: ignore[arg-type]


def test_lossless_knobs_touch_nothing() -> None:
    records, sums = served(0.0)
    assert sums["touches"] == 0
    assert {r.arm for r in records if isinstance(r, RequestRecord)} == {"untouched"}


@pytest.mark.parametrize("rule", ["threshold", "token_v3", "forgive"])
def test_estimates_from_the_plant_agree_with_the_exact_truth(rule: str) -> None:
    """Telemetry at theta = 0 predicts reach and touches at another knob on frozen rounds, within 4 standard errors."""
    records, _ = served(0.0, seconds=300.0)
    estimator = CurveEstimator(rule, 6, half_life_rounds=1e9)
    for block in records:
        if isinstance(block, TokenBlock):
            estimator.add(block)
    curve = estimator.curve()
    row = int(np.flatnonzero(curve.settings.theta > 0.79)[0])
    theta = float(curve.settings.theta[row])
    truth = frozen_truth(kind(acceptance=0.7), rule, theta, 1.0, 6, rounds=60_000, rng=np.random.default_rng(1))
    assert np.all(np.abs(curve.reach[row] - truth.reach) <= 4 * curve.reach_se[row] + 0.008)
    assert np.all(np.abs(curve.touches[row] - truth.touches) <= 4 * curve.touches_se[row] + 0.008)
    examined = estimator.acceptance
    assert examined == pytest.approx(0.7, abs=0.015)
    drafted = sum(len(b.flags) for b in records if isinstance(b, TokenBlock))
    accepted = sum(int(np.count_nonzero(b.flags & ACCEPTED)) for b in records if isinstance(b, TokenBlock))
    assert accepted / drafted < 0.45, "accepted / drafted is another thing: the negative control"


def test_a_worker_whose_lease_ended_is_lossless_at_its_last_block_length() -> None:
    s = scenario()
    plant = Plant(s.plant, "sim", "correct", 1)
    store = LeaseStore(lease(0.9, g=5), 30.0)
    _, first = plant.step(0.0, 20.0, store)
    _, later = plant.step(40.0, 60.0, store)
    assert first.knobs is not None and later.knobs is not None
    assert (first.knobs.g, first.knobs.theta) == (5, 0.9)
    assert (later.knobs.g, later.knobs.theta, later.sums["leased"]) == (5, 0.0, 0)


def test_a_restart_counts_blocks_from_zero_under_a_new_boot() -> None:
    s = scenario()
    plant = Plant(s.plant, "sim", "correct", 1)
    store = LeaseStore(lease(0.5), 1e9)
    before, _ = plant.step(0.0, 20.0, store)
    plant.restart("w0")
    after, _ = plant.step(20.0, 40.0, store)
    numbers = [(r.boot, r.seq) for r in (*before, *after) if isinstance(r, TokenBlock)]
    assert numbers == [("b0", 0), ("b1", 0)]


def test_a_recording_is_replayed_in_its_order(tmp_path: Path) -> None:
    """Scalars saved from blocks come back as the text of a recorded kind, position by position."""
    records, _ = served(0.0, seconds=40)
    blocks = [r for r in records if isinstance(r, TokenBlock)]
    save_recording(tmp_path / "text.npz", blocks)
    stored = load_recording(tmp_path / "text.npz")
    assert len(stored.slip) == sum(len(b.flags) for b in blocks)
    source = Source({"k": kind(acceptance={"recorded": "text.npz"})}, tmp_path)
    which, atom = source.write(np.zeros(2, dtype=np.int64), np.array([5, 7]), 0.0, np.random.default_rng(0))
    assert which.tolist() == [-1] * 12
    assert atom.tolist() == list(range(12))
    np.savez(tmp_path / "bad.npz", target_prob=np.ones(3))
    with pytest.raises(ValueError, match="no column"):
        load_recording(tmp_path / "bad.npz")


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> Run:
    """The minimal scenario, played."""
    return simulate(scenario())


def test_a_run_is_repeated_exactly_and_another_seed_is_another_run(run: Run) -> None:
    again, other = simulate(scenario(), wire=True), simulate(scenario(), seed=9)
    for name in ("requests", "g", "theta", "tau_allowed", "loss"):
        assert np.array_equal(run.series[name], again.series[name], equal_nan=True), name
    assert not np.array_equal(run.series["requests"], other.series["requests"])


def test_one_run_reports_verdicts_and_a_picture(run: Run, tmp_path: Path) -> None:
    assert run.passed and run.outcome == "passes"
    assert run.to_json()["checks"][0]["passed"] is True
    json.dumps(run.to_json(), allow_nan=False)
    plot_run(run, tmp_path / "plots" / "run.png")
    assert (tmp_path / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        ("{quantity: g, every: [0, 6], why: all of them}", True),
        ("{quantity: g, some: [7, 9], why: none of them}", False),
        ("{quantity: requests, total: [300, 900], why: one a second}", True),
        ("{quantity: speed, mean: [5, null], why: impossible}", False),
        ("{quantity: state, every: [measured], why: not at first}", False),
        ("{quantity: state, mean: [measured], why: words have no mean}", False),
        ("{quantity: state, some: [certified], why: before any label}", True),
        ("{quantity: g, during: [20m, 30m], every: [0, 9], why: after the end}", False),
        ("{quantity: plain, switches: [0, 2], why: not much changes}", True),
        ("{quantity: unheard_of, last: [0, 1], why: nobody records it}", False),
    ],
)
def test_checks_can_pass_and_fail(run: Run, check: str, passed: bool) -> None:
    other = scenario(**{"- {quantity": f"  - {check}"})
    assert [v.passed for v in judge(other, run.series)] == [passed]


def test_expectations_decide_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MINIMAL.replace("10m", "1m")
    wrong = text.replace("every: [0, 6]", "every: [50, 60]")
    for name, content, code in (
        ("good", text, 0),
        ("wrong", wrong, 1),
        ("meant", wrong + "expect: fail\nreason: on purpose\n", 0),
        ("not_failing", text + "expect: fail\nreason: on purpose\n", 1),
        ("gap", wrong + "expect: known_gap\nreason: to be built\n", 0),
    ):
        path = tmp_path / f"{name}.yaml"
        path.write_text(content)
        assert command(path) == code, name
    assert command(tmp_path, as_json=True) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert {r["scenario"]: r["as_expected"] for r in json.loads(last)} == {
        "gap": True, "good": True, "meant": True, "not_failing": False, "wrong": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("rate: 1", "rat: 1", 6, "unknown key"),
        ("duration: 10m", "duration: 10", 2, "needs a unit"),
        ("ttl: 1m", "ttl: 30s", 1, "two ticks"),
        ("acceptance: 0.8", "acceptance: {easy: 0.9}", 7, "Field required"),
        ("every: [0, 6]", "every: [6, 0]", 18, "low end"),
        ("every: [0, 6]", "every: [0, 6], mean: [0, 6]", 18, "exactly one"),
        ("rate: 1", "rate: [[1h, 2], [0s, 1]]", 6, "go back"),
        ("tick: 20s", "tick: 20s\ntick: 30s", 4, "given once"),
    ],
)
def test_a_bad_scenario_names_file_and_line(old: str, new: str, line: int, message: str) -> None:
    with pytest.raises(ScenarioError, match=message) as caught:
        parse_scenario(MINIMAL.strip().replace(old, new), "bad.yaml")
    assert caught.value.line == line
    assert str(caught.value).startswith(f"bad.yaml:{line}: ")


def test_a_bad_policy_inside_names_the_line_of_the_scenario() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_scenario(MINIMAL.strip().replace("max_loss: 20%", "max_los: 20%"), "bad.yaml")
    assert (caught.value.line, caught.value.key) == (11, "objective.max_los")


def test_a_bad_edit_is_refused_and_the_last_good_policy_stays() -> None:
    events = "events: [{at: 2m, policy: {objective: {max_loss: 10%}}}, {at: 4m, policy: {objective: {max_loss: 2}}}]"
    run = simulate(parse_scenario(MINIMAL.strip() + "\n" + events, "edited.yaml"))
    assert len(run.refused_policies) == 1
    assert run.series["max_loss"][-1] == pytest.approx(0.1)


def test_signals_are_steps_or_straight_lines() -> None:
    steps, lines = Signal((0.0, 60.0), (1.0, 3.0)), Signal((0.0, 60.0), (1.0, 3.0), steps=False)
    assert [steps.at(t) for t in (-5.0, 0.0, 59.9, 60.0, 1e9)] == [1, 1, 1, 3, 3]
    assert [lines.at(t) for t in (-5.0, 30.0, 1e9)] == [1, 2, 3]


def test_flags_of_a_block_are_consistent() -> None:
    """Accepted drafts are examined, at most one examined draft of a round is not accepted, and it is the last one."""
    records, _ = served(0.9, seconds=60)
    for block in records:
        if isinstance(block, TokenBlock):
            examined, accepted = (block.flags & EXAMINED) > 0, (block.flags & ACCEPTED) > 0
            assert not np.any(accepted & ~examined)
            key = block.round.astype(np.int64) << 16 | block.request
            for k in np.unique(key):
                of = key == k
                assert np.count_nonzero(examined[of] & ~accepted[of]) <= 1
                assert np.array_equal(examined[of], np.sort(examined[of])[::-1])
