"""Decoding strategies behind one interface: a registry, one call to decode and one to generate the other branch."""

from __future__ import annotations

from decoder.request import Completion, ForkResult, Observer, Request
from decoder.steps import Steps
from decoder.strategies.base import KnobSource, Models, Strategy, StrategyCompletion
from decoder.strategies.sequence import Plain, SequenceCascade, Speculative, draft_only
from decoder.strategies.token import Bild, TokenCascade
from policies.errors import ModelError

__all__ = [
    "BATCHED",
    "STRATEGIES",
    "Bild",
    "Models",
    "SequenceCascade",
    "Strategy",
    "StrategyCompletion",
    "TokenCascade",
    "decode",
    "fork",
    "fork_steps",
    "get_strategy",
    "usable",
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


BATCHED = ("plain", "speculative")  # strategies that decode many requests at once; the others take them one by one


def usable(models: Models) -> dict[str, tuple[str, ...]]:
    """The strategies that work with these models, and for each the rules that may make it lenient."""
    found = {}
    for name, strategy in STRATEGIES.items():
        try:
            strategy.check(models)
        except ModelError:
            continue
        found[name] = strategy.rules
    found["speculative"] = tuple(rule for rule in found["speculative"] if models.engine.can_use(rule))
    return found


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


def fork_steps(models: Models, completion: Completion) -> Steps[ForkResult]:
    """As `fork`, in steps; a completion that names no strategy comes from draft-verify rounds."""
    strategy = completion.strategy if isinstance(completion, StrategyCompletion) else "speculative"
    return get_strategy(strategy).fork_steps(models, completion)
