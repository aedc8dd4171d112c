"""What the history promises, on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, text

from storage.errors import LeaseRefused, SchemaTooNew, StorageError
from storage.history import Alert, History, Point, decision_of
from storage.leader import Leadership, single_controller
from storage.records import Lease
from storage.tables import metadata, to_json
from tests.support_storage import NOW, a_decision, a_fork, a_lease, a_request, a_score, touched


@pytest.fixture
def epoch(history: History) -> int:
    """The pool `chat` is claimed."""
    return history.claim_epoch("chat", "first", NOW)


def a_point(at: float = NOW, **values: float) -> Point:
    return Point("chat", "default", at, values or {"theta": 0.5})


def counts(history: History) -> dict[str, int]:
    """Rows in each table."""
    with history.transaction() as connection:
        return {
            name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }


# -- schema ------------------------------------------------------------------------------------------------------------


def test_an_empty_database_is_brought_up_to_date_once(database_url: str) -> None:
    """And says so before and after; a second time changes nothing."""
    history = History(database_url)
    assert history.schema_status().state == "empty"
    with pytest.raises(StorageError, match="lenity db upgrade"):
        history.check_schema()
    assert history.upgrade().state == "empty"
    history.check_schema()
    assert history.upgrade().state == "current"
    assert "current" in str(history.schema_status())
    history.close()


def test_the_migrations_make_the_tables_that_the_program_uses(history: History) -> None:
    """No column, index or constraint differs between `tables.py` and the migrated database."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with history.transaction() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        connection.execute(text("DROP INDEX ix_alerts_pool_time"))
        assert len(compare_metadata(MigrationContext.configure(connection), metadata)) == 1


def test_a_schema_of_a_newer_program_is_refused_and_left_alone(history: History) -> None:
    """By upgrade and by check, with what to do."""
    with history.transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for call in (history.upgrade, history.check_schema):
        with pytest.raises(SchemaTooNew, match="newer"):
            call()
    assert history.schema_status().current == "9999"


def test_several_upgrades_at_once_take_turns(database_url: str) -> None:
    """Two programs that start together on an empty database both succeed; one of them did the work."""
    stores = [History(database_url) for _ in range(3)]
    barrier = threading.Barrier(len(stores))

    def upgrade(store: History) -> str:
        barrier.wait()
        return store.upgrade().state

    with ThreadPoolExecutor(len(stores)) as threads:
        states = list(threads.map(upgrade, stores))
    assert sorted(states) == ["current", "current", "empty"]
    for store in stores:
        store.close()


def test_an_upgrade_that_was_cut_leaves_nothing_behind(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema and version are one transaction on SQLite too, so it can simply be run again."""
    from alembic.runtime.migration import HeadMaintainer

    history = History(database_url)
    with monkeypatch.context() as patch:

        def cut(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(HeadMaintainer, "update_to_step", cut)  # the tables are made, the version is not recorded
        with pytest.raises(KeyboardInterrupt):
            history.upgrade()
    assert history.schema_status().state == "empty"
    assert history.upgrade().state == "empty"
    assert history.claim_epoch("chat", "me", NOW) == 1
    history.close()


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_epochs_grow_for_each_pool_by_itself(history: History) -> None:
    """One more with each claim, whoever claims."""
    assert history.current_epoch("chat") is None
    assert [history.claim_epoch("chat", holder, NOW) for holder in ("a", "b", "a")] == [1, 2, 3]
    assert history.claim_epoch("code", "a", NOW) == 1
    assert history.current_epoch("chat") == 3


def test_an_epoch_can_be_lifted_above_leases_of_a_lost_database(history: History) -> None:
    """Never below the one before."""
    assert history.claim_epoch("chat", "a", NOW, at_least=8) == 8
    assert history.claim_epoch("chat", "a", NOW, at_least=3) == 9
    assert history.claim_epoch("chat", "a", NOW, at_least=20) == 20


def test_no_two_claims_get_the_same_epoch(history: History) -> None:
    """Sixteen claims from four threads."""
    with ThreadPoolExecutor(4) as threads:
        epochs = list(threads.map(lambda _: history.claim_epoch("chat", "x", NOW), range(16)))
    assert sorted(epochs) == list(range(1, 17))


def test_a_leader_learns_that_it_was_superseded(history: History) -> None:
    """A second claim ends the first."""
    first = Leadership.claim(history, "chat", "first", NOW)
    assert first.held()
    second = Leadership.claim(history, "chat", "second", NOW)
    assert (first.held(), second.held()) == (False, True)


def test_only_sqlite_is_limited_to_one_controller(database_url: str) -> None:
    """A second one is refused while the first lives, with its process named; PostgreSQL takes any number."""
    with single_controller(database_url):
        if database_url.startswith("sqlite"):
            with pytest.raises(StorageError, match=r"controller already: process \d+"), single_controller(database_url):
                pass
        else:
            with single_controller(database_url):
                pass
    with single_controller(database_url):
        pass


# -- a tick ------------------------------------------------------------------------------------------------------------


def a_tick() -> dict[str, Any]:
    return {
        "decisions": [a_decision()],
        "requests": [a_request(), touched("chat", "r2")],
        "forks": [a_fork("chat", "r2")],
        "scores": [a_score("chat", "r2"), a_score("chat", "r2", "fork", score=0.0)],
        "points": [a_point()],
        "alerts": [Alert("chat", "default", NOW, "LenityFastBurn", True, "burns 14 times")],
        "snapshot": {"estimate": [1 / 3, float("inf")]},
        "last_id": "1800000000000-3",
    }


def test_a_tick_is_saved_whole(history: History, epoch: int) -> None:
    """Every table gets its rows, and the state moves with the stream position."""
    assert history.load_snapshot("chat") is None
    history.save_tick("chat", epoch, NOW, **a_tick())
    found = counts(history)
    assert {name: found[name] for name in ("requests", "forks", "scores", "decisions", "points", "alerts")} == {
        "requests": 2,
        "forks": 1,
        "scores": 2,
        "decisions": 1,
        "points": 1,
        "alerts": 1,
    }
    assert history.load_snapshot("chat") == ({"estimate": [1 / 3, float("inf")]}, "1800000000000-3")


def test_the_same_tick_again_changes_nothing(history: History, epoch: int) -> None:
    """A commit whose answer was lost is tried again; the first version of a record stays."""
    history.save_tick("chat", epoch, NOW, **a_tick())
    before = counts(history)
    history.save_tick("chat", epoch, NOW, **a_tick())
    history.save_tick("chat", epoch, NOW, requests=[a_request(tokens=99)])
    assert counts(history) == before
    assert history.requests_between("chat", 0, NOW + 1)["tokens"] == 20


def test_a_tick_of_an_older_epoch_is_refused_whole(history: History, epoch: int) -> None:
    """Nothing of it is written, the state of the newer controller stays."""
    history.save_tick("chat", epoch, NOW, snapshot={"by": "first"}, last_id="1-0")
    history.claim_epoch("chat", "second", NOW)
    with pytest.raises(LeaseRefused, match="second"):
        history.save_tick("chat", epoch, NOW, **a_tick())
    assert counts(history)["requests"] == 0
    assert history.load_snapshot("chat") == ({"by": "first"}, "1-0")


def test_a_pool_that_nobody_claimed_takes_no_ticks(history: History) -> None:
    """An epoch comes from a claim."""
    with pytest.raises(LeaseRefused, match="no epoch"):
        history.save_tick("chat", 1, NOW, **a_tick())


def test_a_tick_that_fails_half_way_leaves_nothing(history: History, epoch: int) -> None:
    """The last table refuses; the first ones are empty too, and the database's own error does not come through."""
    with history.transaction() as connection:
        connection.execute(text("DROP TABLE snapshots"))
    with pytest.raises(StorageError, match="save a tick of chat"):
        history.save_tick("chat", epoch, NOW, **a_tick())
    with history.transaction() as connection:
        assert connection.execute(text("SELECT count(*) FROM requests")).scalar_one() == 0


def test_a_position_without_its_state_is_misuse(history: History, epoch: int) -> None:
    """It would skip what lies between after a restart. A state without news keeps the position."""
    with pytest.raises(ValueError, match="position"):
        history.save_tick("chat", epoch, NOW, last_id="5-0")
    history.save_tick("chat", epoch, NOW, snapshot={"n": 1})
    assert history.load_snapshot("chat") == ({"n": 1}, "0-0")
    history.save_tick("chat", epoch, NOW, snapshot={"n": 2}, last_id="7-0")
    history.save_tick("chat", epoch, NOW, snapshot=to_json({"n": 3}), last_id=None)
    assert history.load_snapshot("chat") == ({"n": 3}, "7-0")


def test_a_claim_waits_for_a_tick_that_is_being_saved(history: History, epoch: int) -> None:
    """The epoch that a tick has checked is still the newest when it commits: no write slips in behind a takeover."""
    seen: list[str] = []
    checked, release = threading.Event(), threading.Event()
    genuine = history._require_epoch

    def slow(*args: Any) -> None:
        genuine(*args)
        checked.set()
        release.wait(5)
        seen.append("tick")

    history._require_epoch = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        tick = threads.submit(history.save_tick, "chat", epoch, NOW, requests=[a_request()])
        assert checked.wait(5)
        claim = threads.submit(lambda: (history.claim_epoch("chat", "second", NOW), seen.append("claim")))
        threading.Event().wait(0.1)  # time enough for a claim that does not wait
        release.set()
        tick.result(10), claim.result(10)
    assert seen == ["tick", "claim"]


def test_numpy_numbers_can_be_saved(history: History, epoch: int) -> None:
    """Estimates come out of NumPy; what is not finite is no point of a series."""
    point = a_point(theta=np.float32(0.5), g=np.int64(4), upper=float("inf"), mean=float("nan"))  # type: ignore[arg-type]
    decision = a_decision(estimates={"reach": np.array([1.0, 0.5]), "ready": np.bool_(True), "n": np.int64(3)})
    history.save_tick("chat", epoch, NOW, decisions=[decision], points=[point], snapshot={"a": np.float64(0.1)})
    assert history.points("chat", "default")[0].values == {"theta": 0.5, "g": 4.0}
    assert history.decisions("chat")[0]["estimates"] == {"reach": [1.0, 0.5], "ready": True, "n": 3}


def test_text_that_a_database_cannot_hold_does_not_stop_the_tick(history: History, epoch: int) -> None:
    """NUL and halves of surrogate pairs are replaced."""
    history.save_tick("chat", epoch, NOW, decisions=[a_decision(explanation="a\x00b\ud800c")])
    assert history.decisions("chat")[0]["explanation"] == "a\ufffdb?c"
    assert history.add_policy_revision("chat", "a: \x00", "", "f\x00", NOW, accepted=False, error="no \x00") == 1


# -- readers -----------------------------------------------------------------------------------------------------------


def test_a_decision_comes_back_bit_for_bit(history: History, epoch: int) -> None:
    """Lease, time, inputs and infinities: it can be replayed."""
    decision = a_decision()
    history.save_tick("chat", epoch, NOW, decisions=[decision])
    [row] = history.decisions("chat")
    assert decision_of(row) == decision
    assert Lease.from_json(json.dumps(row["lease"])).to_json() == a_lease().to_json()
    assert row["time"] == datetime.fromtimestamp(decision.time, UTC)
    assert (row["epoch"], row["seq"], row["policy_revision"]) == (1, 1, 3)


def test_decisions_are_newest_first_and_can_be_narrowed(history: History, epoch: int) -> None:
    """By class, by time, by number."""
    decisions = [
        a_decision(seq=n, time=NOW + n, traffic_class="code" if n % 2 else "default", lease=a_lease(seq=n))
        for n in range(6)
    ]
    history.save_tick("chat", epoch, NOW, decisions=decisions)

    def found(*args: Any, **more: Any) -> list[int]:
        return [row["seq"] for row in history.decisions("chat", *args, **more)]

    assert found() == [5, 4, 3, 2, 1, 0]
    assert found("code") == [5, 3, 1]
    assert found(since=NOW + 3) == [5, 4]
    assert found("default", NOW, 1) == [4]
    assert found(limit=0) == []
    assert history.decisions("other") == []


def test_points_are_the_newest_in_the_order_of_time(history: History, epoch: int) -> None:
    """Later than `since`, of one class."""
    history.save_tick("chat", epoch, NOW, points=[a_point(NOW + n, n=n) for n in range(5)])
    history.save_tick("chat", epoch, NOW, points=[Point("chat", "code", NOW, {"n": 9.0})])
    assert [p.values["n"] for p in history.points("chat", "default", since=0, limit=3)] == [2, 3, 4]
    assert [p.time for p in history.points("chat", "default", since=NOW + 3)] == [NOW + 4]
    assert history.points("chat", "code") == [Point("chat", "code", NOW, {"n": 9.0})]


def test_alerts_come_back_newest_first(history: History, epoch: int) -> None:
    """When each began and ended."""
    began = Alert("chat", "default", NOW, "LenityFastBurn", True, "burns")
    ended = Alert("chat", "default", NOW + 60, "LenityFastBurn", False, "")
    history.save_tick("chat", epoch, NOW, alerts=[began, ended])
    assert history.alerts("chat") == [ended, began]
    assert history.alerts("chat", "code") == []
    assert history.alerts("chat", "default", NOW) == [ended]


def test_policy_revisions_are_numbered_and_a_restart_makes_no_new_one(history: History) -> None:
    """What is in force is the same revision, whatever was refused since; going back to an older one is a new one."""

    def add(document: str, accepted: bool = True, error: str | None = None) -> int:
        return history.add_policy_revision("chat", document, f"sha-{document}", "p.yaml", NOW, accepted, error)

    assert [add("a"), add("a"), add("b"), add("a"), add("bad", False, "line 3")] == [1, 1, 2, 3, 4]
    assert [add("a"), add("bad", False, "line 3"), add("worse", False, "line 3"), add("c")] == [3, 4, 5, 6]
    assert history.add_policy_revision("code", "a", "sha-a", "q.yaml", NOW, accepted=True, error=None) == 7
    assert add("bad", False, "line 4") == 8
    newest = history.policy_revisions("chat", 2)
    assert [(r["revision"], r["accepted"], r["error"]) for r in newest] == [(8, False, "line 4"), (6, True, None)]
    assert newest[1]["time"] == datetime.fromtimestamp(NOW, UTC)
    assert newest[1]["text"] == "c"
    assert [(r["pool"], r["revision"], r["text"]) for r in history.policies_in_force()] == [
        ("code", 7, "a"),
        ("chat", 6, "c"),
    ]


def test_requests_are_summed_by_arm_with_their_scores(history: History, epoch: int) -> None:
    """A lenient request's fork is lossless, a held-back request's fork is lenient: losses pair up accordingly."""
    history.save_tick(
        "chat",
        epoch,
        NOW,
        requests=[
            a_request(),
            touched("chat", "r2", tokens=20),
            touched("chat", "r3", "holdback", tokens=30),
            touched("chat", "r4", traffic_class="code"),
        ],
        forks=[a_fork("chat", "r2"), a_fork("chat", "r3"), a_fork("chat", "r4", done=False)],
        scores=[
            a_score("chat", "r1"),
            a_score("chat", "r2", "served", score=0.25),
            a_score("chat", "r2", "fork", score=1.0),
            a_score("chat", "r3", "served", score=1.0),
            a_score("chat", "r3", "fork", score=0.5),
            a_score("chat", "r4", "served", score=0.0),
        ],
    )
    found = history.requests_between("chat", NOW, NOW + 1)
    sums = ("requests", "touched", "touches", "tokens", "target_passes", "seconds", "forks_drawn", "forks_done")
    assert [found[name] for name in sums] == [4, 3, 6, 70, 16, 2.0, 3, 2]
    assert found["arms"]["lenient"]["tokens"] == 30
    assert found["arms"]["holdback"]["requests"] == 1
    assert found["scores"]["lenient"] == {"served": {"n": 2, "sum": 0.25}, "fork": {"n": 1, "sum": 1.0}}
    assert (found["served_scores"], found["served_score_sum"]) == (4, 2.25)
    assert found["paired"] == {"n": 2, "lossless_sum": 2.0, "lenient_sum": 0.75, "loss_sum": 1.25}
    assert history.requests_between("chat", NOW, NOW + 1, "code")["requests"] == 1


def test_a_stretch_of_time_without_requests_sums_to_zero(history: History) -> None:
    """No division, no None."""
    found = history.requests_between("chat", NOW, NOW + 1)
    assert found["requests"] == found["tokens"] == found["served_scores"] == found["paired"]["n"] == 0
    assert set(found["arms"]) == {"untouched", "lenient", "holdback"}


def test_requests_count_by_when_they_came_or_when_they_began(history: History, epoch: int) -> None:
    """The end of a stretch belongs to the next one."""
    history.save_tick("chat", epoch, NOW, requests=[a_request(started=NOW - 100)])
    assert history.requests_between("chat", NOW, NOW + 1)["requests"] == 1
    assert history.requests_between("chat", NOW - 1, NOW)["requests"] == 0
    assert history.requests_between("chat", NOW - 101, NOW - 99, by="started")["requests"] == 1


def test_an_instant_is_the_same_in_every_zone(history: History, epoch: int) -> None:
    """13:30:45 in one zone, asked for in two others; a time without a zone is no instant."""
    west, east = timezone(timedelta(hours=-8)), timezone(timedelta(hours=5, minutes=30))
    stored = datetime(2026, 3, 8, 13, 30, 45, 123456, tzinfo=west)
    history.save_tick("chat", epoch, stored.timestamp(), points=[a_point(stored.timestamp())], requests=[a_request()])
    [point] = history.points("chat", "default", since=(stored - timedelta(microseconds=1)).astimezone(east))
    assert datetime.fromtimestamp(point.time, UTC) == stored
    assert history.points("chat", "default", since=stored.astimezone(UTC)) == []
    assert history.requests_between("chat", stored.astimezone(east), stored.timestamp() + 1)["requests"] == 1
    with pytest.raises(ValueError, match="zone"):
        history.points("chat", "default", since=stored.replace(tzinfo=None))


def test_readers_do_not_wait_for_a_writer(history: History, epoch: int) -> None:
    """The page is answered while a tick is being saved, from the state before it."""
    history.save_tick("chat", epoch, NOW, points=[a_point()])
    with history.transaction() as connection, ThreadPoolExecutor(1) as thread:
        connection.execute(text("DELETE FROM points"))
        assert len(thread.submit(history.points, "chat", "default").result(2)) == 1


# -- the database is away ----------------------------------------------------------------------------------------------


def test_every_call_says_storage_error_when_the_tables_are_missing(database_url: str) -> None:
    """And nothing of the driver's comes through."""
    history = History(database_url)
    for call in (
        lambda: history.claim_epoch("chat", "me", NOW),
        lambda: history.current_epoch("chat"),
        lambda: history.save_tick("chat", 1, NOW),
        lambda: history.load_snapshot("chat"),
        lambda: history.add_policy_revision("chat", "", "", "", NOW, accepted=True, error=None),
        lambda: history.policy_revisions("chat"),
        lambda: history.points("chat", "default"),
        lambda: history.decisions("chat"),
        lambda: history.alerts("chat"),
        lambda: history.requests_between("chat", 0, 1),
        lambda: history.find_request("r1"),
        lambda: history.add_operator_action("chat", "*", "freeze", "ada", "", NOW),
        lambda: history.operator_actions("chat"),
        lambda: history.operator_log("chat"),
    ):
        with pytest.raises(StorageError):
            call()
    history.close()
