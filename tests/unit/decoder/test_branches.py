"""Branches for a judge: bounded, gone at their deadline, in an order that says nothing."""

from __future__ import annotations

import random

from decoder.branches import BranchStore
from decoder.request import ForkResult, Request
from decoder.sampling import SamplingParams
from tests.support_serving import completion

FORK = ForkResult([1, 2], 1, 1, 0.1, "stop", text_length=1)


def put(store: BranchStore, name: str, deadline: float) -> None:
    store.put(completion(Request(name, [5], SamplingParams(max_tokens=1))), FORK, deadline)


def test_the_store_is_bounded_and_forgets_what_is_too_old_first():
    now = [0.0]
    store = BranchStore(lambda: now[0], most=2)
    for name, deadline in (("old", 1.0), ("a", 9.0)):
        put(store, name, deadline)
    now[0] = 1.0
    put(store, "b", 9.0)
    assert store.get("old") is None and store.get("a") is not None and store.size == 2
    put(store, "c", 9.0)
    assert store.get("a") is None and store.size == 2


def test_the_order_is_a_fair_coin():
    """200 coins: outside 70..130 with a chance of 2e-5."""
    store = BranchStore(lambda: 0.0, most=200, rng=random.Random(1))
    for i in range(200):
        put(store, f"r{i}", 1.0)
    kept = [store.get(f"r{i}") for i in range(200)]
    first = [k.outputs[0][0] for k in kept if k is not None]
    assert 70 <= first.count("served") <= 130 and first.count("fork") == 200 - first.count("served")
    assert all({n: (ids, at) for n, ids, at in k.outputs}["fork"] == ([1, 2], 1) for k in kept if k)
