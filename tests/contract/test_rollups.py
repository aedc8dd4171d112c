"""What is summed into minutes, hours and days, and what the readers give, on both databases."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, select, text

from storage import rollups
from storage.history import History, Point
from storage.rows import DAY, HOUR, MINUTE
from storage.tables import point_rollups, round_rollups, token_rollups
from tests.support_storage import a_fork, a_round_row, a_score, a_token_row, touched

START = 1_799_971_200.0  # midnight UTC


@pytest.fixture
def epoch(history: History) -> int:
    """The pool `chat` is claimed."""
    return history.claim_epoch("chat", "first", START)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(START + seconds, UTC)


def save_minutes(history: History, epoch: int, *starts: float, **changes: Any) -> None:
    rows = [a_token_row(time=START + s, position=p, **changes) for s in starts for p in (1, 2)]
    history.save_tick("chat", epoch, START, rollups=[*rows, *(a_round_row(time=START + s) for s in starts)])


def sums(history: History, step: int, table: Any = token_rollups, name: str = "drafted") -> list[tuple[float, int]]:
    """(start after midnight, sum) of each stretch."""
    c = table.c
    with history.transaction() as connection:
        query = select(c.time, c[name]).where(c.step == step).order_by(*table.primary_key)
        return [(row[0].timestamp() - START, row[1]) for row in connection.execute(query)]


# -- summing up --------------------------------------------------------------------------------------------------------


def test_minutes_are_added_to_their_hour_and_day(history: History, epoch: int) -> None:
    """In UTC; the minutes stay."""
    save_minutes(history, epoch, 0, 3540, 3600, DAY)
    assert history.roll_up(START + DAY + 120) == 12
    assert sums(history, HOUR) == [(0, 16), (0, 16), (3600, 8), (3600, 8), (DAY, 8), (DAY, 8)]
    assert sums(history, DAY) == [(0, 24), (0, 24), (DAY, 8), (DAY, 8)]
    assert sums(history, DAY, round_rollups, "drafted") == [(0, 288), (DAY, 96)]
    assert len(sums(history, MINUTE)) == 8


def test_a_row_is_added_once(history: History, epoch: int) -> None:
    """Run again and again; saved again by a tick that was retried; two programs in turn."""
    save_minutes(history, epoch, 0)
    assert history.roll_up(START + 60) == 3
    save_minutes(history, epoch, 0)
    assert history.roll_up(START + 60) == 0
    other = History(history.database.url.render_as_string(hide_password=False))
    assert other.roll_up(START + 7200) == 0
    other.close()
    assert sums(history, HOUR) == [(0, 8), (0, 8)]


def test_late_rows_of_a_finished_hour_are_added(history: History, epoch: int) -> None:
    """From a spool, long after the hour was summed, also when its minutes are gone."""
    save_minutes(history, epoch, 0)
    history.roll_up(START + DAY)
    with history.transaction() as connection:
        connection.execute(text("DELETE FROM token_rollups WHERE step = 60"))
    save_minutes(history, epoch, 60, drafted=3)
    history.roll_up(START + DAY)
    assert sums(history, HOUR) == [(0, 11), (0, 11)]
    assert sums(history, DAY) == [(0, 11), (0, 11)]


def test_a_run_that_is_cut_leaves_nothing_half_done(
    history: History, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between marking and adding, in the second of two transactions: the first is kept, the rest done later."""
    save_minutes(history, epoch, 0, 600)
    genuine, calls = rollups._add_sums, []

    def cut(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        genuine(*args)

    with monkeypatch.context() as patch:
        patch.setattr(rollups, "_add_sums", cut)
        with pytest.raises(KeyboardInterrupt):
            history.roll_up(START + HOUR)
    assert sums(history, HOUR) == [(0, 8), (0, 8)]
    history.roll_up(START + HOUR)
    assert sums(history, HOUR) == [(0, 16), (0, 16)]


def test_the_current_minute_waits(history: History, epoch: int) -> None:
    """It is summed when it is over."""
    history.save_tick("chat", epoch, START, points=[Point("chat", "default", START + s, {"a": 1.0}) for s in (59, 60)])
    assert history.roll_up(START + 60) == 1
    assert history.roll_up(START + 119) == 0
    assert history.roll_up(START + 120) == 1


def test_transactions_are_short_and_others_get_their_turn(history: History, epoch: int) -> None:
    """Five minutes of one class each; between two of them somebody else can write."""
    save_minutes(history, epoch, *range(0, HOUR, MINUTE))
    turns: list[int] = []
    history.roll_up(START + HOUR, pause=lambda: turns.append(history.claim_epoch("code", "x", START)))
    assert turns == list(range(1, 25))


# -- points ------------------------------------------------------------------------------------------------------------


def test_points_become_means_of_what_is_known(history: History, epoch: int) -> None:
    """Each series over the points that have it, whenever they were summed: against means taken at once."""
    rng = np.random.default_rng(3)
    kept = [
        Point("chat", "default", START + 7 * n, {"a": float(rng.random())} | ({"b": float(n)} if n % 3 else {}))
        for n in range(1100)
    ]
    for first in (500, 0, 800):  # out of order, with runs in between
        chosen = kept[first : {500: 800, 0: 500, 800: 1100}[first]]
        history.save_tick("chat", epoch, START, points=[*chosen, Point("chat", "code", START, {"a": 9.0})])
        history.roll_up(START + DAY)
    for step in (MINUTE, HOUR, DAY):
        found = history.points("chat", "default", limit=10_000, step=step)
        starts = sorted({p.time // step * step for p in kept})
        assert [p.time for p in found] == starts
        for point in found:
            mine = [p.values for p in kept if p.time // step * step == point.time]
            for name in ("a", "b"):
                known = [v[name] for v in mine if name in v]
                assert point.values[name] == pytest.approx(np.mean(known), rel=1e-5)
    assert sum(n for _, n in sums(history, DAY, point_rollups, "count")) == 1101


def test_the_resolution_of_points_is_asked_for(history: History, epoch: int) -> None:
    """The longest stretch that is no longer than what was asked for; ticks below a minute."""
    ticks = [Point("chat", "default", START + s, {"a": 1.0}) for s in range(0, 7200, 600)]
    history.save_tick("chat", epoch, START, points=ticks)
    history.roll_up(START + DAY)

    def count(**how: Any) -> int:
        return len(history.points("chat", "default", **how))

    assert [count(step=s) for s in (None, 1, 59, 60, 3599, 3600, DAY, 7 * DAY)] == [12, 12, 12, 12, 12, 2, 1, 1]
    assert count(step=HOUR, since=START) == 1
    assert count(step=MINUTE, since=at(600), until=at(1800)) == 2
    assert [p.time - START for p in history.points("chat", "default", step=MINUTE, limit=2)] == [6000, 6600]


def test_stretches_reach_to_the_newest_tick(history: History, epoch: int) -> None:
    """What no job has summed yet counts as well, in the stretch that is under way and in those after it."""
    ticks = [Point("chat", "default", START + s, {"a": float(s)}) for s in range(0, 240, 30)]
    history.save_tick("chat", epoch, START, points=ticks[:3])
    history.roll_up(START + 240)
    history.save_tick("chat", epoch, START, points=ticks[3:])
    found = history.points("chat", "default", step=MINUTE)
    assert [(p.time - START, p.values) for p in found] == [(60 * n, {"a": 60 * n + 15.0}) for n in range(4)]
    assert [p.time - START for p in history.points("chat", "default", step=MINUTE, limit=2)] == [120, 180]
    assert [p.time - START for p in history.points("chat", "default", step=MINUTE, since=at(60))] == [120, 180]
    assert history.points("chat", "default", step=MINUTE, limit=0) == []


# -- sums --------------------------------------------------------------------------------------------------------------


def test_sums_are_read_by_position_and_bucket(history: History, epoch: int) -> None:
    """Or over all of them; oldest first, the newest `limit`, between two instants."""
    save_minutes(history, epoch, 0, 60, 120)
    save_minutes(history, epoch, 0, 60, bucket=1, accepted=2)
    history.save_tick("chat", epoch, START, rollups=[a_token_row(time=START, traffic_class="code")])

    def read(**how: Any) -> list[dict[str, Any]]:
        return history.rollups("chat", "default", START, at(DAY), **{"step": MINUTE, **how})

    assert [(r["time"], r["step"], r["drafted"], r["accepted"]) for r in read()] == [
        (at(0), 60, 32, 14),
        (at(60), 60, 32, 14),
        (at(120), 60, 16, 10),
    ]
    assert [(r["position"], r["drafted"]) for r in read(by=("position",), limit=2)] == [(1, 8), (2, 8)]
    assert len(read(by=("position", "bucket"))) == 10
    assert [(r["bucket"], r["rounds"], r["verify_s"]) for r in read(kind="rounds", by=("bucket",))] == [(4, 4, 0.5)] * 3
    assert read(step=HOUR) == []
    history.roll_up(START + DAY)
    assert [(r["time"], r["step"], r["drafted"]) for r in read(step=7000)] == [(at(0), 3600, 80)]
    assert [r["step"] for r in history.rollups("chat", "default", at(-3000 * HOUR), at(DAY), kind="rounds")] == [DAY]
    with pytest.raises(ValueError, match="position"):
        read(kind="rounds", by=("position",))
    with pytest.raises(ValueError, match="theta_sum"):
        read(by=("theta_sum",))


def test_a_resolution_fits_the_question() -> None:
    """The finest that gives no more rows than wanted."""
    assert [rollups.resolution(s, 1000) for s in (HOUR, DAY, 30 * DAY, 365 * DAY, 3000 * DAY)] == [
        60,
        3600,
        3600,
        DAY,
        DAY,
    ]


# -- bounded by construction -------------------------------------------------------------------------------------------


def plans(history: History, read: Callable[[], Any], *, indices: bool = True) -> str:
    """How the database would run the queries of `read` over tables that are not small: PostgreSQL reads empty ones
    whole unless it is told not to."""
    asked: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    engine = history.database._engine
    event.listen(engine, "before_cursor_execute", note)
    read()
    event.remove(engine, "before_cursor_execute", note)
    prefix = "EXPLAIN QUERY PLAN " if history.database.sqlite else "EXPLAIN "
    with history.transaction() as connection:
        if indices and not history.database.sqlite:
            for way in ("seqscan", "bitmapscan", "hashjoin", "mergejoin", "sort"):
                connection.execute(text(f"SET LOCAL enable_{way} = off"))
        found = [
            row
            for s, p in asked
            if s.startswith(("SELECT", "WITH"))
            for row in connection.exec_driver_sql(prefix + s, p)
        ]
    return "\n".join(str(row[-1]) for row in found)


def whole_or_sorted(history: History, plan: str) -> list[str]:
    """Lines of a plan that read a table whole or sort it."""
    bad = r"^SCAN (?!.*USING)|TEMP B-TREE FOR ORDER" if history.database.sqlite else r"Seq Scan|(?<!Incremental )Sort  "
    return re.findall(rf".*(?:{bad}).*", plan, re.MULTILINE)


READERS: dict[str, Callable[[History], Any]] = {
    "ticks": lambda h: h.points("chat", "default", at(0), until=at(DAY)),
    "days": lambda h: h.points("chat", "default", at(-365 * DAY), step=DAY),
    "tokens": lambda h: h.rollups("chat", "default", at(-365 * DAY), at(0)),
    "buckets": lambda h: h.rollups("chat", "default", at(-365 * DAY), at(0), by=("bucket",)),
    "rounds": lambda h: h.rollups("chat", "default", at(-365 * DAY), at(0), kind="rounds"),
    "decisions": lambda h: h.decisions("chat", since=at(0)),
    "decisions of a class": lambda h: h.decisions("chat", "default"),
    "alerts": lambda h: h.alerts("chat", since=at(0)),
    "policies": lambda h: h.policy_revisions("chat"),
    "actions": lambda h: h.operator_actions("chat", after=7),
    "log": lambda h: h.operator_log("chat"),
    "request": lambda h: h.find_request("r1"),
    "request of a pool": lambda h: h.find_request("r1", "chat"),
    "snapshot": lambda h: h.load_snapshot("chat"),
    "epoch": lambda h: h.current_epoch("chat"),
}


@pytest.mark.parametrize("name", READERS)
def test_every_question_is_answered_from_an_index(history: History, name: str) -> None:
    """No table is read whole or sorted, so that a year of history costs no more than a day."""
    plan = plans(history, lambda: READERS[name](history))
    assert plan
    assert whole_or_sorted(history, plan) == [], plan


def test_changes_are_found_without_reading_decisions_whole(history: History) -> None:
    """From the index alone, since a decision is some kilobytes; only those where something changed are read."""
    plan = plans(history, lambda: history.decision_changes("chat", "default", at(0)))
    wanted = "USING COVERING INDEX" if history.database.sqlite else "Index Only Scan using"
    assert f"{wanted} ix_decisions_pool_traffic_class_time" in plan, plan


def test_a_question_without_an_index_would_be_noticed(history: History) -> None:
    """The negative control of the test above."""
    with history.transaction() as connection:
        connection.execute(text("DROP INDEX ix_alerts_pool_time"))
    assert whole_or_sorted(history, plans(history, lambda: history.alerts("chat", since=at(0))))


def test_jobs_look_only_at_rows_that_wait(history: History) -> None:
    """By an index of those rows alone, however long the history is."""
    plan = plans(history, lambda: history.roll_up(START))
    for table in ("points", "token_rollups", "round_rollups"):
        assert f"ix_{table}_unrolled" in plan, plan
    assert whole_or_sorted(history, plan) == []


def test_sums_of_requests_look_up_what_belongs_to_each_by_its_key(history: History, epoch: int) -> None:
    """Freshly filled tables of a database that has no statistics: no join reads a pool's rows once for each request."""
    ids = [f"r{n}" for n in range(300)]
    history.save_tick(
        "chat",
        epoch,
        START,
        requests=[touched("chat", i) for i in ids],
        forks=[a_fork("chat", i) for i in ids],
        scores=[a_score("chat", i, branch) for i in ids for branch in ("served", "fork")],
    )
    plan = plans(history, lambda: history.requests_between("chat", START, at(1)), indices=False)
    by_key = r"pool=\? AND request_id=\?" if history.database.sqlite else r"\(\(request_id\)::text = \(requests"
    assert len(re.findall(by_key, plan)) == 3, plan
    assert "Join Filter" not in plan
