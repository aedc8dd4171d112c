"""What is removed when, in how small steps, and what never is, on both databases."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import String, Text, func, select

from storage import retention
from storage.errors import SampleError
from storage.history import Alert, History, Point
from storage.records import ForkRecord, QualityScore, RequestRecord, TokenBlock, from_fields, to_fields
from storage.retention import Ages
from storage.rows import DAY, HOUR
from storage.tables import metadata
from tests.support_storage import (
    a_block,
    a_decision,
    a_fork,
    a_lease,
    a_request,
    a_round_row,
    a_score,
    a_slice,
    a_token_row,
)

NOW = 1_799_971_200.0 + 400 * DAY
YEAR = 365 * DAY


@pytest.fixture
def epoch(history: History) -> int:
    """The pool `chat` is claimed."""
    return history.claim_epoch("chat", "first", NOW)


def clean(history: History, ages: Ages | None = None, now: float = NOW, **how: Any) -> dict[str, int]:
    """A run without waiting."""
    return retention.run(history, ages or Ages(), now, pause=how.pop("pause", lambda _: None), **how)


def counts(history: History) -> dict[str, int]:
    with history.transaction() as connection:
        found = {
            n: connection.execute(select(func.count()).select_from(t)).scalar_one() for n, t in metadata.tables.items()
        }
    return {name: n for name, n in found.items() if n}


def one_of_each(at: float, n: int) -> dict[str, Any]:
    """A tick at `at` whose records differ from those of other `n`."""
    rid = f"r{n}"
    return {
        "requests": [a_request(request_id=rid)],
        "forks": [a_fork(request_id=rid)],
        "scores": [a_score(request_id=rid)],
        "decisions": [a_decision(seq=n, time=at)],
        "points": [Point("chat", "default", at, {"a": 1.0})],
        "alerts": [Alert("chat", "default", at, "LenityFastBurn", True, "")],
        "slices": [a_slice(start=at)],
        "rollups": [a_token_row(time=at // 60 * 60), a_round_row(time=at // 60 * 60)],
        "snapshot": {"n": n},
    }


# -- ages --------------------------------------------------------------------------------------------------------------


def test_every_table_has_its_age(history: History, epoch: int) -> None:
    """Rows of ten ages: each is there exactly if it is younger than its table's age; the youngest stay in any case."""
    at = [NOW - age for age in (0, 2 * HOUR, 7 * HOUR, 25 * HOUR, 8 * DAY, 36 * DAY, 91 * DAY, 1.1 * YEAR)]
    for n, time in enumerate(sorted(at)):
        history.save_tick("chat", epoch, time, **one_of_each(time, n))
    history.add_policy_revision("chat", "a", "sha", "p.yaml", at[-1], accepted=True, error=None)
    history.add_operator_action("chat", "*", "freeze", "ada", "", at[-1])
    clean(history)
    assert counts(history) == {
        "points": 2,
        "point_rollups": 3 + 5 + 6,  # minutes, hours, days; the newest is in the current minute and not summed yet
        "token_rollups": 4 + 5 + 6,
        "round_rollups": 4 + 5 + 6,
        "decisions": 6,
        "requests": 5,
        "forks": 5,
        "scores": 5,
        "budget_slices": 5,
        "alerts": 8,
        "policy_revisions": 1,
        "operator_actions": 1,
        "snapshots": 1,
        "epochs": 1,
    }


def test_evidence_outlives_the_longest_window() -> None:
    """By a quarter, for late labels; a shorter window takes nothing away."""
    assert Ages().covering(90 * DAY).evidence == 112.5 * DAY
    assert Ages().covering(60.0) == Ages()
    for field in fields(Ages):
        with pytest.raises(ValueError, match=field.name):
            Ages(**{field.name: 60.0})


def test_a_run_sums_up_before_it_removes(history: History, epoch: int) -> None:
    """Ticks that no job has seen are in the minutes and days afterwards."""
    history.save_tick("chat", epoch, NOW, points=[Point("chat", "default", NOW - 3 * DAY, {"a": 2.0})])
    clean(history)
    assert history.points("chat", "default") == []
    assert [p.values for p in history.points("chat", "default", step=DAY)] == [{"a": 2.0}]


def test_pools_and_classes_are_all_visited(history: History, epoch: int) -> None:
    """Also those that no longer have a policy or an epoch."""
    for n, cls in enumerate(("default", "code", "a", "zz")):
        old = a_request(request_id=f"r{n}", traffic_class=cls)
        history.save_tick("chat", epoch, NOW - YEAR, requests=[old], slices=[a_slice(NOW - YEAR, traffic_class=cls)])
    other = history.claim_epoch("code", "x", NOW)
    history.save_tick("code", other, NOW - YEAR, requests=[a_request("code")])
    removed = clean(history)
    assert (removed["requests"], removed["budget_slices"]) == (5, 4)


def old_requests(history: History, count: int) -> None:
    """Requests of a year ago, a second apart."""
    rows = [vars(a_request(request_id=f"r{n}")) | {"received": NOW - YEAR + n} for n in range(count)]
    with history.transaction() as connection:
        connection.execute(metadata.tables["requests"].insert(), rows)


# -- small steps -------------------------------------------------------------------------------------------------------


def test_a_slow_database_gets_smaller_steps(history: History, epoch: int) -> None:
    """As many rows as take about a fortieth of a second; the writer gets its turn in between."""
    old_requests(history, 600)
    times = iter(range(1000))
    left: list[int] = []

    def pause(seconds: float) -> None:
        history.claim_epoch("other", "x", NOW)
        left.append(counts(history).get("requests", 0))

    clean(history, pause=pause, clock=lambda: next(times) / 10)  # every transaction takes a tenth of a second
    assert left[:4] == [400, 350, 300, 250]
    assert 0 in left


def test_a_run_that_is_stopped_is_finished_by_the_next(history: History, epoch: int) -> None:
    """Asked between transactions."""
    old_requests(history, 450)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 1

    assert clean(history, stop=stop) == {"requests": 200}
    assert clean(history) == {"requests": 250}
    assert clean(history) == {}


# -- decisions ---------------------------------------------------------------------------------------------------------


def test_of_old_decisions_the_first_of_each_kind_stays(history: History, epoch: int) -> None:
    """In every five minutes; young ones all stay; what was kept stays when run again or when one comes late."""
    start = NOW - DAY
    reasons = ["budget_ok", "step_up"]

    def decide(second: int, reason: str, at: float = start) -> Any:
        return a_decision(seq=second, time=at + second, reason=reason)

    old = [decide(s, reasons[s % 60 == 30]) for s in range(0, 600, 10)]
    young = [decide(s, "budget_ok", NOW - 60) for s in range(0, 50, 10)]
    history.save_tick("chat", epoch, NOW, decisions=[*old, *young])

    def kept() -> list[tuple[float, str]]:
        rows = history.decisions("chat", limit=1000)
        return [(r["unix_time"] - start, r["reason"]) for r in reversed(rows) if r["unix_time"] < NOW - 3600]

    first = [(0, "budget_ok"), (30, "step_up"), (300, "budget_ok"), (330, "step_up")]
    for _ in range(2):
        clean(history)
        assert kept() == first
    assert len(history.decisions("chat", limit=1000)) == 4 + 5
    late = [decide(5, "budget_ok"), decide(6, "frozen")]
    history.save_tick("chat", epoch, NOW, decisions=late)
    clean(history)
    assert kept() == [(0, "budget_ok"), (6, "frozen"), *first[1:]]


# -- no text of requests -----------------------------------------------------------------------------------------------

TEXT = {  # every column that can hold words, and whose words they are
    "alembic_version.version_num": "the migrations'",
    "alerts.detail": "the controller's",
    "decisions.explanation": "the controller's",
    "decisions.lease": "the controller's",
    "decisions.detail": "the controller's",
    "operator_actions.who": "the operator's",
    "operator_actions.why": "the operator's",
    "point_rollups.sums": "numbers",
    "point_rollups.fewer": "numbers",
    "points.values": "numbers",
    "policy_revisions.source": "the operator's",
    "policy_revisions.text": "the operator's",
    "policy_revisions.error": "the controller's",
    "snapshots.state": "numbers",
}


def test_no_column_can_hold_a_prompt_or_an_answer(history: History) -> None:
    """Text of any length is only where it is the controller's or an operator's own; whoever adds one says whose it is.

    Everything from workers and scorers is a number, a flag, or a short name that cannot hold a sentence.
    """
    wide = [f"{t.name}.{c.name}" for t in metadata.tables.values() for c in t.c if _holds_text(c.type)]
    assert sorted(wide) == sorted(set(TEXT) - {"alembic_version.version_num"})
    for record in (a_request(), a_fork(), a_score()):
        for name, value in vars(record).items():
            if isinstance(value, str):
                with pytest.raises(SampleError):
                    from_fields(to_fields(type(record)(**{**vars(record), name: "The quick brown fox"})))
    assert {type(r) for r in (a_request(), a_fork(), a_score())} == {RequestRecord, ForkRecord, QualityScore}
    with pytest.raises(SampleError):
        from_fields(to_fields(a_block(rule="The quick brown fox")))


def _holds_text(kind: Any) -> bool:
    kind = getattr(kind, "impl", kind)
    return isinstance(kind, Text) or (isinstance(kind, String) and (kind.length is None or kind.length > 256))


def test_words_that_came_with_telemetry_are_not_in_the_database(tmp_path: Path) -> None:
    """Whatever fields a worker adds: no byte of them is in the files; an operator's words are (negative control)."""
    path = tmp_path / "history.db"
    history = History(f"sqlite:///{path}")
    history.upgrade()
    epoch = history.claim_epoch("chat", "first", NOW)
    words = b"my secret diary"
    records: dict[type, Any] = {}
    for record in (a_request(), a_fork(), a_score(), a_block()):
        entry = to_fields(record)
        entry[b"prompt"] = entry[b"tokens"] = words
        entry[b"head"] = entry[b"head"][:-1] + b',"prompt":"' + words + b'"}'
        records[type(record)] = from_fields(entry)
    history.save_tick(
        "chat",
        epoch,
        NOW,
        requests=[records[RequestRecord]],
        forks=[records[ForkRecord]],
        scores=[records[QualityScore]],
        decisions=[a_decision(lease=a_lease())],
    )
    assert isinstance(records[TokenBlock], TokenBlock)

    def stored() -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.iterdir())

    assert counts(history)["requests"] == counts(history)["scores"] == 1
    assert words not in stored()
    history.add_operator_action("chat", "*", "freeze", "ada", words.decode(), NOW)
    assert words in stored()
    history.close()
