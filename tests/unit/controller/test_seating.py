"""Who claims a pool, when, and when a pool moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from controller.seating import Settled, Watch, is_predecessor, place_of, preference, seat_name
from storage.seats import Seat

TTL = 4.0
A, B, C = (seat_name(place, 7, "x") for place in ("host-a", "host-b", "host-c"))
LED = Seat(A, 3, 3, (A, B, C))


def first_of(pool: str, members: tuple[str, ...]) -> str:
    return preference(pool, members)[0]


def look(watch: Watch, seat: Seat, *times: float) -> list[bool]:
    return [watch.may_claim(seat, now) for now in times]


def test_nobody_claims_while_the_heart_beats() -> None:
    """However long it lasts."""
    assert look(Watch("p", B, TTL), LED, 0.0, 100.0, 1e6) == [False] * 3


def test_the_preferred_one_claims_when_the_heart_has_stopped_for_half_its_length() -> None:
    """With the leader gone from the members; the others wait a length longer each, so that one claims."""
    gone = Seat(None, 0, 3, (B, C))
    order = preference("p", gone.members)
    watches = [Watch("p", name, TTL) for name in order]
    assert look(watches[0], gone, 0.0, 1.9, 2.0) == [False, False, True]
    assert look(watches[1], gone, 0.0, 5.9, 6.0) == [False, False, True]


def test_a_heart_that_only_missed_a_beat_resets_the_wait() -> None:
    """A server that was emptied looks like that for one tick."""
    watch = Watch("p", first_of("p", (B, C)), TTL)
    gone = Seat(None, 0, 3, (B, C))
    assert look(watch, gone, 0.0, 1.5) == [False, False]
    assert look(watch, LED, 1.6) == [False]
    assert look(watch, gone, 1.7, 3.6, 3.7) == [False, False, True]


def test_time_during_which_the_server_could_not_be_asked_does_not_count() -> None:
    """The leader cannot beat then, and may be well."""
    watch = Watch("p", first_of("p", (B, C)), TTL)
    gone = Seat(None, 0, 3, (B, C))
    assert look(watch, gone, 0.0) == [False]
    watch.lost_sight()
    assert look(watch, gone, 20.0, 22.0) == [False, True]


def test_a_vacated_seat_is_claimed_at_once_by_the_one_it_was_vacated_for() -> None:
    """The one that left it waits, and takes it again only when nobody came."""
    order = preference("p", (A, B, C))
    vacant = Seat("", 3, 3, (A, B, C))
    assert look(Watch("p", order[0], TTL), vacant, 0.0) == [True]
    assert look(Watch("p", order[1], TTL), vacant, 0.0, 5.9, 6.0) == [False, False, True]


def test_a_pool_that_nobody_ever_led_is_claimed_at_once() -> None:
    """A first start does not wait for a heart that never beat."""
    assert look(Watch("p", A, TTL), Seat(None, 0, 0, (A,)), 0.0) == [True]


def test_a_server_that_forgot_everything_is_not_one_that_nobody_ever_led() -> None:
    """After FLUSHALL the leader beats again within a tick."""
    watch = Watch("p", B, TTL)
    assert look(watch, LED, 0.0) == [False]
    assert look(watch, Seat(None, 0, 0, (B,)), 0.1, 2.0, 2.1) == [False, False, True]


def test_a_claim_that_was_begun_is_gone_on_with() -> None:
    """The seat is ours already, without an epoch yet."""
    assert look(Watch("p", B, TTL), replace(LED, holder=B, epoch=0), 0.0) == [True]


@pytest.mark.parametrize(
    ("holder", "gone"),
    [
        ("host-a:41:abc", True),  # the same process id: it was this one's earlier life
        ("host-a:13:abc", True),  # not running
        ("host-a:12:abc", False),  # running
        ("host-b:41:abc", False),  # nothing is known of other places
        ("host-a:41:me", False),
        ("host-a", False),
        ("", False),
        ("2001:db8::1:13:abc", False),
    ],
)
def test_an_earlier_life_is_known_by_place_and_process(holder: str, gone: bool) -> None:
    """A restart need not wait for the end of its own heartbeat."""
    assert is_predecessor(holder, "host-a:41:me", lambda process: process == 12) is gone


def test_a_new_controller_takes_its_share_and_moves_nothing_else() -> None:
    """Rendezvous hashing: pools move to the newcomer only, about a third of them."""
    pools = [f"pool-{i}" for i in range(300)]
    before = {p: first_of(p, (A, B)) for p in pools}
    after = {p: first_of(p, (A, B, C)) for p in pools}
    assert {after[p] for p in pools if after[p] != before[p]} == {C}
    assert all(70 < count < 130 for count in Counter(after.values()).values()), "binomial(300, 1/3) within 4 sigma"


def test_a_controller_that_restarts_keeps_its_pools() -> None:
    """Its name has another process id and token then."""
    again = seat_name(place_of(A), 99, "y")
    pools = [f"pool-{i}" for i in range(100)]
    assert [place_of(first_of(p, (A, B))) for p in pools] == [place_of(first_of(p, (B, again))) for p in pools]


def test_a_pool_moves_only_when_the_members_have_been_the_same_for_a_while() -> None:
    """A controller that comes and goes moves nothing."""
    pool = next(p for p in (f"pool-{i}" for i in range(50)) if first_of(p, (A, B)) == B)
    settled = Settled(pool, A, TTL)
    alone, both = replace(LED, members=(A,)), replace(LED, members=(A, B))
    assert not settled.should_move(alone, 100.0)
    assert not settled.should_move(both, 101.0)
    assert not settled.should_move(both, 108.9)
    assert settled.should_move(both, 109.0)
    assert not settled.should_move(alone, 110.0)
    assert not Settled(pool, B, TTL).should_move(both, 1000.0), "it is where it belongs"
