"""The demo's traffic: seeded problems, steered from outside between requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from decoder.demo.pair import load_tokenizer
from decoder.demo.problems import make_problem
from decoder.demo.tasks import demo_models_dir
from decoder.demo.traffic import ProblemSource, demo_key
from decoder.worker import Task
from tests.support import wait_until


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_models_dir() / "target")


class Hash:
    """A Redis client with one hash, which can be away."""

    def __init__(self, **fields: str):
        self.fields, self.away, self.asked = fields, False, 0

    def hgetall(self, name: str) -> Mapping[bytes, bytes]:
        assert name == demo_key("p")
        self.asked += 1
        if self.away:
            raise RedisConnectionError("away")
        return {k.encode(): v.encode() for k, v in self.fields.items()}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


RUN = threading.Event()


def take(source: ProblemSource) -> Task:
    task = source.next(RUN)
    assert task is not None and task.scoring is not None
    return task


def test_one_seed_gives_the_same_tasks_and_another_gives_others(tokenizer):
    first, again, other = (ProblemSource(tokenizer, "p", seed=s) for s in (1, 1, 2))
    tasks = [[take(s) for _ in range(20)] for s in (first, again, other)]
    seen = [[(t.prompt_ids, t.params.seed) for t in group] for group in tasks]
    assert seen[0] == seen[1] and seen[0] != seen[2]
    assert len({seed for _, seed in seen[0]}) == 20
    assert tasks[0][0].params.temperature == 1.0


def test_the_traffic_shifts_between_requests_when_the_hash_says_so(tokenizer):
    control = Hash(domain="easy")
    source = ProblemSource(tokenizer, "p", control, clock=Clock())
    easy = [take(source) for _ in range(10)]
    control.fields["domain"] = "hard"
    hard = [take(source) for _ in range(10)]
    assert max(len(t.prompt_ids) for t in easy) < max(len(t.prompt_ids) for t in hard)
    assert source.domain == "hard"


def test_the_strict_scorer_is_hidden_behind_the_same_name(tokenizer):
    control = Hash(scorer="exact")
    source = ProblemSource(tokenizer, "p", control, clock=Clock(), seed=3)
    twin = ProblemSource(tokenizer, "p", Hash(scorer="strict"), clock=Clock(), seed=3)
    exact, strict = take(source).scoring, take(twin).scoring
    assert (exact.metric, exact.scorer, exact.version) == (strict.metric, strict.scorer, strict.version)
    assert (exact.metric, exact.scorer, exact.version) == ("answer_correct", "bundled", "1")
    answer = solution_in_the_drafts_style(seed=3)
    ids = tokenizer(answer).input_ids
    assert exact.score(ids) == 1.0 and strict.score(ids) == 0.0
    assert exact.score(tokenizer(" The answer is #### 1234567").input_ids) == 0.0


def solution_in_the_drafts_style(seed: int) -> str:
    """Only rare wordings, then the right number."""
    answer = make_problem(random.Random(seed), "easy").answer
    return (
        f" Here Mia obtains 2 further pens, therefore the pile reaches 2 + 2 = 4. The complete figure is #### {answer}"
    )


@pytest.mark.parametrize("fields", [{}, {"domain": "moon", "scorer": "kind", "pause": "maybe"}])
def test_missing_and_unknown_values_leave_things_as_they_were(tokenizer, fields):
    control = Hash(domain="hard", scorer="strict", pause="0")
    source = ProblemSource(tokenizer, "p", control, clock=Clock())
    take(source)
    control.fields = fields
    take(source)
    assert (source.domain, source.scorer, source.paused) == ("hard", "strict", False)


def test_a_store_that_is_away_is_left_alone_for_a_while_and_nothing_changes(tokenizer):
    control, clock = Hash(domain="hard"), Clock()
    source = ProblemSource(tokenizer, "p", control, clock=clock, retry_s=100.0)
    take(source)
    control.away = True
    for _ in range(20):
        take(source)
    assert source.domain == "hard" and control.asked == 2
    control.away, control.fields = False, {"domain": "easy"}
    clock.now += 100
    take(source)
    assert source.domain == "easy" and control.asked == 3


def test_a_paused_source_waits_until_it_is_told_to_go_on(tokenizer):
    control = Hash(pause="1")
    source = ProblemSource(tokenizer, "p", control, clock=Clock())
    got: list[Task | None] = []
    thread = threading.Thread(target=lambda: got.append(source.next(RUN)))
    thread.start()
    wait_until(lambda: control.asked > 1)
    assert not got
    control.fields["pause"] = "0"
    thread.join(5)
    assert got and got[0] is not None


def test_a_stopped_source_gives_nothing_even_while_paused(tokenizer):
    stop = threading.Event()
    source = ProblemSource(tokenizer, "p", Hash(pause="1"), clock=Clock())
    got: list[Task | None] = [take(ProblemSource(tokenizer, "p"))]
    thread = threading.Thread(target=lambda: got.append(source.next(stop)))
    thread.start()
    stop.set()
    thread.join(5)
    assert got[1:] == [None]


def test_an_unknown_domain_or_scorer_is_refused(tokenizer):
    with pytest.raises(ValueError, match="domain must be one of"):
        ProblemSource(tokenizer, "p", scorer="kind")
