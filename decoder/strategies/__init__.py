"""Decoding strategies behind one interface: a registry, one call to decode and one to generate the other branch."""

from __future__ import annotations

from decoder.request import ForkResult, Observer, Request
from decoder.strategies.base import KnobSource, Models, Strategy, StrategyCompletion
from decoder.strategies.sequence import Plain, SequenceCascade, Speculative, draft_only
from decoder.strategies.token import Bild, TokenCascade

__all__ = [
    "STRATEGIES",
    "Bild",
    "Models",
    "SequenceCascade",
    "Strategy",
    "StrategyCompletion",
    "TokenCascade",
    "decode",
    "fork",
    "get_strategy",
]

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Plain(),
        draft_only(),
        Speculative(),
        TokenCascade(),
        SequenceCascade("sequence_cascade"),
        SequenceCascade("speculative_sequence_cascade", verifies=True),
        Bild(),
    )
}


def get_strategy(name: str) -> Strategy:
    """The strategy of that name; raises ValueError that lists the names there are."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}") from None


def decode(
    models: Models,
    request: Request,
    knobs: KnobSource,
    strategy: str = "speculative",
    observer: Observer | None = None,
) -> StrategyCompletion:
    """Decode one request by the strategy of that name; raises as `Strategy.generate` and `get_strategy` do."""
    return get_strategy(strategy).generate(models, request, knobs, observer)


def fork(models: Models, completion: StrategyCompletion) -> ForkResult:
    """Generate the branch of a request that was not served: a function of prompt, fork point and seed."""
    return get_strategy(completion.strategy).fork(models, completion)
