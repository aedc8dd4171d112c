"""What the history promises about operators' actions, the budget's slices and finished minutes, on both databases."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select

from storage import operators
from storage.history import History
from storage.records import OperatorAction
from storage.tables import budget_slices, decisions, round_rollups, snapshots, token_rollups
from tests.support_storage import NOW, a_decision, a_request, a_round_row, a_slice, a_token_row, touched


@pytest.fixture
def epoch(history: History) -> int:
    """The pool `chat` is claimed."""
    return history.claim_epoch("chat", "first", NOW)


def rows(history: History, table: Any) -> list[dict[str, Any]]:
    with history.transaction() as connection:
        return [dict(row) for row in connection.execute(select(table)).mappings()]


# -- operators ---------------------------------------------------------------------------------------------------------


def test_actions_are_read_in_the_order_in_which_they_were_given(history: History) -> None:
    """Oldest first above a number, newest first for the log, of one pool."""
    first = history.add_operator_action("chat", "*", "freeze", "ada", "regression", NOW)
    history.add_operator_action("code", "*", "lossless", "ada", "", NOW)
    second = history.add_operator_action("chat", "default", "adjust_budget", "bob", "bad\x00scorer", NOW + 1, -2.5)
    assert second > first
    found = history.operator_actions("chat")
    assert found == [
        OperatorAction(first, "chat", "*", "freeze", None, "ada", "regression", NOW),
        OperatorAction(second, "chat", "default", "adjust_budget", -2.5, "bob", "bad\ufffdscorer", NOW + 1),
    ]
    assert history.operator_actions("chat", after=first) == found[1:]
    assert history.operator_actions("chat", limit=1) == found[:1]
    assert history.operator_log("chat", 10) == found[::-1]
    assert history.operator_log("chat", 1) == found[1:]


def test_an_action_that_means_nothing_is_misuse(history: History) -> None:
    """An unknown word, an adjustment without an amount, an amount without an adjustment."""
    for action, amount in (("melt", None), ("adjust_budget", None), ("freeze", 1.0)):
        with pytest.raises(ValueError, match=action):
            history.add_operator_action("chat", "*", action, "ada", "", NOW, amount)  # type: ignore[arg-type]
    assert history.operator_log("chat") == []


def test_no_action_slips_in_behind_one_that_was_read(history: History) -> None:
    """While one is being added the next waits, so that numbers are committed in their order."""
    inside, release, order = threading.Event(), threading.Event(), []

    def slow() -> None:
        with history.transaction() as connection:
            operators.add(connection, "chat", "*", "freeze", "ada", "", NOW, None)
            inside.set()
            release.wait(5)
            order.append("slow")

    def quick() -> None:
        history.add_operator_action("chat", "*", "resume", "bob", "", NOW)
        order.append("quick")

    with ThreadPoolExecutor(2) as threads:
        a = threads.submit(slow)
        assert inside.wait(5)
        b = threads.submit(quick)
        threading.Event().wait(0.1)  # time enough for one that does not wait
        release.set()
        a.result(10), b.result(10)
    assert order == ["slow", "quick"]


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_is_found_by_its_id(history: History, epoch: int) -> None:
    """In any pool or in one; the one received last when two pools have it."""
    history.claim_epoch("code", "first", NOW)
    history.save_tick("chat", epoch, NOW, requests=[touched("chat", "r1", confidence=0.5)])
    history.save_tick("code", 1, NOW + 1, requests=[a_request("code", "r1")])
    found = history.find_request("r1", "chat")
    assert found is not None
    assert (found["pool"], found["arm"], found["label_drawn"], found["confidence"]) == ("chat", "lenient", True, 0.5)
    assert found["received"] == datetime.fromtimestamp(NOW, UTC)
    newest = history.find_request("r1")
    assert newest is not None
    assert newest["pool"] == "code"
    assert history.find_request("r2") is None
    assert history.find_request("r1", "other") is None


# -- slices and minutes ------------------------------------------------------------------------------------------------


def test_a_slice_holds_its_newest_counts(history: History, epoch: int) -> None:
    """Rows are told apart by start, evidence epoch, level and rule."""
    history.save_tick("chat", epoch, NOW, slices=[a_slice(), a_slice(level=0), a_slice(rule="forgive")])
    history.save_tick("chat", epoch, NOW + 1, slices=[a_slice(requests=9, fork_loss=-0.5)])
    found = {(r["level"], r["rule"]): (r["requests"], r["fork_loss"]) for r in rows(history, budget_slices)}
    assert found == {(-40, "token_v3"): (9, -0.5), (0, "token_v3"): (5, 0.25), (-40, "forgive"): (5, 0.25)}


def test_a_minute_is_saved_once(history: History, epoch: int) -> None:
    """A commit whose answer was lost is tried again; nothing is added twice."""
    minute = [a_token_row(position=1), a_token_row(position=2), a_round_row()]
    history.save_tick("chat", epoch, NOW, rollups=minute)
    history.save_tick("chat", epoch, NOW, rollups=minute)
    assert [(r["position"], r["step"], r["drafted"]) for r in rows(history, token_rollups)] == [(1, 60, 8), (2, 60, 8)]
    assert [r["rounds"] for r in rows(history, round_rollups)] == [4]


def test_a_superseded_tick_keeps_what_was_seen_and_decided(history: History, epoch: int) -> None:
    """Decisions are marked; state, slices and minutes are the successor's, who counts them again from the stream."""
    history.claim_epoch("chat", "second", NOW)
    history.save_tick("chat", epoch + 1, NOW, decisions=[a_decision(epoch=epoch + 1)], snapshot={"by": "second"})
    late = {"requests": [a_request()], "slices": [a_slice()], "rollups": [a_token_row()], "snapshot": {"by": "first"}}
    for _ in range(2):
        history.save_tick("chat", epoch, NOW + 1, decisions=[a_decision()], superseded=True, **late)
    assert [(r["epoch"], r["superseded"]) for r in rows(history, decisions)] == [(epoch + 1, False), (epoch, True)]
    assert {d["epoch"]: d["superseded"] for d in history.decisions("chat")} == {epoch: True, epoch + 1: False}
    assert history.find_request("r1") is not None
    assert rows(history, budget_slices) == rows(history, token_rollups) == []
    assert history.load_snapshot("chat") == ({"by": "second"}, "0-0")


def test_a_state_does_not_go_back_in_time(history: History, epoch: int) -> None:
    """A tick that is saved again after a later one leaves the later one's state; a new epoch may set the clock back."""
    history.save_tick("chat", epoch, NOW + 5, snapshot={"n": 2}, last_id="7-0")
    history.save_tick("chat", epoch, NOW, snapshot={"n": 1}, last_id="5-0")
    assert history.load_snapshot("chat") == ({"n": 2}, "7-0")
    history.claim_epoch("chat", "second", NOW)
    history.save_tick("chat", epoch + 1, NOW - 60, snapshot={"n": 3}, last_id="8-0")
    assert history.load_snapshot("chat") == ({"n": 3}, "8-0")
    assert [row["epoch"] for row in rows(history, snapshots)] == [epoch + 1]
