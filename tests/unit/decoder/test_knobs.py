"""Leases at the worker: obeyed while they live, lossless with the last good block length otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from decoder.generate import Knobs
from decoder.knobs import DEFAULT_G, MAX_CLASSES, LeaseReader, Terms
from storage.errors import SampleError, StorageError
from storage.records import CapRow, KnobRow, Lease, Trial
from tests.support import wait_until

LEASE = Lease(
    pool="p", traffic_class="default", epoch=3, seq=5, policy_revision=1, issued=1000.0, ttl=10.0, rule="threshold",
    table=(KnobRow(1, 7, 0.5, 0.8), KnobRow(8, 3, 0.25, 1.0)), holdback=0.1, fork=0.5, label=0.2, explore=0.01,
)  # fmt: skip


NGRAMS = {"plain": (), "speculative": ("threshold", "token_v2", "token_v3")}  # what a deterministic drafter can do


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


def reader(store: Store, clock: Clock | None = None, **options: Any) -> LeaseReader:
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
    for able in (None, NGRAMS):
        leases = reader(store, able=able)
        leases.poll_once()
        assert is_lossless(leases.knobs()) == (able is not None)
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
        k = leases.knobs(terms=Terms(strategy="plain"))
        assert (k.g, k.explore) == (0, 0.0)


def test_no_fork_is_drawn_where_none_could_be_scored():
    assert leased().knobs().fork == 0.5
    assert leased().knobs(terms=Terms(forks=False)).fork == 0.0


LISTED = replace(LEASE, strategies=("speculative", "sequence_cascade"), rules=("threshold", "token_v3"))


@pytest.mark.parametrize(
    ("strategy", "rule", "refused"),
    [
        (None, "lossless", None),
        (None, "threshold", None),  # the lease's own
        (None, "token_v3", None),  # on the list
        (None, "lenience", "rule"),
        ("plain", None, None),  # always
        ("speculative", "token_v3", None),
        ("sequence_cascade", None, None),
        ("sequence_cascade", "confidence_min", None),  # a rule of its own
        ("sequence_cascade", "bild", "rule"),
        ("bild", None, "strategy"),
        ("telepathy", None, "strategy"),
    ],
)
def test_a_caller_may_ask_for_what_is_on_the_lists_of_the_lease(strategy, rule, refused):
    told = leased(LISTED).refusal("default", strategy, rule)
    assert (told and told[0]) == refused
    if told is not None:
        assert "is not on this pool's list; there is: " in told[1]


def test_what_the_models_cannot_do_is_refused_and_said_so():
    leases = reader(Store(replace(LISTED, rules=("threshold", "chow"))), able=NGRAMS)
    leases.poll_once()
    what, why = leases.refusal("default", "sequence_cascade", None) or ("", "")
    assert what == "strategy" and "cannot be used with this worker's models; there is: plain, speculative" in why
    what, why = leases.refusal("default", None, "chow") or ("", "")
    assert what == "rule" and "cannot be used with this worker's models; there is: lossless, threshold" in why


def test_without_a_lease_everything_that_exists_may_be_asked_for_and_is_lossless():
    unleased = reader(Store())
    for strategy, rule in ((None, "token_v3"), ("bild", "bild"), ("sequence_cascade", None)):
        assert unleased.refusal("default", strategy, rule) is None
        assert is_lossless(unleased.knobs(terms=Terms(strategy=strategy, rule=rule)))
    assert "no_rule" in str(unleased.refusal("default", None, "no_rule"))


# -- depth, spans, deadline --------------------------------------------------------------------------------------------


def test_depth_limits_leniency_to_the_first_positions_and_a_cap_limits_it_further():
    deep = replace(
        LEASE, table=(KnobRow(8, 4, 0.8, 0.5, 2.25),), caps=(CapRow(0.5, 0.8, 1.0, 1.0), CapRow(0.7, 0.8, 1.0, 3.0))
    )
    k = leased(deep).knobs()
    assert k.depth == 2.25 and k.weights(4).tolist() == [0.5, 0.5, 0.125, 0.0]
    assert leased(deep).knobs(terms=Terms(share=0.5)).depth == 1.0
    assert leased(deep).knobs(terms=Terms(share=0.7)).depth == 2.25
    assert is_lossless(leased(replace(deep, table=(KnobRow(8, 4, 0.8, 0.5, 0.0),))).knobs())
    assert Knobs(g=3, rule="threshold", theta=0.5).weights(3).tolist() == [1.0, 1.0, 1.0]


def test_structured_spans_and_the_label_deadline_come_from_the_lease():
    assert (leased().knobs().structured, leased().knobs().label_deadline) == (False, 900.0)
    k = leased(replace(LEASE, structured="lenient", label_deadline=30.0)).knobs()
    assert (k.structured, k.label_deadline) == (True, 30.0)


def test_a_lease_of_before_is_obeyed_as_ever():
    """Its fields are those of the first release."""
    old = json.loads(LEASE.to_json())
    for name in ("strategy", "strategies", "rules", "structured", "label_deadline", "trial"):
        del old[name]
    for row in old["table"]:
        del row["depth"]
    lease = Lease.from_json(json.dumps(old))
    assert leased(lease).knobs() == leased(LEASE).knobs() and leased(lease).knobs().lenient
    assert leased(lease).admit("default", Terms(), 7) == Terms(strategy="speculative")


# -- strategies and trials ---------------------------------------------------------------------------------------------

TRIAL = Trial(0.25, "sequence_cascade", "confidence_min", (KnobRow(8, 6, 0.6, 0.9),))
TRIED = replace(CAPPED, trial=TRIAL, rules=("threshold", "token_v3"))


def test_a_request_without_wishes_gets_the_lease_s_strategy():
    own = replace(LEASE, strategy="sequence_cascade", rule="confidence_mean", strategies=("sequence_cascade",))
    assert leased(own).admit("default", Terms(), 1).strategy == "sequence_cascade"
    assert leased(own).knobs(terms=Terms(strategy="sequence_cascade")).rule == "confidence_mean"
    assert is_lossless(leased(own).knobs(terms=Terms(strategy="speculative")))
    plain = replace(LEASE, strategy="plain")
    assert (leased(plain).knobs().g, leased(plain).knobs().rule) == (0, "lossless")


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("unknown strategy", {"strategy": "telepathy"}),
        ("incompatible strategy", {"strategy": "sequence_cascade", "rule": "confidence_mean"}),
        ("incompatible rule", {"rule": "confidence_mean"}),
    ],
)
def test_a_default_strategy_that_cannot_be_done_leaves_the_worker_lossless_with_a_counted_reason(reason, changes):
    leases = reader(Store(replace(LEASE, **changes)), able=NGRAMS)
    leases.poll_once()
    assert is_lossless(leases.knobs()) and leases.fallbacks == {reason: 1}
    assert leases.admit("default", Terms(), 1).strategy == "speculative"


def test_a_share_of_the_requests_takes_part_in_the_trial_by_a_coin_of_their_seed():
    """1,000 coins at 0.25: outside 195..310 with a chance below 1e-4."""
    leases = leased(TRIED)
    taken = [leases.admit("default", Terms(), seed) for seed in range(1000)]
    assert taken == [leases.admit("default", Terms(), seed) for seed in range(1000)]
    tried, usual = Terms(strategy="sequence_cascade", rule="confidence_min"), Terms(strategy="speculative")
    assert 195 <= taken.count(tried) <= 310 and taken.count(usual) == 1000 - taken.count(tried)
    k = leases.knobs(terms=tried)
    assert (k.rule, k.theta, k.rho, k.g, k.lease_seq) == ("confidence_min", 0.6, 0.9, 6, 5)
    assert leases.knobs(terms=usual).rule == "threshold"


def test_who_asks_for_less_or_for_something_else_takes_no_part_in_the_trial():
    leases = leased(replace(TRIED, trial=replace(TRIAL, share=1.0)))
    for terms in (Terms(share=0.5), Terms(rule="lossless"), Terms(rule="threshold"), Terms(strategy="plain")):
        assert leases.admit("default", terms, 1) == replace(terms, strategy=terms.strategy or "speculative")
    for terms in (Terms(), Terms(strategy="sequence_cascade"), Terms(rule="confidence_min")):
        assert leases.admit("default", terms, 1).rule == "confidence_min"


def test_a_rule_on_the_list_is_lossless_unless_the_lease_or_its_trial_has_knobs_for_it():
    leases = leased(replace(TRIED, trial=replace(TRIAL, strategy="speculative", rule="token_v3")))
    assert leases.knobs(terms=Terms(rule="threshold")).theta == 0.8
    assert leases.knobs(terms=Terms(rule="token_v3")).theta == 0.6
    assert is_lossless(leases.knobs(terms=Terms(rule="token_v3", share=0.9)))  # caps are for the lease's own rule
    assert is_lossless(leased(TRIED).knobs(terms=Terms(rule="token_v3")))


def test_a_request_keeps_what_it_got_when_the_trial_ends_and_goes_on_losslessly():
    store = Store(replace(TRIED, trial=replace(TRIAL, share=1.0)))
    leases = reader(store)
    leases.poll_once()
    terms = leases.admit("default", Terms(), 3)
    assert leases.knobs(terms=terms).theta == 0.6
    store.lease = replace(TRIED, seq=6, trial=None)
    leases.poll_once()
    assert is_lossless(leases.knobs(terms=terms)) and leases.knobs(terms=terms).lease_seq == 6
    store.lease = replace(TRIED, seq=7, trial=None, strategy="sequence_cascade", rule="confidence_min")
    leases.poll_once()
    assert leases.knobs(terms=terms).theta == 0.8  # it won


def test_a_trial_that_cannot_be_done_is_left_out_and_counted_and_the_lease_is_obeyed():
    store = Store(replace(TRIED, trial=replace(TRIAL, share=1.0)))
    leases = reader(store, able=NGRAMS)
    leases.poll_once()
    leases.poll_once()
    assert leases.fallbacks == {"trial: incompatible strategy": 1}
    assert leases.admit("default", Terms(), 3) == Terms(strategy="speculative")
    assert leases.knobs().theta == 0.8
    store.lease = replace(TRIED, seq=6, trial=replace(TRIAL, table=(KnobRow(1, 100, 0.5, 1.0),)))
    leases.poll_once()
    assert is_lossless(leases.knobs()) and leases.fallbacks["malformed"] == 1
