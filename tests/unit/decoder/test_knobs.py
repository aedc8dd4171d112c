"""Leases at the worker: obeyed while they live, lossless with the last good block length otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoder.generate import Knobs
from decoder.knobs import DEFAULT_G, MAX_CLASSES, LeaseReader, Terms
from storage.errors import SampleError, StorageError
from storage.records import CapRow, KnobRow, Lease
from tests.support import wait_until

LEASE = Lease(
    pool="p", traffic_class="default", epoch=3, seq=5, policy_revision=1, issued=1000.0, ttl=10.0, rule="threshold",
    table=(KnobRow(1, 7, 0.5, 0.8), KnobRow(8, 3, 0.25, 1.0)), holdback=0.1, fork=0.5, label=0.2, explore=0.01,
)  # fmt: skip


class Store:
    """Answers with one lease, or raises."""

    def __init__(self, lease: Lease | None = None, ttl_left: float = 10.0):
        self.lease, self.ttl_left = lease, ttl_left
        self.error: Exception | None = None
        self.asked: list[str] = []

    def read(self, pool: str, traffic_class: str) -> tuple[Lease, float] | None:
        self.asked.append(traffic_class)
        if self.error is not None:
            raise self.error
        return None if self.lease is None else (self.lease, self.ttl_left)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def reader(store: Store, clock: Clock | None = None, **options: bool) -> LeaseReader:
    return LeaseReader(store, "p", clock=clock or Clock(), **options)


def is_lossless(k: Knobs) -> bool:
    return k.theta == 0 or k.rho == 0


def test_before_any_lease_the_worker_is_lossless_with_a_default_block_length():
    leases = reader(Store())
    k = leases.knobs()
    assert is_lossless(k) and k.g == DEFAULT_G
    assert leases.state == {"default": "lossless: no lease"} and leases.fallbacks == {"no lease": 1}


def test_a_lease_gives_the_row_of_the_batch():
    leases = reader(Store(LEASE))
    leases.poll_once()
    assert leases.knobs() == Knobs(
        g=7, rule="threshold", theta=0.5, rho=0.8, holdback=0.1, fork=0.5, label=0.2, explore=0.01, epoch=3, lease_seq=5
    )
    assert leases.knobs(rows=4).g == 3 and leases.knobs(rows=100).g == 3
    assert leases.state == {"default": "leased"} and leases.fallbacks == {}


def test_a_lease_lives_as_long_as_the_store_said_counted_from_the_question():
    clock = Clock()

    class Slow(Store):
        def read(self, pool: str, traffic_class: str) -> tuple[Lease, float] | None:
            clock.now += 1.0  # the answer takes a second, which is the lease's
            return super().read(pool, traffic_class)

    leases = reader(Slow(LEASE, ttl_left=4.0), clock)
    leases.poll_once()
    clock.now = 103.99
    assert not is_lossless(leases.knobs())
    clock.now = 104.0
    k = leases.knobs()
    assert is_lossless(k) and k.g == 7
    assert leases.state == {"default": "lossless: expired"} and leases.fallbacks == {"expired": 1}


def test_a_lease_never_outlives_its_own_ttl_nor_what_was_first_said():
    clock = Clock()
    store = Store(LEASE, ttl_left=1e6)
    leases = reader(store, clock)
    leases.poll_once()
    clock.now += 8
    leases.poll_once()  # the same lease: reading it again does not make it live longer
    store.lease = None
    store.error = StorageError("away")
    clock.now += 3
    assert is_lossless(leases.knobs())


def test_a_newer_lease_replaces_the_one_held():
    clock = Clock()
    store = Store(LEASE)
    leases = reader(store, clock)
    leases.poll_once()
    clock.now += 9
    store.lease = replace(LEASE, seq=6, table=(KnobRow(1, 2, 0.1, 1.0),))
    leases.poll_once()
    clock.now += 9
    assert leases.knobs().lease_seq == 6 and leases.knobs().g == 2


@pytest.mark.parametrize("older", [replace(LEASE, seq=4), replace(LEASE, epoch=2, seq=900)])
def test_an_older_lease_is_refused_and_the_newer_one_runs_out(older: Lease):
    clock = Clock()
    store = Store(LEASE)
    leases = reader(store, clock)
    leases.poll_once()
    store.lease = older
    clock.now += 5
    leases.poll_once()
    assert leases.knobs().lease_seq == 5 and leases.knobs().epoch == 3
    clock.now += 5
    assert is_lossless(leases.knobs())
    assert leases.fallbacks == {"older lease": 1}


def test_an_unreachable_store_lets_the_lease_run_out_and_its_return_opens_again():
    clock = Clock()
    store = Store(LEASE)
    leases = reader(store, clock)
    leases.poll_once()
    store.error = StorageError("away")
    clock.now += 9.5
    leases.poll_once()
    assert not is_lossless(leases.knobs())
    clock.now += 1
    leases.poll_once()
    assert is_lossless(leases.knobs()) and leases.knobs().g == 7
    assert leases.state == {"default": "lossless: unreachable"} and leases.fallbacks == {"unreachable": 1}
    store.error, store.lease = None, replace(LEASE, seq=6)
    leases.poll_once()
    assert leases.knobs().lease_seq == 6 and leases.state == {"default": "leased"}


BAD = {
    "malformed": [
        replace(LEASE, seq=6, pool="other"),
        replace(LEASE, seq=6, traffic_class="other"),
        replace(LEASE, seq=6, holdback=1.5),
        replace(LEASE, seq=6, table=(KnobRow(1, 10_000, 0.5, 1.0),)),
    ],
    "unknown rule": [replace(LEASE, seq=6, rule="telepathy")],
}


@pytest.mark.parametrize(("reason", "bad"), [(reason, bad) for reason, leases in BAD.items() for bad in leases])
def test_a_lease_that_cannot_be_obeyed_makes_the_worker_lossless_at_once(reason: str, bad: Lease):
    store = Store(LEASE)
    leases = reader(store)
    leases.poll_once()
    store.lease = bad
    leases.poll_once()
    leases.poll_once()
    assert is_lossless(leases.knobs()) and leases.knobs().g == 7
    assert leases.fallbacks == {reason: 1}


def test_a_lease_that_is_not_one_makes_the_worker_lossless_at_once():
    store = Store(LEASE)
    leases = reader(store)
    leases.poll_once()
    store.error = SampleError("lease: not JSON")
    leases.poll_once()
    assert is_lossless(leases.knobs()) and leases.fallbacks == {"malformed": 1}


def test_a_rule_that_reads_the_drafts_confidence_is_refused_only_with_a_deterministic_drafter():
    store = Store(replace(LEASE, rule="chow"))
    for deterministic in (False, True):
        leases = reader(store, deterministic_drafter=deterministic)
        leases.poll_once()
        assert is_lossless(leases.knobs()) == deterministic
    assert leases.fallbacks == {"incompatible rule": 1}


def test_a_lease_taken_away_ends_at_once():
    store = Store(LEASE)
    leases = reader(store)
    leases.poll_once()
    store.lease = None
    leases.poll_once()
    assert is_lossless(leases.knobs()) and leases.fallbacks == {"expired": 1}


def test_a_class_is_polled_once_it_was_asked_for_and_their_number_is_limited():
    store = Store()
    leases = reader(store)
    assert is_lossless(leases.knobs("code"))
    leases.poll_once()
    assert store.asked == ["default", "code"]
    for i in range(2 * MAX_CLASSES):
        leases.knobs(f"class{i}")
    assert len(leases.state) == MAX_CLASSES and is_lossless(leases.knobs("one-more"))


def test_polling_survives_a_fault_and_ends_when_told():
    store = Store(LEASE)
    store.error = RuntimeError("a fault of ours")
    leases = LeaseReader(store, "p", poll_s=0.001)
    leases.start()
    wait_until(lambda: len(store.asked) > 2)
    store.error = None
    wait_until(lambda: leases.knobs().lease_seq == 5)
    leases.close()
    asked = len(store.asked)
    assert asked == len(store.asked)
    with pytest.raises(ValueError, match="running"):
        leases.start()


# -- what a caller asks for --------------------------------------------------------------------------------------------

CAPPED = replace(LEASE, table=(KnobRow(8, 4, 0.8, 1.0),), caps=(CapRow(0.25, 0.1, 0.5), CapRow(0.5, 0.3, 1.0)))


def leased(lease: Lease = CAPPED) -> LeaseReader:
    leases = reader(Store(lease))
    leases.poll_once()
    return leases


@pytest.mark.parametrize(
    ("share", "theta", "rho"),
    [(1.0, 0.8, 1.0), (0.99, 0.3, 1.0), (0.5, 0.3, 1.0), (0.49, 0.1, 0.5), (0.25, 0.1, 0.5), (0.2, 0, 0), (0, 0, 0)],
)
def test_a_caller_who_asks_for_less_loss_gets_the_greatest_cap_it_can_afford(share, theta, rho):
    k = leased().knobs(terms=Terms(share=share))
    assert (k.theta, k.rho, k.g, k.epoch, k.lease_seq) == (theta, rho, 4, 3, 5)


def test_a_cap_never_loosens_what_the_lease_says():
    strict = replace(CAPPED, table=(KnobRow(8, 4, 0.05, 0.4),))
    k = leased(strict).knobs(terms=Terms(share=0.5))
    assert (k.theta, k.rho) == (0.05, 0.4)


def test_without_caps_less_than_the_whole_budget_is_lossless():
    assert is_lossless(leased(LEASE).knobs(terms=Terms(share=0.9)))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_no_caller_gets_more_than_the_budget(share):
    with pytest.raises(ValueError, match="only tighten"):
        Terms(share=share)


def test_a_caller_who_wants_lossless_is_lossless_under_every_lease_and_reported_so():
    for terms in (Terms(share=0), Terms(rule="lossless")):
        k = leased().knobs(terms=terms)
        assert terms.lossless and is_lossless(k) and k.rule == "lossless" and k.g == 4


def test_a_caller_who_named_a_rule_is_lossless_once_the_lease_has_another():
    assert leased().knobs(terms=Terms(rule="threshold")).theta == 0.8
    assert is_lossless(leased(replace(CAPPED, rule="token_v3")).knobs(terms=Terms(rule="threshold")))


def test_plain_decoding_drafts_nothing_with_and_without_a_lease():
    for leases in (leased(), reader(Store())):
        k = leases.knobs(terms=Terms(plain=True))
        assert (k.g, k.explore) == (0, 0.0)


def test_no_fork_is_drawn_where_none_could_be_scored():
    assert leased().knobs().fork == 0.5
    assert leased().knobs(terms=Terms(forks=False)).fork == 0.0


def test_a_caller_may_name_lossless_or_the_rule_of_the_lease():
    leases = leased()
    assert leases.refusal("default", "lossless") is None
    assert leases.refusal("default", "threshold") is None
    assert "there is: lossless, threshold" in str(leases.refusal("default", "token_v3"))
    unleased = reader(Store())
    assert unleased.refusal("default", "token_v3") is None  # lossless until there is a lease
    assert "no_rule" in str(unleased.refusal("default", "no_rule"))
