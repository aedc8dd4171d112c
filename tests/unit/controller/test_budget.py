"""The ledger of a rolling window: every request once, at what is known about its lease when the ledger is read."""

from __future__ import annotations

import json

import pytest

from controller.budget import LOWEST, UNKNOWN, LeaseBook, Ledger, Rates, level_of, level_tau


def ledger(began: float = 0.0) -> Ledger:
    """A window of 100 seconds in ten slices."""
    return Ledger(100.0, 10, began)


def add(
    book: Ledger, now: float, touches: int = 0, epoch: int = 0, level: int = 0, n: int = 1, tokens: int = 10
) -> None:
    """``n`` requests with ``touches`` each, every touched one forked with probability 1."""
    for _ in range(n):
        book.add_request(now, epoch, level, tokens=tokens, touches=touches, fork_prob=1.0 if touches else None)


@pytest.mark.parametrize("tau", [1e-6, 0.008, 0.16, 1.0, 5.3, 900.0])
def test_levels_are_within_a_half_step_of_the_planned_touches(tau: float) -> None:
    """A grid of 5 % steps keeps the number of keys small."""
    assert level_tau(level_of(tau)) == pytest.approx(tau, rel=0.026)


def test_a_lossless_lease_is_the_lowest_level() -> None:
    """And an unrecorded one lies above every measured level."""
    assert level_of(0.0) == LOWEST and level_tau(LOWEST) == 0.0
    assert level_of(1e300) < UNKNOWN


def test_charges_are_applied_when_read() -> None:
    """The same counts cost what the price says now, and a request never more than one."""
    book = ledger()
    add(book, 1.0, touches=5, n=10)
    add(book, 1.0, n=90)
    assert book.spent_upper(lambda e, l: 1.0) == 10.0
    assert book.spent_upper(lambda e, l: 0.02) == pytest.approx(1.0)
    assert book.requests == 100


def test_slices_leave_the_window_whole() -> None:
    """What was served more than a window and a slice ago is forgotten."""
    book = ledger()
    add(book, 5.0, touches=1, n=3)
    add(book, 104.0, touches=1, n=2)
    assert book.requests == 5
    book.advance(110.5)
    assert book.requests == 2
    book.advance(1e9)
    assert book.requests == 0 and book.spent() == 0.0 and book.expected_requests(1e9) == 0.0


def test_expected_requests_stand_in_for_a_window_that_has_not_passed() -> None:
    """A quarter in, at one request a second: 100 are expected. Later the count itself."""
    book = ledger()
    for second in range(25):
        add(book, float(second))
    assert book.expected_requests(25.0) == pytest.approx(100.0)
    assert book.expected_requests(250.0) == 25.0


def test_one_touch_as_the_very_first_request_does_not_eat_the_window() -> None:
    """The denominator is finite and not one request."""
    book = ledger(began=50.0)
    add(book, 50.0, touches=1)
    assert book.expected_requests(50.0) > 100


def test_a_slice_that_gained_quality_banks_no_credit() -> None:
    """Lenient was better in one slice and worse in the next: only the loss counts."""
    book = ledger()
    add(book, 1.0, touches=1, n=10)
    add(book, 11.0, touches=1, n=10)
    for _ in range(10):
        book.add_fork(1.0, 0, 0, -1.0, 1, True)
        book.add_fork(11.0, 0, 0, 0.5, 1, True)
    assert book.spent() == pytest.approx(5.0)
    assert book.spent(credit=True) == 0.0


def test_a_fork_is_counted_in_the_slice_of_its_request() -> None:
    """However late its label comes; if that slice is gone, nowhere."""
    book = ledger()
    add(book, 1.0, touches=2)
    add(book, 95.0, touches=2)
    book.add_fork(1.0, 0, 0, 1.0, 2, True)
    assert [sum(c.forks for c in s.cells.values()) for s in book.slices] == [1, 0]
    book.advance(120.0)
    book.add_fork(1.0, 0, 0, 1.0, 2, True)
    assert book.labelled(0) == 0


def test_tau_seen_is_the_highest_level_with_enough_labels_at_or_above_it() -> None:
    """Labels at higher levels count for lower ones; other epochs, unlabelled forks and unknown leases do not."""
    book = ledger()
    low, high = level_of(0.2), level_of(0.8)
    for level, n in ((low, 6), (high, 4), (UNKNOWN, 50)):
        add(book, 1.0, touches=1, level=level, n=n)
        for _ in range(n):
            book.add_fork(1.0, 0, level, 0.0, 1, True)
    for _ in range(20):
        book.add_fork(1.0, 0, high, 1.0, 1, False)
        book.add_fork(1.0, 1, high, 0.0, 1, True)
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
    assert book.expected_requests(200.0) == pytest.approx(2 * kept)


def test_mean_length_takes_the_longer_of_window_and_recent() -> None:
    """Touches per token must not be too many when answers have just become longer; few requests say nothing."""
    book = ledger()
    add(book, 1.0, tokens=10, n=5)
    assert book.mean_length(256.0) == 256.0
    add(book, 1.0, tokens=10, n=995)
    add(book, 50.0, tokens=100, n=50)
    assert book.mean_length(256.0) == pytest.approx(100.0)


def test_uneven_fork_probabilities_are_noticed() -> None:
    """A pooled mean is fair only if forks were drawn alike."""
    book = ledger()
    add(book, 1.0, touches=1)
    assert not book.uneven_forks()
    book.add_request(2.0, 0, 0, tokens=1, touches=1, fork_prob=0.05)
    assert book.uneven_forks()


def test_ledger_state_continues_exactly() -> None:
    """Through JSON, then more requests."""
    book = ledger()
    for second in range(60):
        add(book, float(second), touches=second % 3, level=second % 5)
        book.add_fork(float(second), 0, second % 5, 0.1, 2, True)
    again = Ledger.from_state(json.loads(json.dumps(book.to_state())))
    for b in (book, again):
        add(b, 130.0, touches=1)
    assert again.to_state() == book.to_state()
    assert again.spent() == book.spent()


def test_leases_are_found_by_the_run_they_belong_to() -> None:
    """Equal leases in a row are one run; gaps, unknown epochs and leases not issued yet are told apart."""
    book = LeaseBook()
    for seq, level in ((1, 5), (2, 5), (3, 7), (9, 7)):
        book.add(4, seq, 0, level)
    book.add(6, 1, 1, 2)
    book.add(4, 10, 9, 9)
    assert book.find(4, 2) == (0, 5)
    assert book.find(4, 3) == (0, 7)
    assert book.find(4, 8) == (0, 7)
    assert book.find(6, 1) == (1, 2)
    assert book.find(6, 2) is None
    assert book.find(5, 1) is None
    assert book.find(4, 0) is None
    assert len(book.to_state()[1]) == 3
    assert LeaseBook.from_state(json.loads(json.dumps(book.to_state()))).find(4, 3) == (0, 7)


def test_a_lease_book_is_bounded() -> None:
    """The oldest runs are forgotten."""
    book = LeaseBook(cap=10)
    for seq in range(100):
        book.add(1, seq, 0, seq)
    assert len(book.to_state()[1]) == 10
    assert book.find(1, 3) is None and book.find(1, 99) == (0, 99)


def test_rates_are_sums_over_sums_of_a_window() -> None:
    """A burst long ago is in the long window only; no requests give zero, not NaN."""
    rates = Rates(100.0, 50)
    assert rates.per_request(0.0, 100.0) == (0.0, 0.0)
    for _ in range(10):
        rates.add(10.0, 3)
    for _ in range(30):
        rates.add(95.0, 0)
    assert rates.per_request(96.0, 10.0) == (0.0, 0.0)
    assert rates.per_request(96.0, 100.0) == pytest.approx((0.25, 0.75))
    assert Rates.from_state(json.loads(json.dumps(rates.to_state()))).per_request(96.0, 100.0) == pytest.approx(
        (0.25, 0.75)
    )
