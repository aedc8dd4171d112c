"""The sweep of rules over knobs: what is swept, the log that can go on, figures, files, and small real runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from decoder import frontier_report
from decoder.cli import app
from decoder.demo.pair import prompt_ids
from decoder.demo.simulation import LOSSLESS, Setting, decode, fresh_problems
from decoder.frontier import (
    LOG,
    Log,
    Sweep,
    check_pairing,
    checksum_of_tasks,
    load_tasks,
    measure_cost_ratio,
    run_sweep,
    settings_of,
)
from decoder.frontier_report import INTERRUPTED, run_frontier, tables, write_files
from decoder.frontier_run import Columns, run_point
from decoder.frontier_table import (
    Summary,
    best_block,
    compare,
    loss_interval,
    ratio_interval,
    saved_interval,
    summarise,
)
from decoder.generate import Knobs
from policies.published import PUBLISHED
from policies.rules import RULES, Scalars, register
from tests.decoding import engine, pair, run

SWEEP = Sweep(pair="p", tasks="t", n=4, domain="easy", temperature=1.0, g=2, seed=3)
HALF = Setting("threshold", 0.5)
QUIET = Console(quiet=True)


@pytest.fixture
def toy_rule() -> Iterator[str]:
    """A rule of somebody else's, registered in one place for one test."""

    @register("coin", "a test", knobs=(0.25, 0.75))
    def _coin(s: Scalars, theta: Any, a0: Any) -> Any:
        return a0 * 0 + theta

    yield "coin"
    del RULES["coin"]


def columns(passes: list[int], exact: list[int], tokens: int = 10, text: int = 1) -> Columns:
    """Columns of one setting; requests are touched where the score is 0 or ``text`` is not 1."""
    n = len(passes)
    rounds = np.array([[p, p // 2, p // 4] for p in passes], dtype=float)
    touched = np.array([float(text != 1 or not e) for e in exact])
    same = {name: np.ones(n) for name in ("gain", "drift")}
    return Columns(exact=np.array(exact, float), strict=np.zeros(n), text=np.full(n, float(text)),
                   tokens=np.full(n, float(tokens)), touches=touched, rounds=rounds, examined=np.full(n, 8.0),
                   accepted=np.full(n, 6.0), **same)  # fmt: skip


PLAIN = columns([4, 4, 4, 4], [1, 1, 1, 1])
FASTER = columns([3, 3, 3, 3], [1, 1, 1, 0], text=2)


# -- what is swept -----------------------------------------------------------------------------------------------------


def test_every_rule_and_every_form_of_its_own_is_swept_lossless_first() -> None:
    settings = settings_of()
    assert settings[0] == LOSSLESS and len(settings) == len(set(settings))
    swept = {s.rule for s in settings}
    assert swept == set(RULES) | {name for name, form in PUBLISHED.items() if not form.same}
    assert {s.theta for s in settings if s.rule == "token_v3"} == set(RULES["token_v3"].knobs)


def test_a_rule_that_somebody_registers_is_in_the_sweep_and_runs(toy_rule: str) -> None:
    assert [s.theta for s in settings_of() if s.rule == toy_rule] == [0.25, 0.75]
    made = run_point(pair(), fresh_problems(5, 3, "easy"), toy_rule, 0.75, g=3)
    assert (made.passes > 0).all() and made.touches.sum() > 0


def test_rules_and_knobs_can_be_chosen_and_nonsense_is_refused() -> None:
    assert settings_of(["chow_paper", "lossless"], [0.5]) == [LOSSLESS, Setting("chow_paper", 0.5)]
    with pytest.raises(ValueError, match="unknown rule 'nope'"):
        settings_of(["nope"])
    with pytest.raises(ValueError, match=r"a knob must lie in \[0, 1\], not 2"):
        settings_of(None, [2])


def test_tasks_come_from_a_file_with_a_prompt_and_an_answer_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "Longer?", "answer": 1}\n{"prompt": "Hm?", "answer": 2}\n')
    assert [task.answer for task in load_tasks(path, 2, "easy", 0)] == [2, 1]  # by length
    with pytest.raises(ValueError, match="has 2 tasks, not 3"):
        load_tasks(path, 3, "easy", 0)
    path.write_text('{"prompt": "no answer"}\n')
    with pytest.raises(ValueError, match=r"tasks.jsonl:1: must be"):
        load_tasks(path, 1, "easy", 0)


# -- the log -----------------------------------------------------------------------------------------------------------


def test_a_log_gives_back_what_was_put_into_it(tmp_path: Path) -> None:
    log = Log(tmp_path / "deep" / LOG, SWEEP)
    log.add_cost_ratio(0.25)
    log.add(HALF, FASTER)
    again = Log(log.path, SWEEP)
    assert again.cost_ratio == 0.25 and list(again.done) == [HALF]
    for name, value in vars(FASTER).items():
        assert np.array_equal(getattr(again.done[HALF], name), value), name


def test_a_rerun_measures_only_what_is_missing(tmp_path: Path) -> None:
    log = Log(tmp_path / LOG, SWEEP)
    log.add(LOSSLESS, PLAIN)
    measured: list[Setting] = []
    finished: list[Setting] = []

    def measure(setting: Setting) -> Columns:
        measured.append(setting)
        return FASTER

    run_sweep(log, [LOSSLESS, HALF], measure, done=finished.append)
    run_sweep(Log(log.path, SWEEP), [LOSSLESS, HALF], measure)
    assert measured == [HALF] and finished == [LOSSLESS, HALF]


def test_other_tasks_or_another_block_length_are_another_sweep(tmp_path: Path) -> None:
    Log(tmp_path / LOG, SWEEP).add(LOSSLESS, PLAIN)
    for other in (replace(SWEEP, tasks="u"), replace(SWEEP, g=3), replace(SWEEP, temperature=0.0)):
        log = Log(tmp_path / LOG, other)
        assert not log.done
        log.add(LOSSLESS, PLAIN)  # in the same file
    assert list(Log(tmp_path / LOG, SWEEP).done) == [LOSSLESS]
    assert checksum_of_tasks(fresh_problems(1, 3, "easy")) != checksum_of_tasks(fresh_problems(2, 3, "easy"))


def test_a_line_cut_off_by_a_crash_is_dropped_and_measured_again(tmp_path: Path) -> None:
    log = Log(tmp_path / LOG, SWEEP)
    log.add(LOSSLESS, PLAIN)
    log.add(HALF, FASTER)
    whole = log.path.read_bytes()
    for cut in (1, 30, len(whole.splitlines()[1])):
        log.path.write_bytes(whole[:-cut])
        again = Log(log.path, SWEEP)
        assert list(again.done) == [LOSSLESS]
        again.add(HALF, FASTER)
        assert log.path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{]", '{"setting": ["threshold", 0.5]}', "3"])
def test_a_line_that_is_no_point_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / LOG
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"{LOG}:1: not a line of a sweep"):
        Log(path, SWEEP)


def test_untouched_requests_must_be_their_lossless_selves() -> None:
    check_pairing(HALF, FASTER, PLAIN)  # all touched
    untouched = np.zeros(4)
    with pytest.raises(RuntimeError, match="an untouched request differs"):
        check_pairing(HALF, replace(FASTER, touches=untouched), PLAIN)
    with pytest.raises(RuntimeError, match="an untouched request differs"):
        check_pairing(HALF, replace(PLAIN, rounds=PLAIN.rounds + 1), PLAIN)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_loss_without_discordant_pairs_still_has_an_interval() -> None:
    found = loss_interval(np.zeros(300))
    assert found.value == 0 and found.low == -found.high and 0.005 < found.high < 0.01


def test_the_loss_interval_covers_as_often_as_it_says() -> None:
    """500 samples of 200 pairs with differences 1, -1, 0; 95% of intervals hold the mean (5 sigma: 4.9 points)."""
    rng = np.random.default_rng(8)
    hits = 0
    for _ in range(500):
        found = loss_interval(rng.choice([1.0, -1.0, 0.0], size=200, p=[0.06, 0.03, 0.91]))
        hits += found.low <= 0.03 <= found.high
    assert abs(hits / 500 - 0.95) < 0.049


def test_passes_per_token_is_a_ratio_of_sums_and_its_saving_is_paired() -> None:
    short, long = columns([1, 9], [1, 1]), columns([2, 18], [1, 1])
    short = replace(short, tokens=np.array([2.0, 38.0]))
    long = replace(long, tokens=np.array([2.0, 38.0]))
    assert ratio_interval(short.passes, short.tokens).value == pytest.approx(10 / 40)
    saved = saved_interval(short, long)
    assert saved.value == pytest.approx(0.5) and saved.high - saved.low < 1e-12  # half everywhere: no uncertainty
    assert saved_interval(long, long).json() == [0, 0, 0]


def test_the_best_block_length_follows_the_price_of_drafting() -> None:
    rounds = np.array([[100.0, 80.0, 60.0]])
    one = replace(columns([100], [1]), rounds=rounds)
    # N = 1, 1.8, 2.4
    assert best_block(one, 0.0) == (2, pytest.approx(2.4))
    assert best_block(one, 0.5) == (1, pytest.approx(1.2)) and best_block(one, 1.0) == (0, 1.0)


def test_rules_are_compared_at_equal_saving_and_equal_loss() -> None:
    n = 400
    scores = np.ones(n, dtype=int)
    lose = [(np.arange(n) >= k).astype(int).tolist() for k in (8, 40)]  # 2 and 10 points
    plain = columns([8] * n, scores.tolist())
    done = {
        LOSSLESS: plain,
        Setting("token_v3", 0.8): columns([6] * n, lose[0], text=2),  # saves 25%
        Setting("forgive", 0.2): columns([6] * n, lose[1], text=2),
        Setting("token_v3_paper", 0.8): columns([6] * n, lose[1], text=2),
    }
    at_saving, at_loss, against = compare(done, seed=1, resamples=200)
    mine = {(row["rule"], row["saved"]): row for row in at_saving}
    assert mine["token_v3", 0.10]["loss"][0] == pytest.approx(0.02 * 0.4)  # a straight line from lossless
    assert mine["forgive", 0.25]["loss"][0] == pytest.approx(0.10)
    assert mine["token_v3", 0.25]["wins"] == 1.0 and mine["forgive", 0.25]["wins"] == 0.0
    assert mine["token_v3_paper", 0.25]["wins"] is None  # only completed rules can be leased
    assert ("token_v3", 0.30) not in mine  # nothing saves as much
    allowed = {(row["rule"], row["loss"]): row["saved"] for row in at_loss}
    assert allowed["forgive", 0.05][0] == pytest.approx(0.125) and allowed["token_v3", 0.05][0] == pytest.approx(0.25)
    extra = {row["saved"]: row["extra_loss"] for row in against if row["form"] == "token_v3_paper"}
    assert extra[0.25][0] == pytest.approx(0.08) and extra[0.25][1] > 0.04


# -- files -------------------------------------------------------------------------------------------------------------


def test_csv_json_tables_and_plot_say_the_same(tmp_path: Path) -> None:
    log = Log(tmp_path / LOG, SWEEP)
    with pytest.raises(ValueError, match="lossless setting is not measured"):
        summarise(log)
    for setting, made in ((LOSSLESS, PLAIN), (HALF, FASTER), (Setting("lossy_paper", 0.5), FASTER)):
        log.add(setting, made)
    summary = summarise(log, cost_ratio=0.1, resamples=50)
    paths = {path.suffix: path for path in write_files(summary, tmp_path)}
    assert paths[".png"].read_bytes().startswith(b"\x89PNG")
    document = json.loads(paths[".json"].read_text())
    table = list(csv.DictReader(io.StringIO(paths[".csv"].read_text())))
    assert [row["rule"] for row in document["rows"]] == [row["rule"] for row in table]
    assert document["cost_ratio"] == 0.1 and document["sweep"]["g"] == 2
    for row, line in zip(document["rows"], table, strict=True):
        assert row["loss"] == [float(line[key]) for key in ("loss", "loss_low", "loss_high")]
        assert row["best_g"] == int(line["best_g"])
    assert paths[".md"].read_text() == tables(summary)
    assert Summary.from_json(paths[".json"].read_text()) == summary
    assert "| losing at most 1 point | `threshold` |" in tables(summary)


def test_a_saving_that_hardly_any_resample_reaches_is_not_won_by_the_first_rule() -> None:
    done = {LOSSLESS: PLAIN, HALF: PLAIN, Setting("token_v3", 0.8): columns([3, 3, 3, 4], [1, 1, 1, 1], text=2)}
    rows = [row for row in compare(done, seed=1, resamples=300)[0] if row["saved"] == 0.15]
    assert [row["rule"] for row in rows] == ["token_v3"] and 0.3 < rows[0]["wins"] < 1


def test_the_documents_show_the_committed_figures() -> None:
    docs = Path(__file__).parents[3] / "docs"
    summary = Summary.from_json((docs / "data" / "frontier.json").read_text())
    assert tables(summary) in (docs / "frontier.md").read_text()
    assert summary.to_csv() == (docs / "data" / "frontier.csv").read_text()
    assert summary.sweep.n >= 300 and {row["rule"] for row in summary.rows} >= set(RULES)


# -- real runs ---------------------------------------------------------------------------------------------------------


def test_lossless_rounds_count_passes_as_the_worker_does() -> None:
    """Two samplers with their own random numbers: passes per token and accepted share agree within 4.5 deviations."""
    tasks, g = fresh_problems(31, 36, "easy"), 4
    knobs = Knobs(g=g, rule="token_v3", theta=0.8)
    done = [
        run(engine(), prompt_ids(pair().tokenizer, task.prompt), knobs, seed=i, max_tokens=200)
        for i, task in enumerate(tasks)
    ]
    mine = run_point(pair(), tasks, "token_v3", 0.8, g=g)
    theirs = np.array([[c.target_passes, len(c.token_ids), c.accepted, c.examined] for c in done], dtype=float).T
    for a, b in (
        (ratio_interval(mine.passes, mine.tokens), ratio_interval(theirs[0], theirs[1])),
        (ratio_interval(mine.accepted, mine.examined), ratio_interval(theirs[2], theirs[3])),
    ):
        deviation = np.hypot(a.high - a.low, b.high - b.low) / 2 / 1.96
        assert abs(a.value - b.value) < 4.5 * deviation and deviation < 0.02


def test_a_point_counts_rounds_gain_and_drift_and_is_paired_with_lossless() -> None:
    tasks = fresh_problems(32, 30, "easy")
    plain = run_point(pair(), tasks, "lossless", 0.0, g=3)
    rare = run_point(pair(), tasks, "forgive", 0.05, g=3, batch=7)  # in other batches
    form = run_point(pair(), tasks, "token_v3_paper", 0.6, g=3)
    for setting, made in ((LOSSLESS, plain), (Setting("forgive", 0.05), rare), (Setting("f", 0.6), form)):
        check_pairing(setting, made, plain)
        assert (made.rounds.sum(1) == made.tokens).all()
        # every round but one that an accepted end token cut short ends in a token of its own
        assert set(made.accepted - made.rounds[:, 1:].sum(1)) <= {0.0, 1.0}
    assert not plain.touches.any() and not plain.drift.any()
    assert 0.1 < (rare.touches == 0).mean() < 0.9  # there is something to pair
    assert np.allclose(rare.gain, rare.drift, atol=1e-4)  # completed (float32)
    assert form.gain.sum() < 0 < form.drift.sum()  # not completed: it lost acceptance
    assert abs(rare.touches.sum() - rare.drift.sum()) < 5 * np.sqrt(rare.drift.sum()) + 5


def test_without_rounds_that_end_a_point_is_the_simulation_of_the_pair() -> None:
    """At g beyond any text the lossless run differs from `simulation.decode` in the accept coin (1 - u) only."""
    tasks = fresh_problems(33, 20, "easy")
    texts = [
        run_point(pair(), tasks, "threshold", 1.0, g=300, seed=4),
        decode(pair(), tasks, Setting("threshold", 1.0), seed=4),
    ]
    assert np.array_equal(texts[0].exact, texts[1].exact) and np.array_equal(texts[0].tokens, texts[1].tokens)
    assert (texts[0].passes == 1).all()


def test_greedy_points_run() -> None:
    tasks = fresh_problems(34, 6, "easy")
    plain, lenient = (run_point(pair(), tasks, "token_v2", t, g=3, temperature=0.0) for t in (0.0, 0.9))
    assert lenient.passes.sum() < plain.passes.sum() and plain.exact.mean() >= lenient.exact.mean()


def test_a_draft_step_of_the_small_model_costs_less_than_a_target_pass() -> None:
    assert 0 < measure_cost_ratio(pair(), fresh_problems(35, 2, "easy"), 3) < 1


def test_the_command_writes_everything_and_goes_on_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"n": 6, "g": 3, "temperature": 1.0, "domain": "easy", "seed": 2, "console": QUIET}
    calls: list[str] = []
    real = run_point

    def counted(pair: Any, tasks: Any, rule: str, *rest: Any, **named: Any) -> Columns:
        calls.append(rule)
        if rule == "lenience" and calls.count(rule) == 1:
            raise KeyboardInterrupt
        return real(pair, tasks, rule, *rest, **named)

    monkeypatch.setattr("decoder.frontier.run_point", counted)
    rules = ["threshold", "lenience", "lossy_paper"]
    assert run_frontier(tmp_path, rules=rules, knobs=[0.5], **options) == INTERRUPTED
    assert len((tmp_path / "frontier.csv").read_text().splitlines()) == 3  # head, lossless, threshold
    assert run_frontier(tmp_path, rules=rules, knobs=[0.5], **options) == 0
    assert calls == ["lossless", "threshold", "lenience", "lenience", "lossy_paper"]
    assert len((tmp_path / "frontier.csv").read_text().splitlines()) == 5
    assert {path.name for path in tmp_path.iterdir()} == {LOG, *(f"frontier.{e}" for e in ("csv", "json", "md", "png"))}


def test_the_command_line_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(frontier_report, "run_frontier", lambda out, **options: seen.update(options, out=out) or 0)
    runner = CliRunner()
    good = runner.invoke(
        app, ["frontier", "--out", str(tmp_path), "--tasks", "9", "--rule", "chow", "--domain", "hard"]
    )
    assert good.exit_code == 0 and (seen["n"], seen["rules"], seen["domain"]) == (9, ["chow"], "hard")
    monkeypatch.undo()
    bad = runner.invoke(app, ["frontier", "--out", str(tmp_path), "--rule", "nope"])
    assert bad.exit_code == 2 and "lenity frontier: unknown rule 'nope'" in bad.output


def test_a_task_that_does_not_end_is_cut_at_the_limit() -> None:
    tasks = fresh_problems(36, 4, "easy")
    cut, whole = (run_point(pair(), tasks, "lossless", 0.0, g=2, max_tokens=limit) for limit in (5, 200))
    assert (cut.tokens == 5).all() and (whole.tokens > 20).all() and not cut.exact.any()
