"""The policy of one traffic class, flat, as controllers and workers read it, and which values do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from policies.scalars import format_duration

Structured = Literal["lossless", "lenient"]
Calendar = Literal["month", "week", "day"]
Strategy = Literal[
    "speculative",
    "plain",
    "draft_only",
    "token_cascade",
    "sequence_cascade",
    "speculative_sequence_cascade",
    "bild",
]
# The longest that a calendar window can be, in seconds (UTC has no hours that come twice).
CALENDAR_S: dict[str, float] = {"month": 31 * 86_400.0, "week": 7 * 86_400.0, "day": 86_400.0}


@dataclass(frozen=True)
class PageRule:
    """Page when the budget burns faster than `factor` over both windows (seconds); ``share`` of it in (0, 1]."""

    long_s: float
    short_s: float
    share: float

    def factor(self, window_s: float) -> float:
        """The burn rate that spends ``share`` of a ``window_s`` budget within the long window; 1 is on plan."""
        return self.share * window_s / self.long_s


@dataclass(frozen=True)
class MetricGoal:
    """A further metric in [0, 1] and the mean loss on it, against lossless, that is tolerated; in (0, 1)."""

    metric: str
    max_loss: float


@dataclass(frozen=True)
class ClassPolicy:
    """The policy of one traffic class, flat: seconds, and shares of one. `docs/policy.md` says what each means."""

    pool: str
    traffic_class: str
    metric: str
    max_loss: float
    window_s: float
    confidence: float
    rules: tuple[str, ...]
    max_theta: float
    structured: Structured
    holdback: float
    fork_cold: float
    fork_warm: float
    label_deadline_s: float
    min_labels: int
    g_max: int
    explore: float
    start: float
    stop: float
    cooldown_s: float
    max_step_up: float
    page: tuple[PageRule, ...]
    strategies: tuple[Strategy, ...] = ("speculative",)
    calendar: Calendar | None = None
    floor: float | None = None
    also: tuple[MetricGoal, ...] = ()
    fork_passes_max: float = 0.5

    @property
    def planned_loss(self) -> float:
        """Mean loss that the governor plans for: ``max_loss (1 - start)``, so that steady state sits at the knee."""
        return self.max_loss * (1 - self.start)

    @property
    def highest_burn(self) -> float:
        """Burn against plan if every request lost everything; infinite where no loss is allowed."""
        return highest_burn(self.max_loss, self.start)


def highest_burn(max_loss: float, start: float) -> float:
    """Burn against the plan ``max_loss (1 - start)`` if every request lost everything; infinite where the plan is 0."""
    planned = max_loss * (1 - start)
    return 1 / planned if planned > 0 else float("inf")


def conflicts(c: ClassPolicy) -> Iterator[tuple[tuple[str, ...], str]]:
    """What does not fit together in ``c``: the fields concerned, the one to change first, and what is wrong."""
    say = format_duration
    if c.stop >= c.start:
        yield ("stop", "start"), f"must be below pull_back.start ({c.stop:g} is not below {c.start:g})"
    if c.fork_warm > c.fork_cold:
        yield ("fork_warm", "fork_cold"), f"must not exceed fork_cold ({c.fork_warm:g} > {c.fork_cold:g})"
    if c.label_deadline_s >= c.window_s:
        yield (
            ("label_deadline_s", "window_s"),
            f"must be shorter than the window ({say(c.label_deadline_s)} is not below {say(c.window_s)})",
        )
    if c.cooldown_s > c.window_s:
        yield (
            ("cooldown_s", "window_s"),
            f"must not be longer than the window ({say(c.cooldown_s)} > {say(c.window_s)})",
        )
    if len(set(c.rules)) < len(c.rules):
        yield ("rules",), "names a rule twice"
    names = [c.metric, *(goal.metric for goal in c.also)]
    if len(set(names)) < len(names):
        yield ("also", "metric"), "names a metric twice; objective.metric has its goal already"
    if any(rule.long_s < 1 or rule.short_s < 1 for rule in c.page):
        yield (
            ("page", "window_s"),
            f"a page window of less than 1s comes out for a window of {say(c.window_s)}: "
            "write alerts.page with windows that fit (or page: [] for none)",
        )
        return
    for rule in c.page:
        yield from ((("page", "max_loss", "window_s"), message) for message in _page_conflicts(c, rule))


def _page_conflicts(c: ClassPolicy, rule: PageRule) -> Iterator[str]:
    say, factor = format_duration, rule.factor(c.window_s)
    if rule.short_s >= rule.long_s:
        yield f"short ({say(rule.short_s)}) must be shorter than long ({say(rule.long_s)})"
    elif rule.long_s > c.window_s:
        yield f"long ({say(rule.long_s)}) must not be longer than the window ({say(c.window_s)})"
    elif factor < 1:
        yield (
            f"budget {rule.share:.4g} over {say(rule.long_s)} is a burn rate of {factor:.3g}: below 1 it pages while "
            "spending on plan; raise budget or shorten long"
        )
    elif c.max_loss > 0 and factor >= c.highest_burn:
        yield (
            f"budget {rule.share:.4g} over {say(rule.long_s)} is a burn rate of {factor:.3g}, but with max_loss "
            f"{c.max_loss:g} no traffic can burn faster than {c.highest_burn:.3g}: it would never page; lower budget"
        )
