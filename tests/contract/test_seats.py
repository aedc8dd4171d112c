"""The heartbeat of a pool's leader, who waits beside it, and turns of jobs, on every stream server."""

from __future__ import annotations

import pytest
import redis

from storage.connection import epoch_key, leader_key, members_key, turn_key
from storage.seats import Seat, SeatStore
from tests.support import wait_until


@pytest.fixture
def seats(client: redis.Redis) -> SeatStore:
    return SeatStore(client)


def test_nobody_holds_a_pool_before_the_first(seats: SeatStore, pool: str) -> None:
    """Asking makes a member, not a leader."""
    assert seats.attend(pool, "a", 5.0) == Seat(None, 0, 0, ("a",))
    assert seats.attend(pool, "b", 5.0) == Seat(None, 0, 0, ("a", "b"))


def test_one_of_two_gets_the_seat_and_the_other_sees_it(seats: SeatStore, pool: str) -> None:
    """The winner claims its epoch at leisure: asking again keeps its seat."""
    assert seats.acquire(pool, "a", 5.0)
    assert not seats.acquire(pool, "b", 5.0)
    assert seats.attend(pool, "b", 5.0).holder == "a"
    assert seats.attend(pool, "a", 5.0, epoch=4) == Seat("a", 4, 4, ("a", "b"))


def test_the_heartbeat_ends_with_its_leader(seats: SeatStore, client: redis.Redis, pool: str) -> None:
    """Its membership too; the epoch is remembered."""
    seats.attend(pool, "a", 0.02, epoch=4)
    assert wait_until(lambda: not client.exists(leader_key(pool)))
    assert seats.attend(pool, "b", 5.0) == Seat(None, 0, 4, ("b",))


def test_a_newer_epoch_takes_the_heartbeat_and_an_older_one_does_not(seats: SeatStore, pool: str) -> None:
    """A leader that was paused finds its successor."""
    seats.attend(pool, "a", 5.0, epoch=4)
    assert seats.attend(pool, "b", 5.0, epoch=5).holder == "b"
    assert seats.attend(pool, "a", 5.0, epoch=4) == Seat("b", 5, 5, ("a", "b"))


def test_an_old_leader_does_not_beat_again_after_its_successor_left(seats: SeatStore, pool: str) -> None:
    """The seat is empty, but the highest epoch says that it is not his."""
    seats.attend(pool, "b", 5.0, epoch=5)
    seats.release(pool, "b", 5.0)
    assert seats.attend(pool, "a", 5.0, epoch=4).holder == ""


def test_a_leader_that_is_well_keeps_its_seat_from_one_that_only_wants_it(seats: SeatStore, pool: str) -> None:
    """It was late for a beat, and somebody had taken the seat without an epoch yet."""
    assert seats.acquire(pool, "b", 5.0)
    assert seats.attend(pool, "a", 5.0, epoch=4).holder == "a"


def test_a_vacated_seat_is_free_at_once(seats: SeatStore, pool: str) -> None:
    """Only its holder can vacate it."""
    seats.attend(pool, "a", 5.0, epoch=4)
    seats.release(pool, "b", 5.0)
    assert not seats.acquire(pool, "b", 5.0)
    seats.release(pool, "a", 5.0)
    assert seats.acquire(pool, "b", 5.0)


def test_a_holder_known_to_be_gone_can_be_replaced(seats: SeatStore, pool: str) -> None:
    """By name: the seat of a third one is not touched."""
    seats.attend(pool, "a", 5.0, epoch=4)
    assert not seats.acquire(pool, "b", 5.0, instead_of="c")
    assert seats.acquire(pool, "b", 5.0, instead_of="a")


def test_who_leaves_is_no_member(seats: SeatStore, pool: str) -> None:
    """At once."""
    seats.attend(pool, "a", 5.0)
    seats.leave(pool, "a")
    assert seats.attend(pool, "b", 5.0).members == ("b",)


def test_of_four_controllers_one_has_the_turn(seats: SeatStore, client: redis.Redis, pool: str) -> None:
    """A turn is a period of the server's clock, wherever in it the controllers ask."""
    assert [seats.take_turn(pool, 3600.0) for _ in range(4)].count(True) <= 1
    client.set(turn_key(pool), 0, px=5000)
    assert [seats.take_turn(pool, 3600.0) for _ in range(4)] == [True, False, False, False]
    client.delete(turn_key(pool))


def test_every_key_ends(seats: SeatStore, client: redis.Redis, pool: str) -> None:
    """Nothing stays for ever."""
    seats.attend(pool, "a", 5.0, epoch=4)
    seats.release(pool, "a", 5.0)
    assert seats.take_turn(pool, 60.0)
    for key in (leader_key(pool), epoch_key(pool), members_key(pool), turn_key(pool)):
        assert client.pttl(key) > 0
    client.delete(turn_key(pool))
