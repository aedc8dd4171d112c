"""Both branches of touched requests, kept for a judge until their label is worth nothing any more. In memory only."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from decoder.request import Completion, ForkResult

MAX_BRANCHES = 512  # requests; the oldest goes for a newer one


class Branches(NamedTuple):
    """What a judge may see of a request: its prompt and both outputs as (name, token ids, length of the text)."""

    prompt_ids: list[int]
    outputs: tuple[tuple[str, list[int], int | None], ...]
    deadline: float


class BranchStore:
    """Branches by request. Any thread may use it; ``clock`` gives the seconds in which deadlines are counted."""

    def __init__(self, clock: Callable[[], float], most: int = MAX_BRANCHES, rng: random.Random | None = None):
        self._clock, self._most = clock, most
        self._rng = rng or random.SystemRandom()
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Branches] = OrderedDict()

    def put(self, served: Completion, fork: ForkResult, deadline: float) -> None:
        """Keep what was served and its fork, in an order that is drawn now."""
        outputs = [("served", served.token_ids, served.text_length), ("fork", fork.token_ids, fork.text_length)]
        self._rng.shuffle(outputs)
        with self._lock:
            self._kept[served.request.request_id] = Branches(served.request.prompt_ids, tuple(outputs), deadline)
            now = self._clock()
            for name in [name for name, kept in self._kept.items() if kept.deadline <= now]:
                del self._kept[name]
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def get(self, request_id: str) -> Branches | None:
        """The branches of a request; None if there are none, or no more."""
        with self._lock:
            kept = self._kept.get(request_id)
            if kept is not None and kept.deadline <= self._clock():
                del self._kept[request_id]
                return None
            return kept

    @property
    def size(self) -> int:
        """Requests that are kept."""
        with self._lock:
            return len(self._kept)
