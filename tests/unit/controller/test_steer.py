"""One class steered against a simulated worker: turning off and back on, probing, changes, a cold start.

Seeded: nothing here fails by chance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from controller.costs import CostModel
from controller.steer import LEARNING_ROUNDS, ClassSteer, Fence
from policies.model import ClassPolicy, PageRule
from storage.records import Decision, ForkRecord, QualityScore, RequestRecord
from tests.support_blocks import coin_scalars, make_block
from tests.support_storage import a_fork, a_request, a_score

POLICY = ClassPolicy(
    pool="pool",
    traffic_class="default",
    metric="answer_correct",
    max_loss=0.0,
    window_s=600.0,
    confidence=0.95,
    rules=("token_v3",),
    max_theta=0.9,
    structured="lossless",
    holdback=0.1,
    fork_cold=1.0,
    fork_warm=1.0,
    label_deadline_s=60.0,
    min_labels=80,
    g_max=8,
    explore=0.01,
    start=0.2,
    stop=0.05,
    cooldown_s=10.0,
    max_step_up=0.1,
    page=(PageRule(10.0, 3.0, 0.4),),
)


@dataclass
class Bed:
    """A controller and one simulated worker of ``rounds`` rounds per decision, without leniency.

    Acceptance is a coin per context (A0 is 0 or 1), the hardest case; a pass of width w takes ``pass_s (1 + slope (w -
    1))``, a draft step ``draft_s``. ``seconds`` and ``tokens`` are what the worker really did.
    """

    rounds: int = 40
    pass_s: float = 0.020
    slope: float = 0.02
    draft_s: float = 0.002
    rows: int = 1
    seed: int = 0
    policy: ClassPolicy = POLICY
    now: float = 0.0
    log: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.costs = CostModel(self.policy.g_max)
        self.steer = ClassSteer(self.policy, self.costs, half_life_rounds=4000.0)
        self.g, self.explore, self.seq = 4, 0.0, 0
        self.tokens = self.seconds = 0.0

    def run(self, ticks: int, a: float) -> list[Decision]:
        """Serve and decide this many times at acceptance ``a``."""
        made = []
        for _ in range(ticks):
            width = self.g + (self.rng.random(self.rounds) < self.explore)
            width = np.minimum(width, self.policy.g_max)
            a0 = (self.rng.random(int(width.sum())) < a).astype(float)
            noise = self.rng.normal(1, 0.05, self.rounds)
            verify = self.pass_s * (1 + self.slope * width) * noise
            draft = self.draft_s * width * noise
            block = make_block(
                coin_scalars(a0, np.full(len(a0), 0.05)),
                width,
                rng=self.rng,
                draft_s=draft,
                verify_s=verify,
                rows=self.rows,
                seq=self.seq,
            )
            self.tokens += float(block.round_emitted.sum())
            self.seconds += float((draft + verify + 0.001).sum())
            self.now += 1.0
            self.seq += 1
            self.steer.observe_block(block, self.now)
            decision = self.steer.decide(self.now, Fence(1, self.seq, 1, 5.0))
            row = decision.lease.knobs(self.rows)
            self.g, self.explore = row.g, decision.lease.explore
            made.append(decision)
        self.log += made
        return made


def lengths(decisions: list[Decision]) -> list[int]:
    """Block lengths decided, without the intervals that only measure plain decoding."""
    return [d.lease.table[0].g for d in decisions if d.estimates["probe"] == ""]


def switches(decisions: list[Decision]) -> int:
    """How often drafting was turned on or off."""
    on = [g > 0 for g in lengths(decisions)]
    return sum(a != b for a, b in pairwise(on))


@pytest.mark.parametrize("seed", [0, 1])
def test_drafting_turns_off_probes_and_returns_without_thrashing(seed):
    """Acceptance .1 for ten minutes, then .9: off, on again within a minute of probes, at most 3 switches."""
    bed = Bed(seed=seed, draft_s=0.006)
    off = bed.run(600, a=0.1)
    assert lengths(off)[-300:] == [0] * 300
    on = bed.run(150, a=0.9)
    back = next(i for i, d in enumerate(on) if d.lease.table[0].g > 0)
    assert back < 60
    assert any(alarm["signal"] == "draft" for d in on[: back + 1] for alarm in d.estimates["detected"])
    assert switches(bed.log) <= 3
    assert set(lengths(on)[-30:]) <= {4, 5, 6}  # all the way up: positions never drafted are extrapolated


def test_while_off_it_is_as_fast_as_plain_up_to_the_probes():
    bed = Bed()
    bed.run(60, a=0.1)
    bed.tokens = bed.seconds = 0.0
    bed.run(300, a=0.1)
    plain = 1 / 0.021
    assert bed.tokens / bed.seconds > 0.98 * plain
    probed = 1 - sum(len(b.round_width) for b in bed.steer._recent if b.round_width.max() == 0) / (300 * 40)
    assert probed > 0


def test_without_exploration_nothing_that_is_off_comes_back():
    """The negative control: no probes, no news."""
    bed = Bed(policy=ClassPolicy(**{**vars(POLICY), "explore": 0.0}))
    bed.run(60, a=0.1)
    assert set(lengths(bed.run(120, a=0.9))) == {0}


def test_a_pass_of_width_one_must_be_measured():
    """Width costs .35 of a pass each where the prior says .02, and the best block by that is the one in use: the line,
    extrapolated from one width, stays there, slower than plain. One plain interval shows it."""
    bed = Bed(policy=ClassPolicy(**{**vars(POLICY), "explore": 0.01, "g_max": 4}), slope=0.35, draft_s=0.001)
    made = bed.run(80, a=0.6)
    assert sum(d.estimates["probe"] == "plain" for d in made) == 1
    assert max(lengths(made)[-20:]) <= 2


def test_intervals_of_plain_decoding_stay_within_the_policys_share():
    bed = Bed()
    made = bed.run(320, a=0.8)
    plain = [d for d in made if d.estimates["probe"] == "plain"]
    assert 1 <= len(plain) <= 0.01 * len(made) + 1
    for decision in plain:
        assert all((row.g, row.theta) == (0, 0.0) for row in decision.lease.table)
        assert "plain decoding" in decision.explanation
        assert (decision.lease.holdback, decision.lease.fork) == (0.0, 0.0)
    assert bed.tokens / bed.seconds > 1.5 / 0.021


def test_a_change_of_acceptance_is_recorded_and_estimated_anew():
    bed = Bed()
    bed.run(100, a=0.8)
    before = bed.steer.estimator.rounds_effective
    made = bed.run(15, a=0.5)
    at = next(i for i, d in enumerate(made) if d.estimates["detected"])
    alarm = made[at].estimates["detected"][0]
    assert at <= 3
    assert (alarm["signal"], round(alarm["before"], 1)) == ("draft", 0.8)
    assert f"Acceptance changed from {alarm['before']:.2f}" in made[at].explanation
    assert bed.steer.estimator.rounds_effective < before / 3
    assert bed.steer.estimator.curve().reach[0, 1] == pytest.approx(0.5, abs=0.06)
    assert bed.steer.totals["detected.draft"] == 1


@pytest.mark.parametrize("rounds", [15, 40])
def test_only_rounds_since_the_change_estimate_it(rounds):
    """The change is dated to a round, not to the block that it fell into."""
    bed = Bed(rounds=rounds)
    bed.run(100, a=0.9)
    decision = next(d for d in (bed.run(1, a=0.4)[0] for _ in range(20)) if d.estimates["detected"])
    units = decision.estimates["detected"][0]["units"]
    assert units % rounds  # inside a block
    assert decision.estimates["rounds_effective"] == pytest.approx(units, rel=0.01)


def test_exploration_is_a_share_of_rounds_however_many_rows_toss_for_it():
    """Any row's longer draft makes the round of all rows wider."""
    bed = Bed()
    for rows in (1, 32, 4):
        bed.rows = rows
        assert bed.run(3, a=0.8)[-1].lease.explore == pytest.approx(POLICY.explore / rows)


def test_where_nothing_is_drafted_cheap_drafts_are_tried_more_often():
    """A draft for a tenth of a pass: four times as many rounds, still below a share of explore of the time."""
    bed = Bed()
    bed.run(60, a=0.05)
    assert lengths(bed.log)[-1] == 0
    assert bed.log[-1].lease.explore == pytest.approx(4 * POLICY.explore)
    bed = Bed(draft_s=0.1)
    bed.run(60, a=0.05)
    assert lengths(bed.log)[-1] == 0
    assert bed.log[-1].lease.explore == pytest.approx(POLICY.explore)


def test_with_few_rounds_since_a_change_leniency_waits_and_the_block_length_does_not():
    bed = Bed(rounds=20)
    bed.run(100, a=0.9)
    made = bed.run(20, a=0.5)
    few = [d for d in made if d.reason == "learning"]
    assert few
    assert all(row.theta == 0 for d in few for row in d.lease.table)
    assert bed.steer.estimator.rounds_effective >= LEARNING_ROUNDS
    assert made[-1].reason != "learning"


def test_dearer_rounds_are_detected_and_followed():
    bed = Bed()
    bed.run(60, a=0.8)
    bed.pass_s = 0.050
    made = bed.run(20, a=0.8)
    signals = [alarm["signal"] for d in made for alarm in d.estimates["detected"]]
    assert signals == ["cost"]
    assert bed.costs.verify_s(1)[bed.g] == pytest.approx(0.05 * (1 + 0.02 * bed.g), rel=0.1)


def test_the_knob_alone_is_no_change():
    """The worker moves from 1 to 8 draft tokens and back: acceptance on examined tokens stays, so nothing is found."""
    bed = Bed()
    for g in (1, 8, 3, 8, 1, 5):
        for _ in range(15):
            bed.g = g
            bed.run(1, a=0.8)
    assert [alarm for d in bed.log for alarm in d.estimates["detected"] if alarm["signal"] == "draft"] == []


def request(i: int, tokens: int, arm: str = "untouched") -> RequestRecord:
    touches = 0 if arm == "untouched" else 2
    first = None if arm == "untouched" else 1.0
    changes = {"arm": arm, "tokens": tokens, "touches": touches, "first_touch_at": first, "fork_drawn": touches > 0}
    return a_request("pool", f"r{i}", **changes)


def test_shorter_requests_are_a_change_of_the_mix():
    bed = Bed()
    rng = np.random.default_rng(2)
    bed.run(5, a=0.8)
    for i in range(3000):
        bed.steer.observe_request(request(i, 1 + int(rng.exponential(100))), bed.now)
    assert bed.run(1, a=0.8)[0].estimates["detected"] == []
    for i in range(3000, 3400):
        bed.steer.observe_request(request(i, 1 + int(rng.exponential(50))), bed.now)
    assert [alarm["signal"] for alarm in bed.run(1, a=0.8)[0].estimates["detected"]] == ["mix"]


@pytest.mark.parametrize("lenient_first", [True, False])
def test_pairs_that_lose_more_are_a_change_of_quality(lenient_first):
    bed = Bed()
    rng = np.random.default_rng(4)
    bed.run(5, a=0.8)

    def pair(i: int, loss: float) -> None:
        bed.steer.observe_request(request(i, 50, "lenient"), bed.now)
        fork: ForkRecord = a_fork("pool", f"r{i}")
        bed.steer.observe_fork(fork, bed.now)
        scores: list[QualityScore] = [
            a_score("pool", f"r{i}", "served", score=float(rng.random() > loss)),
            a_score("pool", f"r{i}", "fork", score=1.0),
        ]
        for score in scores if lenient_first else scores[::-1]:
            bed.steer.observe_score(score, bed.now)

    for i in range(600):
        pair(i, 0.05)
    assert bed.run(1, a=0.8)[0].estimates["detected"] == []
    for i in range(600, 700):
        pair(i, 0.5)
    (alarm,) = bed.run(1, a=0.8)[0].estimates["detected"]
    assert (alarm["signal"], alarm["since"] > alarm["before"]) == ("quality", True)


def test_a_restart_goes_on_with_the_same_lease():
    bed = Bed()
    bed.run(50, a=0.8)
    state = json.loads(json.dumps(bed.steer.to_state()))
    costs = CostModel.from_state(json.loads(json.dumps(bed.costs.to_state())))
    again = ClassSteer.from_state(state, POLICY, costs, half_life_rounds=4000.0)
    fence = Fence(2, 1, 1, 5.0)
    one, two = (steer.decide(bed.now + 1, fence) for steer in (bed.steer, again))
    assert one.lease == two.lease


def test_a_cold_start_knows_the_block_length_and_doubts_it_with_age():
    bed = Bed()
    bed.run(200, a=0.9)
    state, costs = bed.steer.to_state(), bed.costs.to_state()
    seen = {}
    for hours in (0, 1, 10):
        steer = ClassSteer.from_state(
            state, POLICY, CostModel.from_state(costs), half_life_rounds=4000.0, age_s=3600.0 * hours
        )
        decision = steer.decide(bed.now + 3600 * hours, Fence(2, 1, 1, 5.0))
        seen[hours] = (decision.lease.table[0].g, decision.reason, steer.estimator.rounds_effective)
    assert seen[0][0] == seen[1][0] == seen[10][0] == lengths(bed.log)[-1]
    assert seen[10][2] < LEARNING_ROUNDS < seen[1][2] <= seen[0][2]
    assert seen[10][1] == "learning"  # lossless until measured again


def test_high_load_turns_drafting_off_and_low_load_back_on():
    """Acceptance .88 throughout; at 32 rows width is no longer free. Both rows of the table are kept."""
    bed = Bed(policy=ClassPolicy(**{**vars(POLICY), "explore": 0.02}))
    bed.run(60, a=0.88)
    assert lengths(bed.log)[-1] >= 5
    bed.rows, bed.pass_s, bed.slope, bed.draft_s = 32, 0.040, 0.9, 0.008
    loaded = [d for d in bed.run(160, a=0.88) if d.estimates["probe"] == ""]
    assert {d.lease.knobs(32).g for d in loaded[-30:]} == {0}
    assert all(d.lease.knobs(1).g >= 5 for d in loaded[-30:])
    bed.rows, bed.pass_s, bed.slope, bed.draft_s = 1, 0.020, 0.02, 0.002
    assert all(d.lease.knobs(1).g >= 5 for d in bed.run(30, a=0.88) if d.estimates["probe"] == "")
