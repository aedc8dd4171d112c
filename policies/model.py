"""The policy document: what operators allow for one pool.

`Policy` is the YAML document of `docs/policy.md`, strict and immutable: durations are seconds, percentages are shares
of one. `Policy.for_class` flattens it, with the overrides of one traffic class applied, into the `ClassPolicy` that
controllers and workers read. Documents are read by `policies.load`; there a fault names file, line and key.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from policies.class_policy import (
    CALENDAR_S,
    Calendar,
    ClassPolicy,
    MetricGoal,
    PageRule,
    Strategy,
    Structured,
    conflicts,
    highest_burn,
)
from policies.rules import RULES
from policies.scalars import Count, Duration, Share, shown

__all__ = ["KEYS", "ClassPolicy", "MetricGoal", "PageRule", "Policy", "Strategy", "Structured"]

MIN_WINDOW_S = 10.0
MAX_WINDOW_S = 366 * 86_400.0
MAX_BLOCK = 64
MAX_CLASSES = 64
# The SRE Workbook's paging rows for 30 days, as shares of the window: long and short window, share of the budget.
PAGE_ROWS = ((1 / 720, 1 / 8640, 0.02), (1 / 120, 1 / 1440, 0.05), (1 / 30, 1 / 360, 0.10), (1 / 10, 1 / 120, 0.10))


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    raise PydanticCustomError("list", "must be a list, such as [a, b], not {shown}", {"shown": shown(value)})


def _given(value: Any) -> Any:
    if value is None:
        raise PydanticCustomError("empty", "has no value; leave the key out to inherit the policy's")
    return value


def _rule(value: Any) -> Any:
    if isinstance(value, str) and value not in RULES:
        raise PydanticCustomError(
            "rule", "unknown accept rule {shown}; known: {known}", {"shown": shown(value), "known": ", ".join(RULES)}
        )
    return value


def _rules(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise PydanticCustomError("rules", "names a rule twice")
    return value


def _strategies(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise PydanticCustomError("strategies", "names a strategy twice")
    return value


Path = tuple[str, ...]  # the keys that lead to a value
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\z")]
Rules = Annotated[
    tuple[Annotated[str, BeforeValidator(_rule)], ...], BeforeValidator(_as_tuple), Field(min_length=1, max_length=16)
]
Unit = Annotated[Share, Field(ge=0, le=1)]
Loss = Annotated[Share, Field(ge=0, lt=1)]
Confidence = Annotated[Share, Field(gt=0.5, lt=1)]
Holdback = Annotated[Share, Field(ge=0, lt=1)]
Window = Annotated[Duration, Field(ge=MIN_WINDOW_S, le=MAX_WINDOW_S)]
Positive = Annotated[Duration, Field(gt=0, le=MAX_WINDOW_S)]
Labels = Annotated[Count, Field(ge=1, le=10_000_000)]
BlockLength = Annotated[Count, Field(ge=1, le=MAX_BLOCK)]
Explore = Annotated[Share, Field(ge=0, le=0.5)]
Step = Annotated[Share, Field(gt=0, le=1)]
Floor = Annotated[Share, Field(gt=0, lt=1)]
Passes = Annotated[Share, Field(ge=0, le=10)]
Strategies = Annotated[
    tuple[Strategy, ...], BeforeValidator(_as_tuple), AfterValidator(_strategies), Field(min_length=1, max_length=8)
]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class MetricEntry(_Section):
    """A further metric, and how much of it may be lost."""

    metric: Name
    max_loss: Annotated[Loss, Field(gt=0)]


Also = Annotated[tuple[MetricEntry, ...], BeforeValidator(_as_tuple), Field(max_length=7)]


def _window_of(data: dict[str, Any]) -> float:
    return CALENDAR_S.get(data.get("calendar") or "", 0.0)


class Objective(_Section):
    """What quality is, and how much of it may be lost, over a rolling window or a calendar's."""

    metric: Name
    max_loss: Loss
    calendar: Annotated[Calendar | None, BeforeValidator(_given)] = None
    window: Window = Field(default_factory=_window_of)
    confidence: Confidence = 0.95
    floor: Annotated[Floor | None, BeforeValidator(_given)] = None
    also: Also = ()

    @model_validator(mode="after")
    def _one_window(self) -> Self:
        if self.calendar is None and not self.window:
            raise PydanticCustomError("no_window", "needs a window, such as 28d, or a calendar: month, week or day")
        if self.calendar is not None and "window" in self.model_fields_set:
            raise PydanticCustomError("two_windows", "has a window and a calendar; write one of them")
        return self


class Leniency(_Section):
    """Which accept rules may be used, in order of preference, and how far."""

    rules: Rules = ("threshold", "token_v3")
    max_theta: Unit = 0.9
    structured: Structured = "lossless"
    strategies: Strategies = ("speculative",)


class Evidence(_Section):
    """How loss is measured on touched requests."""

    holdback: Holdback = 0.1
    fork_cold: Unit = 1.0
    fork_warm: Unit = 0.05
    label_deadline: Positive = 900.0
    min_labels: Labels = 200
    fork_passes_max: Passes = 0.5


class Block(_Section):
    """How many tokens may be drafted per round."""

    max: BlockLength = 16
    explore: Explore = 0.01


class PullBack(_Section):
    """When leniency shrinks, stops, and how it comes back."""

    start: Unit = 0.2
    stop: Unit = 0.05
    cooldown: Positive = 1800.0
    max_step_up: Step = 0.1


class PageEntry(_Section):
    """One paging rule: the share ``budget`` of the window's budget, spent at a steady rate within ``long``."""

    long: Positive
    short: Positive
    budget: Annotated[Share, Field(gt=0, le=1)]


Page = Annotated[tuple[PageEntry, ...], BeforeValidator(_as_tuple), Field(max_length=16)]


class Alerts(_Section):
    """When a person is paged; an empty list pages nobody."""

    page: Page


class BlockOverride(_Section):
    """`Block` of one class, in part."""

    max: Annotated[BlockLength | None, BeforeValidator(_given)] = None
    explore: Annotated[Explore | None, BeforeValidator(_given)] = None


class PullBackOverride(_Section):
    """`PullBack` of one class, in part."""

    start: Annotated[Unit | None, BeforeValidator(_given)] = None
    stop: Annotated[Unit | None, BeforeValidator(_given)] = None
    cooldown: Annotated[Positive | None, BeforeValidator(_given)] = None
    max_step_up: Annotated[Step | None, BeforeValidator(_given)] = None


class ClassOverride(_Section):
    """What differs for one traffic class: keys of objective, leniency and evidence directly, other sections in part."""

    metric: Annotated[Name | None, BeforeValidator(_given)] = None
    max_loss: Annotated[Loss | None, BeforeValidator(_given)] = None
    window: Annotated[Window | None, BeforeValidator(_given)] = None
    calendar: Annotated[Calendar | None, BeforeValidator(_given)] = None
    confidence: Annotated[Confidence | None, BeforeValidator(_given)] = None
    floor: Annotated[Floor | None, BeforeValidator(_given)] = None
    also: Annotated[Also | None, BeforeValidator(_given)] = None
    rules: Annotated[Rules | None, BeforeValidator(_given)] = None
    max_theta: Annotated[Unit | None, BeforeValidator(_given)] = None
    structured: Annotated[Structured | None, BeforeValidator(_given)] = None
    strategies: Annotated[Strategies | None, BeforeValidator(_given)] = None
    holdback: Annotated[Holdback | None, BeforeValidator(_given)] = None
    fork_cold: Annotated[Unit | None, BeforeValidator(_given)] = None
    fork_warm: Annotated[Unit | None, BeforeValidator(_given)] = None
    label_deadline: Annotated[Positive | None, BeforeValidator(_given)] = None
    min_labels: Annotated[Labels | None, BeforeValidator(_given)] = None
    fork_passes_max: Annotated[Passes | None, BeforeValidator(_given)] = None
    block: BlockOverride = BlockOverride()
    pull_back: PullBackOverride = PullBackOverride()
    alerts: Annotated[Alerts | None, BeforeValidator(_given)] = None

    @model_validator(mode="after")
    def _one_window(self) -> Self:
        if self.window is not None and self.calendar is not None:
            raise PydanticCustomError("two_windows", "has a window and a calendar; write one of them")
        return self


# Field of ClassPolicy -> its key in the document -> its key under classes.NAME.
KEYS: dict[str, tuple[str, str]] = {
    "metric": ("objective.metric", "metric"),
    "max_loss": ("objective.max_loss", "max_loss"),
    "window_s": ("objective.window", "window"),
    "calendar": ("objective.calendar", "calendar"),
    "confidence": ("objective.confidence", "confidence"),
    "floor": ("objective.floor", "floor"),
    "also": ("objective.also", "also"),
    "rules": ("leniency.rules", "rules"),
    "max_theta": ("leniency.max_theta", "max_theta"),
    "structured": ("leniency.structured", "structured"),
    "strategies": ("leniency.strategies", "strategies"),
    "holdback": ("evidence.holdback", "holdback"),
    "fork_cold": ("evidence.fork_cold", "fork_cold"),
    "fork_warm": ("evidence.fork_warm", "fork_warm"),
    "label_deadline_s": ("evidence.label_deadline", "label_deadline"),
    "min_labels": ("evidence.min_labels", "min_labels"),
    "fork_passes_max": ("evidence.fork_passes_max", "fork_passes_max"),
    "g_max": ("block.max", "block.max"),
    "explore": ("block.explore", "block.explore"),
    "start": ("pull_back.start", "pull_back.start"),
    "stop": ("pull_back.stop", "pull_back.stop"),
    "cooldown_s": ("pull_back.cooldown", "pull_back.cooldown"),
    "max_step_up": ("pull_back.max_step_up", "pull_back.max_step_up"),
    "page": ("alerts.page", "alerts.page"),
}


def default_page(
    window_s: float, highest_burn: float = float("inf"), calendar: str | None = None
) -> tuple[PageEntry, ...]:
    """The four rows of the SRE Workbook scaled to ``window_s``, in whole seconds (a short window may come out as 0).

    For 30 days they are 1h/5m, 6h/30m, 1d/2h and 3d/6h; the burn factors 14.4, 6, 3 and 1 hold for every window. A row
    that could never fire, since nothing can burn as fast as ``highest_burn``, is left out. A month has the rows of 30
    days.
    """
    if calendar == "month":
        window_s = 30 * 86_400.0
    return tuple(
        PageEntry.model_construct(long=float(window_s * long // 1), short=float(window_s * short // 1), budget=budget)
        for long, short, budget in PAGE_ROWS
        if budget / long < highest_burn
    )


def _default_alerts(data: dict[str, Any]) -> Alerts:
    objective, pull_back = data.get("objective"), data.get("pull_back")
    if objective is None or pull_back is None:
        return Alerts(page=())
    burn = highest_burn(objective.max_loss, pull_back.start)
    return Alerts.model_construct(page=default_page(objective.window, burn, objective.calendar))


class Policy(_Section):
    """The policy of one pool."""

    version: Literal["lenity/v1"]
    pool: Name
    objective: Objective
    leniency: Leniency = Leniency()
    evidence: Evidence = Evidence()
    block: Block = Block()
    pull_back: PullBack = PullBack()
    alerts: Alerts = Field(default_factory=_default_alerts)
    classes: Annotated[dict[Name, ClassOverride], Field(max_length=MAX_CLASSES)] = {}

    def for_class(self, name: str) -> ClassPolicy:
        """What holds for one traffic class; a class that the document does not name gets the policy's values."""
        override = self.classes.get(name)
        values = {field: self._value(field, override) for field in KEYS}
        if override is not None and override.window is not None:
            values["calendar"] = None
        elif values["calendar"] is not None:
            values["window_s"] = CALENDAR_S[values["calendar"]]
        if "alerts" not in self.model_fields_set and (override is None or override.alerts is None):
            burn = highest_burn(values["max_loss"], values["start"])
            values["page"] = default_page(values["window_s"], burn, values["calendar"])
        values["page"] = tuple(PageRule(e.long, e.short, e.budget) for e in values["page"])
        values["also"] = tuple(MetricGoal(e.metric, e.max_loss) for e in values["also"])
        return ClassPolicy(pool=self.pool, traffic_class=name, **values)

    def document(self) -> dict[str, Any]:
        """The canonical document: every default written out, durations with units; parses back to an equal policy.

        Alerts that were generated from the window are left out, so that they stay tied to it.
        """
        data = self.model_dump(mode="json", exclude_none=True)
        if "alerts" not in self.model_fields_set:
            del data["alerts"]
        if self.objective.calendar is not None:
            del data["objective"]["window"]
        for override in data["classes"].values():
            for section in ("block", "pull_back"):
                if not override[section]:
                    del override[section]
        return data

    def _value(self, field: str, override: ClassOverride | None) -> Any:
        top, own = KEYS[field]
        if override is not None:
            value = _dig(override, own)
            if value is not None:
                return value
        return _dig(self, top)

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults: list[tuple[tuple[Path, ...], str]] = []
        if "default" in self.classes:
            faults.append(((("classes", "default"),), "the default class is the policy itself; write its values above"))
        common = list(conflicts(self.for_class("default")))
        faults += [(tuple(tuple(KEYS[f][0].split(".")) for f in about), message) for about, message in common]
        for name, override in self.classes.items():
            for about, message in conflicts(self.for_class(name)):
                if (about, message) not in common:
                    own = [KEYS[f][1] for f in about if _dig(override, KEYS[f][1]) is not None]
                    paths = [("classes", name, *key.split(".")) for key in own]
                    faults.append(((*paths, ("classes", name)), message))
        if faults:
            raise PydanticCustomError("conflict", "{first}", {"first": faults[0][1], "faults": tuple(faults)})
        return self


def _dig(section: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        section = None if section is None else getattr(section, part)
    return section


assert set(KEYS) == {f.name for f in fields(ClassPolicy)} - {"pool", "traffic_class"}
