"""Strategies compete by measured cost: a cascade is tried, leased where it is faster, and left where it is not.

One class steered against a simulated worker that obeys its leases. Seeded: nothing here fails by chance.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import numpy as np
import pytest

from controller.cascade import LEAST
from controller.cascading import CASCADE_RULE, Cascading, arms_of, strategy_of
from controller.contest import LARGER_SHARE, TRIAL_SHARE
from controller.costs import CostModel
from controller.replay import READ_ONLY, pack, replay, unpack
from controller.steer import ClassSteer, Fence
from storage.records import Decision, Lease, OperatorAction, RequestRecord
from tests.support_storage import a_fork, a_request, a_score
from tests.unit.controller.test_replay import LENIENT
from tests.unit.controller.test_steer import Bed

LISTED = dataclasses.replace(LENIENT, strategies=("speculative", "sequence_cascade"), min_labels=40)
ARM = f"sequence_cascade:{CASCADE_RULE}"
TOKENS, PROMPT_S, TARGET_S = 20, 0.02, 0.25


class Worker(Bed):
    """A worker that serves requests too: by rounds, or by a cascade whose drafts take ``answer_s``.

    Requests by rounds take what the solution says, and a prompt. A draft is sure to a degree uniform on [0, 1].
    ``lost`` is the loss per touch of believed answers; rounds lose nothing.
    """

    answer_s, lost, served = 0.02, 0.0, 0

    def tick(self, requests: int = 20) -> Decision:
        """Serve rounds and requests, and decide."""
        decision = self.run(1, a=0.7)[0]
        lease = decision.lease
        for _ in range(requests):
            tried = lease.trial is not None and self.rng.random() < lease.trial.share
            strategy, rule = (
                (lease.trial.strategy, lease.trial.rule) if tried and lease.trial else (lease.strategy, lease.rule)
            )
            theta = (lease.trial.table if tried and lease.trial else lease.table)[0].theta
            self._serve(lease, strategy, rule, theta)
        return decision

    def _serve(self, lease: Lease, strategy: str, rule: str, theta: float) -> None:
        self.served += 1
        rng, lost = self.rng, 0.0
        held, coin = rng.random() < lease.holdback, rng.random()
        solution, confidence, draft_s = self.steer.solution, None, 0.0
        pace = 0.012 if solution is None else solution.seconds_per_token
        took = (PROMPT_S + TOKENS * pace) * float(rng.normal(1, 0.1))
        touched = strategy == "speculative" and theta > 0 and rng.random() < 0.3
        if strategy == "sequence_cascade" and theta > 0:
            confidence, draft_s = float(rng.random()), self.answer_s
            touched = confidence >= 1 - theta
            took = draft_s + (0.0 if touched and not held else TARGET_S)
            lost = self.lost
        record = dataclasses.replace(
            a_request(request_id=f"q{self.served}", pool="pool"),
            arm="untouched" if not touched else "holdback" if held else "lenient",
            touches=int(touched), fork_drawn=bool(touched and coin < lease.fork), label_drawn=touched,
            fork_prob=lease.fork, holdback_prob=lease.holdback, rule=rule, epoch=lease.epoch, lease_seq=lease.seq,
            first_touch_at=0.5 if touched else None, started=0.0, tokens=TOKENS, total_s=took, strategy=strategy,
            confidence=confidence, draft_s=draft_s, theta=theta,
        )  # fmt: skip
        self.steer.observe_request(record, self.now)
        if record.fork_drawn:
            self._score(record, float(rng.random() < lost))

    def _score(self, record: RequestRecord, loss: float) -> None:
        key = {"request_id": record.request_id, "pool": "pool"}
        self.steer.observe_fork(dataclasses.replace(a_fork(**key), done=True, touches=1), self.now)
        lenient = "served" if record.arm == "lenient" else "fork"
        for branch in ("served", "fork"):
            value = 1.0 - loss if branch == lenient else 1.0
            score = dataclasses.replace(a_score(**key), branch=branch, metric=LISTED.metric, score=value)
            self.steer.observe_score(score, self.now)


def worker(*, answer_s: float, lost: float = 0.0, policy=LISTED, ticks: int = 150) -> Worker:  # type: ignore[no-untyped-def]
    """A worker after so many decisions."""
    made = Worker(policy=policy)
    made.answer_s, made.lost = answer_s, lost
    for _ in range(ticks):
        made.tick()
    return made


@functools.cache
def fast() -> Worker:
    """One whose drafts take a tenth of an answer by rounds."""
    return worker(answer_s=0.02)


def tried(made: Worker) -> list[Decision]:
    """Its decisions with a trial."""
    return [d for d in made.log if d.lease.trial is not None]


def test_a_faster_cascade_is_tried_on_a_share_and_leased() -> None:
    """First only to read how sure its drafts are, then within a share of the budget, then as what requests get."""
    made = fast()
    trials = tried(made)
    assert {d.lease.trial.share for d in trials if d.lease.trial} <= {TRIAL_SHARE, LARGER_SHARE}
    knobs = [d.lease.trial.table[0].theta for d in trials if d.lease.trial]
    assert knobs[0] == READ_ONLY and max(knobs) > 0.05
    told = [d for d in made.log if d.reason in ("rule_trial", "rule_switched")]
    assert [d.reason for d in told[:2]] == ["rule_trial", "rule_switched"]
    switched = told[1]
    assert f"{ARM} takes over from token_v3" in switched.explanation
    numbers = switched.estimates["contest"]
    assert numbers["labels"] >= LISTED.min_labels
    assert numbers["seconds_per_token"] < numbers["incumbent_seconds_per_token"]
    first = switched.estimates["cascade"]["seconds_per_token"]
    assert first < numbers["incumbent_seconds_per_token"], (
        "it starts at the touches it was seen at, faster there already"
    )
    assert all(d.lease.strategy == "sequence_cascade" for d in made.log[made.log.index(switched) :])
    last = made.log[-1].lease
    assert (last.strategy, last.rule) == ("sequence_cascade", CASCADE_RULE) and last.table[0].theta > 0
    assert made.log[-1].estimates["cascade"]["touches_upper"] <= made.steer.governor.track(ARM).tau + 1e-9
    shares = [cap.theta for cap in last.caps]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] <= last.table[0].theta


def test_a_slower_cascade_is_retired_without_costing_touches() -> None:
    """As soon as its answers show that it would be slower if all were believed."""
    made = worker(answer_s=0.5)
    told = [d for d in made.log if d.reason == "rule_trial"]
    assert len(told) == 2 and f"{ARM} is retired after 0 labels" in told[1].explanation
    numbers = told[1].estimates["contest"]
    assert numbers["best_seconds_per_token"] > numbers["incumbent_seconds_per_token"]
    assert all(d.lease.strategy == "speculative" for d in made.log)
    assert made.log[-1].lease.trial is None


def test_a_cascade_that_loses_too_much_is_not_leased() -> None:
    """Each believed answer is wrong: the budget buys too few of them."""
    made = worker(answer_s=0.08, lost=1.0)
    assert tried(made)
    assert all(d.lease.strategy == "speculative" for d in made.log)


def test_a_policy_without_cascades_never_tries_one() -> None:
    """Nor one whose usual strategy is another; nothing is measured for them."""
    made = worker(answer_s=0.02, policy=dataclasses.replace(LISTED, strategies=("speculative",)), ticks=100)
    assert not tried(made)
    assert made.steer.cascading.to_state() == Cascading().to_state()
    assert arms_of(dataclasses.replace(LISTED, strategies=("bild", "sequence_cascade"))) == LISTED.rules
    assert arms_of(LISTED) == (*LISTED.rules, ARM)
    assert (strategy_of(ARM), strategy_of("token_v3")) == ("sequence_cascade", "speculative")


def test_decisions_about_strategies_replay() -> None:
    """Trials without and with a curve, the switch, and the cascade leased: equal as canonical text, and small."""
    made = fast()
    for decision in made.log:
        packed = json.loads(json.dumps(decision.inputs, allow_nan=False))
        assert replay(dataclasses.replace(decision, inputs=packed)).to_json() == decision.lease.to_json()
        assert json.loads(json.dumps(pack(unpack(packed["solve"])))) == packed["solve"]
    assert len(json.dumps(made.log[-1].inputs["solve"])) < 20_000


def test_a_lease_of_a_cascade_goes_over_the_wire() -> None:
    """As workers read it."""
    for decision in (fast().log[-1], tried(fast())[-1]):
        assert Lease.from_json(decision.lease.to_json()) == decision.lease


@pytest.mark.parametrize("leased", [False, True])
def test_a_restart_goes_on_with_the_strategy(leased: bool) -> None:
    """In the middle of a trial, and with the cascade leased."""
    made = fast() if leased else Worker(policy=LISTED)
    while len(tried(made)) < LEAST:
        made.tick()
    state = json.loads(json.dumps(made.steer.to_state()))
    costs = CostModel.from_state(json.loads(json.dumps(made.costs.to_state())))
    again = ClassSteer.from_state(state, LISTED, costs, half_life_rounds=4000.0)
    goes_on = copy.deepcopy(made).steer
    fence = Fence(2, 1, 1, 5.0)
    one, two = (steer.decide(made.now + 1, fence) for steer in (again, goes_on))
    assert one.lease == two.lease
    assert one.lease.strategy == made.log[-1].lease.strategy
    assert (one.lease.trial is None) == (made.log[-1].lease.trial is None)
    assert again.cascading.to_state() == goes_on.cascading.to_state()


def test_a_leased_cascade_that_becomes_slow_is_left_by_its_measured_cost() -> None:
    """Without waiting for labels; lossless rounds need none."""
    made = copy.deepcopy(fast())
    assert made.steer.strategy == "sequence_cascade"
    made.answer_s = 0.5
    for _ in range(40):
        if made.tick().lease.strategy == "speculative":
            break
    decision = made.log[-1]
    assert decision.reason == "rule_switched" and f"token_v3 takes over from {ARM}" in decision.explanation
    assert decision.lease.rule == "token_v3"
    assert replay(decision).to_json() == decision.lease.to_json()
    assert all(made.tick().lease.strategy == "speculative" for _ in range(20)), "it does not come back at once"


def test_a_policy_that_drops_the_cascade_and_an_order_are_obeyed() -> None:
    """Lossless at once by order; back to rounds by policy."""
    made = copy.deepcopy(fast())
    made.steer.act(OperatorAction(1, "pool", "default", "lossless", None, "ann", "a release", 0.0), made.now)
    ordered = made.tick()
    assert ordered.lease.lossless and ordered.lease.strategy == "sequence_cascade"
    assert replay(ordered).to_json() == ordered.lease.to_json()
    made.steer.set_policy(dataclasses.replace(LISTED, strategies=("speculative",)), made.now)
    lease = made.tick().lease
    assert (lease.strategy, lease.rule, lease.lossless) == ("speculative", "token_v3", True)


def test_how_long_requests_take_is_told_from_what_solutions_say() -> None:
    """Ratio of sums with its error; nothing before there are enough requests."""
    known, rng = Cascading(), np.random.default_rng(1)
    record = a_request(request_id="r", pool="pool")
    for i in range(400):
        assert (known.ratio is None) == (i < LEAST)
        seconds = 0.01 * 100 * 1.5 * float(rng.normal(1, 0.2))
        known.observe(dataclasses.replace(record, tokens=100, total_s=seconds), 0.01)
    assert known.ratio is not None
    ratio, error = known.ratio
    assert abs(ratio - 1.5) < 4 * error and error == pytest.approx(1.5 * 0.2 / 20, rel=0.2)
    known.observe(record, None)
    assert known.ratio == (ratio, error)


def test_where_every_answer_was_believed_the_target_takes_what_is_given() -> None:
    """Nothing else tells it; a curve is drawn again with each new answer."""
    known = Cascading()
    record = dataclasses.replace(
        a_request(request_id="r", pool="pool"), strategy="sequence_cascade", rule=CASCADE_RULE, arm="lenient",
        touches=1, confidence=0.5, draft_s=0.1, total_s=0.2, tokens=10,
    )  # fmt: skip
    for _ in range(LEAST):
        assert known.curve("sequence_cascade", 0.05) is None
        known.observe(record, None)
    assert known.curve("sequence_cascade") is None
    curve = known.curve("sequence_cascade", 0.05)
    assert curve is not None
    np.testing.assert_allclose(curve.seconds_per_token, [0.02 + 0.05, 0.02])
    again = Cascading.from_state(json.loads(json.dumps(known.to_state())))
    assert again.to_state() == known.to_state()


def test_rounds_are_tried_beside_a_leased_cascade() -> None:
    """After a change they get another chance, with knobs and evidence of their own; it replays."""
    made = copy.deepcopy(fast())
    made.steer.contest.renew()
    decisions = [made.tick() for _ in range(60)]
    trials = [d.lease.trial for d in decisions if d.lease.trial is not None]
    assert trials and {(t.strategy, t.rule) for t in trials} == {("speculative", "token_v3")}
    assert max(t.table[0].theta for t in trials) > 0
    assert all(d.lease.strategy == "sequence_cascade" for d in decisions), "it is still the faster one"
    for decision in decisions:
        assert replay(decision).to_json() == decision.lease.to_json()
