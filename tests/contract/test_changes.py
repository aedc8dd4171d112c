"""Decisions at which something changed, on each kind of database."""

from __future__ import annotations

from storage.history import History
from tests.support_storage import a_decision

NOW = 1_700_000_000.0


def test_only_changes_are_listed(history: History) -> None:
    """One decision a tick becomes one row for each new state or reason, by class; what was before does not count."""
    reasons = ["certified", "certified", "step_up", "step_up", "exhausted", "exhausted", "certified"]
    decisions = [
        a_decision(pool="chat", seq=i, time=NOW + i, reason=reason, traffic_class=cls)
        for i, reason in enumerate(reasons)
        for cls in ("default", "code")
        if cls == "default" or reason != "step_up"
    ]
    epoch = history.claim_epoch("chat", "test", NOW)
    history.save_tick("chat", epoch, NOW, decisions=decisions)
    rows = history.decision_changes("chat", "default", NOW - 1)
    assert [(row["unix_time"] - NOW, row["reason"]) for row in rows] == [
        (6, "certified"),
        (4, "exhausted"),
        (2, "step_up"),
        (0, "certified"),
    ]
    both = history.decision_changes("chat", None, NOW + 2.5, limit=2)
    assert [(row["traffic_class"], row["unix_time"] - NOW) for row in both] == [("code", 6), ("default", 6)]
    assert history.decision_changes("other", None, NOW - 1) == []
