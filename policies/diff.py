"""What differs between two policies of a pool, class by class, in the words of the document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.class_policy import ClassPolicy, MetricGoal, PageRule
from policies.model import KEYS, Policy
from policies.scalars import format_duration


@dataclass(frozen=True)
class Difference:
    """One value that differs; ``traffic_class`` is empty where every class that both policies leave alone differs."""

    traffic_class: str
    key: str
    before: str
    after: str


def differences(old: Policy, new: Policy) -> list[Difference]:
    """Every value that differs, those of the policy itself first, then those of the classes that either one names.

    A class shows only what does not follow from the policy itself.
    """
    common = {d.key: d for d in _of_class(old.for_class("default"), new.for_class("default"), "")}
    found = list(common.values())
    for name in sorted(set(old.classes) | set(new.classes)):
        for d in _of_class(old.for_class(name), new.for_class(name), name):
            general = common.get(d.key)
            if general is None or (general.before, general.after) != (d.before, d.after):
                found.append(d)
    return found


def _of_class(old: ClassPolicy, new: ClassPolicy, name: str) -> list[Difference]:
    pairs = [(key, getattr(old, field), getattr(new, field), field) for field, (key, _) in KEYS.items()]
    return [Difference(name, key, _shown(field, a), _shown(field, b)) for key, a, b, field in pairs if a != b]


def _shown(field: str, value: Any) -> str:
    """``value`` as it would be written in the document; ``-`` for none."""
    if value is None or value == ():
        return "-"
    if field.endswith("_s"):
        return format_duration(value)
    if isinstance(value, tuple):
        return ", ".join(_item(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _item(item: Any) -> str:
    if isinstance(item, PageRule):
        return f"{format_duration(item.long_s)}/{format_duration(item.short_s)} {item.share:.4g}"
    if isinstance(item, MetricGoal):
        return f"{item.metric} {item.max_loss:g}"
    return str(item)
