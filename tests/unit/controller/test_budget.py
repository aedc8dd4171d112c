"""The ledger of a rolling window: every request once, at what is known about its lease when the ledger is read."""

from __future__ import annotations

import json

import pytest

from controller.bounds import mixture_radius
from controller.budget import LOWEST, UNKNOWN, Ledger, level_of, level_tau
from controller.burn import Rates
from controller.evidence import Evidence
from controller.leasebook import LeaseBook


def ledger(began: float = 0.0) -> Ledger:
    """A window of 100 seconds in ten slices."""
    return Ledger(100.0, 10, began)


def add(
    book: Ledger, now: float, touches: int = 0, epoch: int = 0, level: int = 0, n: int = 1, tokens: int = 10
) -> None:
    """``n`` requests with ``touches`` each."""
    touched = n * (touches > 0)
    book.add_requests(now, epoch, level, requests=n, tokens=n * tokens, touched=touched, touches=n * touches)


def forks(
    book: Ledger,
    arrived: float,
    z: float,
    *,
    n: int = 1,
    level: int = 0,
    epoch: int = 0,
    weight: float = 1.0,
    labelled: bool = True,
) -> None:
    """``n`` settled forks with the same difference."""
    book.add_fork(
        Evidence(n, n * z, n * z * z, n, n * labelled, weight, epoch, level, arrived=arrived, touched_at=arrived)
    )


@pytest.mark.parametrize("tau", [1e-6, 0.008, 0.16, 1.0, 5.3, 900.0])
def test_levels_are_within_a_half_step_of_the_planned_touches(tau: float) -> None:
    """A grid of 5 % steps keeps the number of keys small."""
    assert level_tau(level_of(tau)) == pytest.approx(tau, rel=0.026)


def test_a_lossless_lease_is_the_lowest_level() -> None:
    """And an unrecorded one lies above every measured level."""
    assert level_of(0.0) == LOWEST and level_tau(LOWEST) == 0.0
    assert level_of(1e300) < UNKNOWN


def test_what_is_in_flight_is_charged_at_the_price_of_now() -> None:
    """The same counts cost what the price says when it is read, and a request never more than one."""
    book = ledger()
    add(book, 1.0, touches=5, n=10)
    add(book, 1.0, n=90)
    assert book.spent_upper(0.05, lambda e, l: 1.0) == 10.0
    assert book.spent_upper(0.05, lambda e, l: 0.02) == pytest.approx(1.0)
    assert book.requests == 100


def test_what_is_settled_costs_its_weighed_losses_and_their_radius() -> None:
    """Four losses, each standing for two requests: 8, and the radius of 16 at scale 2; nothing is in flight."""
    book = ledger()
    add(book, 1.0, touches=1, n=400)
    forks(book, 1.0, 0.0, n=196, weight=2.0)
    forks(book, 1.0, 1.0, n=4, weight=2.0)
    book.flight.settle(2.0)
    assert book.spent_upper(0.05, lambda e, l: 1.0) == pytest.approx(8 + mixture_radius(16.0, 0.05, 2.0))
    assert book.spent(1.0) == 8.0
    assert book.severity == 8.0


def test_a_bound_never_exceeds_the_touched_requests() -> None:
    """Three touched requests cost at most three, whatever a young bound says."""
    book = ledger()
    add(book, 1.0, touches=4, n=3)
    forks(book, 1.0, 0.0, n=3)
    book.flight.settle(2.0)
    assert book.spent_upper(0.05, lambda e, l: 1.0) == 3.0


def test_requests_that_no_fork_stands_for_count_as_lost() -> None:
    """Their forks could not be drawn."""
    book = ledger()
    book.add_requests(1.0, 0, 0, requests=7, tokens=70, touched=7, touches=9, blind=True)
    book.flight.settle(2.0)
    assert book.spent_upper(0.05, lambda e, l: 0.0) == 7.0


def test_slices_of_another_aim_keep_their_own_bound() -> None:
    """A mixture is chosen when a slice is opened; the larger of the bounds since each change counts."""
    book = ledger()
    for at, aim in ((1.0, 0.1), (11.0, 0.4)):
        book.aim = aim
        add(book, at, touches=1, n=100)
        forks(book, at, 1.0, n=10)
    book.flight.settle(20.0)
    both = 20 + mixture_radius(20.0, 0.05, 1.0, 0.1)
    later = 10 + mixture_radius(10.0, 0.05, 1.0, 0.4)
    assert book.spent_upper(0.05, lambda e, l: 1.0) == pytest.approx(max(both, later))


def test_a_reset_forgives_what_was_served_before_it() -> None:
    """Also what comes to light later; requests and labels stay counted."""
    book = ledger()
    add(book, 1.0, touches=1, n=100)
    forks(book, 1.0, 1.0, n=10)
    book.forgive(2.0)
    forks(book, 1.0, 1.0, n=10)
    assert book.spent_upper(0.05, lambda e, l: 1.0) == 0.0
    add(book, 3.0, touches=1, n=100)
    forks(book, 3.0, 1.0, n=10)
    book.flight.settle(4.0)
    assert book.spent(0.0) == 10.0
    assert book.requests == 200 and book.labelled(0) == 30


def test_slices_leave_the_window_whole() -> None:
    """What was served more than a window and a slice ago is forgotten."""
    book = ledger()
    add(book, 5.0, touches=1, n=3)
    add(book, 104.0, touches=1, n=2)
    assert book.requests == 5
    book.advance(110.5)
    assert book.requests == 2
    book.advance(1e9)
    assert book.requests == 0 and book.spent(1.0) == 0.0 and book.expected_requests(1e9) == 0.0


def test_expected_requests_stand_in_for_a_window_that_has_not_passed() -> None:
    """A quarter in, at one request a second: 100 are expected. Later the rate since the oldest slice.

    What was counted at the very beginning came in the time before it.
    """
    book = ledger()
    add(book, 0.0, n=50)
    for second in range(1, 26):
        add(book, float(second))
    assert book.expected_requests(25.0) == pytest.approx(100.0)
    for second in range(26, 400):
        add(book, float(second))
    assert 105 <= book.requests <= 110
    assert book.expected_requests(400.0) == pytest.approx(100.0, abs=1.0)


def test_a_budget_is_for_the_requests_that_were_expected_when_they_were_served() -> None:
    """The evening's requests were planned for a window of 1,000; when traffic ends, they are not overspent."""
    book = ledger()
    for second in range(300):
        add(book, float(second), n=10)
        book.note_expected(float(second))
    assert book.budget_requests(300.0) == pytest.approx(1000.0, rel=0.02)
    book.advance(380.0)
    assert book.requests == 200 and book.expected_requests(380.0) < 250
    assert book.budget_requests(380.0) == pytest.approx(1000.0, rel=0.02)


def test_where_traffic_grows_the_requests_count_that_came() -> None:
    """Ten times as many: the budget grows with them, not before."""
    book = ledger()
    for second in range(350):
        add(book, float(second), n=1 if second < 300 else 10)
        book.note_expected(float(second))
    assert book.budget_requests(350.0) == pytest.approx(book.expected_requests(350.0))
    assert 400 < book.budget_requests(350.0) < 600


def test_one_touch_as_the_very_first_request_does_not_eat_the_window() -> None:
    """The denominator is finite and not one request."""
    book = ledger(began=50.0)
    add(book, 50.0, touches=1)
    assert book.expected_requests(50.0) > 100


def test_a_slice_that_gained_quality_banks_no_credit() -> None:
    """Lenient was better in one slice and worse in the next: only the loss counts."""
    book = ledger()
    for at, z in ((1.0, -1.0), (11.0, 0.5)):
        add(book, at, touches=1, n=10)
        forks(book, at, z, n=10)
    book.flight.settle(20.0)
    assert book.spent(0.0) == pytest.approx(5.0)


def test_a_fork_is_counted_in_the_slice_of_its_request() -> None:
    """However late its label comes; if that slice is gone, nowhere."""
    book = ledger()
    add(book, 1.0, touches=2)
    add(book, 95.0, touches=2)
    forks(book, 1.0, 1.0)
    assert [sum(c.forks for c in s.cells.values()) for s in book.slices] == [1, 0]
    book.advance(120.0)
    forks(book, 1.0, 1.0)
    assert book.labelled(0) == 0


def test_tau_seen_is_the_highest_level_with_enough_labels_at_or_above_it() -> None:
    """Labels at higher levels count for lower ones; other epochs, unlabelled forks and unknown leases do not."""
    book = ledger()
    low, high = level_of(0.2), level_of(0.8)
    for level, n in ((low, 6), (high, 4), (UNKNOWN, 50)):
        add(book, 1.0, touches=1, level=level, n=n)
        forks(book, 1.0, 0.0, n=n, level=level)
    forks(book, 1.0, 1.0, n=20, level=high, labelled=False)
    forks(book, 1.0, 0.0, n=20, level=high, epoch=1)
    assert book.tau_seen(0, 8) == level_tau(low)
    assert book.tau_seen(0, 4) == level_tau(high)
    assert book.tau_seen(0, 11) == 0.0
    assert book.labelled_at(0, 0.7) == 4


def test_a_longer_window_fills_up_from_what_is_kept() -> None:
    """Only the old window's requests are known, so the rest of the new one is expected at their rate."""
    book = ledger()
    for second in range(200):
        add(book, float(second))
    kept = book.requests
    book.set_window(200.0, 200.0)
    assert book.requests == kept
    assert book.expected_requests(200.0) == pytest.approx(200.0, rel=0.02)


def test_mean_length_takes_the_longer_of_window_and_recent() -> None:
    """Touches per token must not be too many when answers have just become longer; few requests say nothing."""
    book = ledger()
    add(book, 1.0, tokens=10, n=5)
    assert book.mean_length(256.0) == 256.0
    add(book, 1.0, tokens=10, n=995)
    add(book, 50.0, tokens=100, n=50)
    assert book.mean_length(256.0) == pytest.approx(100.0)


def test_ledger_state_continues_exactly() -> None:
    """Through JSON, then more requests."""
    book = ledger()
    book.aim = 0.2
    for second in range(60):
        add(book, float(second), touches=second % 3, level=second % 5)
        forks(book, float(second), 0.1, level=second % 5)
        book.note_expected(float(second))
    book.flight.settle(50.0)
    again = Ledger.from_state(json.loads(json.dumps(book.to_state())))
    for b in (book, again):
        add(b, 130.0, touches=1)
    assert again.to_state() == book.to_state()
    assert again.spent(0.1) == book.spent(0.1)
    assert again.spent_upper(0.05, lambda e, l: 0.5) == book.spent_upper(0.05, lambda e, l: 0.5)


def test_leases_are_found_by_the_run_they_belong_to() -> None:
    """Equal leases in a row are one run; gaps, unknown epochs and leases not issued yet are told apart."""
    book = LeaseBook()
    for seq, level in ((1, 5), (2, 5), (3, 7), (9, 7)):
        book.add(4, seq, {"r": (0, level)})
    book.add(6, 1, {"r": (1, 2), "trial": (2, 1)})
    book.add(4, 10, {"r": (9, 9)})
    assert book.find(4, 2) == {"r": (0, 5)}
    assert book.find(4, 3) == {"r": (0, 7)}
    assert book.find(4, 8) == {"r": (0, 7)}
    assert book.find(6, 1) == {"r": (1, 2), "trial": (2, 1)}
    assert book.find(6, 2) is None
    assert book.find(5, 1) is None
    assert book.find(4, 0) is None
    assert len(book.to_state()[1]) == 3
    again = LeaseBook.from_state(json.loads(json.dumps(book.to_state())))
    assert again.find(4, 3) == {"r": (0, 7)} and again.find(6, 1) == book.find(6, 1)


def test_a_lease_book_is_bounded() -> None:
    """The oldest runs are forgotten."""
    book = LeaseBook(cap=10)
    for seq in range(100):
        book.add(1, seq, {"r": (0, seq)})
    assert len(book.to_state()[1]) == 10
    assert book.find(1, 3) is None and book.find(1, 99) == {"r": (0, 99)}


def test_rates_are_sums_over_sums_of_a_window() -> None:
    """A burst long ago is in the long window only; no requests give zero, not NaN."""
    rates = Rates(100.0, 50)
    assert rates.per_request(0.0, 100.0) == (0.0, 0.0)
    rates.add(10.0, 10, 10, 30)
    rates.add(95.0, 30, 0, 0)
    assert rates.per_request(96.0, 10.0) == (0.0, 0.0)
    assert rates.per_request(96.0, 100.0) == pytest.approx((0.25, 0.75))
    assert Rates.from_state(json.loads(json.dumps(rates.to_state()))).per_request(96.0, 100.0) == pytest.approx(
        (0.25, 0.75)
    )
