"""Endless word problems for the bundled pair, steered from outside while they run.

The Redis hash `demo_key` is read between requests: ``domain`` ("easy" or "hard") shifts the traffic,
``scorer`` ("exact" or "strict") changes how answers are judged without saying so in the scores, and ``pause`` ("1", or
"0" to go on) stops the traffic. A value that is missing, unknown or out of reach leaves things as they were.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog
from redis.exceptions import RedisError

from decoder.demo.pair import prompt_ids
from decoder.demo.problems import Domain, make_problem
from decoder.demo.tasks import SCORER_VERSION, SCORERS
from decoder.sampling import SamplingParams
from decoder.worker import Scoring, Task

log = structlog.get_logger(__name__)

DOMAINS: tuple[Domain, ...] = ("easy", "hard")
METRIC, SCORER = "answer_correct", "bundled"
PAUSE_S = 0.05  # how long one wait of a paused source is


class Hash(Protocol):
    """What the source needs of a Redis client."""

    def hgetall(self, name: str, /) -> Any:
        """All fields of a hash, as bytes."""
        ...


def demo_key(pool: str) -> str:
    """The hash that steers the demo traffic of a pool. Whoever writes it gives it a ttl."""
    return f"lenity:{pool}:demo"


class ProblemSource:
    """Problems drawn from ``seed``, as tasks that score themselves.

    Each task samples at ``temperature`` with its own seed from the same stream, at most ``max_tokens`` tokens.
    ``client`` is asked at most every ``refresh_s`` seconds, and after a failure not for ``retry_s``; None never asks.
    """

    def __init__(
        self,
        tokenizer: Any,
        pool: str,
        client: Hash | None = None,
        *,
        seed: int | str = 0,
        domain: Domain = "easy",
        scorer: str = "exact",
        traffic_class: str = "default",
        temperature: float = 1.0,
        max_tokens: int = 200,
        score_always: bool = True,
        refresh_s: float = 0.1,
        retry_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if domain not in DOMAINS or scorer not in SCORERS:
            raise ValueError(f"domain must be one of {DOMAINS} and scorer one of {tuple(SCORERS)}")
        self.domain, self.scorer, self.paused = domain, scorer, False
        self._tokenizer, self._client, self._key = tokenizer, client, demo_key(pool)
        self._rng = random.Random(seed)
        self._traffic_class, self._score_always = traffic_class, score_always
        self._temperature, self._max_tokens = temperature, max_tokens
        self._refresh_s, self._retry_s, self._clock = refresh_s, retry_s, clock
        self._ask_at = float("-inf")
        self._away = False

    def next(self, stop: threading.Event) -> Task | None:
        """The next problem as a task; waits while paused, and gives None once ``stop`` is set."""
        self._refresh()
        while self.paused and not stop.wait(PAUSE_S):
            self._refresh()
        if stop.is_set():
            return None
        problem = make_problem(self._rng, self.domain)
        params = SamplingParams(
            temperature=self._temperature, max_tokens=self._max_tokens, seed=self._rng.getrandbits(62)
        )
        score = SCORERS[self.scorer]

        def judge(token_ids: Sequence[int]) -> float:
            text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
            return score(text, problem.answer)

        scoring = Scoring(METRIC, SCORER, SCORER_VERSION, judge, always=self._score_always)
        return Task(prompt_ids(self._tokenizer, problem.prompt), params, self._traffic_class, scoring)

    def _refresh(self) -> None:
        now = self._clock()
        if self._client is None or now < self._ask_at:
            return
        try:
            fields: Mapping[bytes, bytes] = self._client.hgetall(self._key)
        except (RedisError, OSError) as e:
            self._ask_at = self._clock() + self._retry_s
            if not self._away:
                log.warning("demo traffic: the store is away; going on as before", error=str(e))
            self._away = True
            return
        self._away = False
        self._ask_at = now + self._refresh_s
        domain = fields.get(b"domain", b"").decode("utf-8", "replace")
        scorer = fields.get(b"scorer", b"").decode("utf-8", "replace")
        before = (self.domain, self.scorer, self.paused)
        self.domain = next((d for d in DOMAINS if d == domain), self.domain)
        self.scorer = scorer if scorer in SCORERS else self.scorer
        self.paused = {b"1": True, b"0": False}.get(fields.get(b"pause", b""), self.paused)
        if before != (self.domain, self.scorer, self.paused):
            log.info("demo traffic: changed", domain=self.domain, paused=self.paused)
