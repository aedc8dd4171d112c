"""The JSON Schema of a policy file, for editors: names, types, limits and a sentence for each key.

It accepts what the loader accepts as far as JSON Schema can say it; what must fit together is the loader's to check.
"""

from __future__ import annotations

from typing import Any

from policies.model import KEYS, Policy
from policies.rules import RULES
from policies.scalars import format_duration

_NUMBER = r"[+-]?(0|[1-9][0-9]*|(?=[.][0-9]))([.][0-9]*)?([eE][+-]?[0-9]{1,4})?"
_UNITS = "".join(rf"([0-9]{{1,9}}([.][0-9]{{1,6}})?{unit})?" for unit in ("w", "d", "h", "m", "s", "ms"))
_LIMITS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
_LENGTHS = {"minLength": "minItems", "maxLength": "maxItems"}
_DURATIONS = {"window", "label_deadline", "cooldown", "long", "short"}
_SECTIONS = {
    "Objective": "objective",
    "Leniency": "leniency",
    "Evidence": "evidence",
    "Block": "block",
    "PullBack": "pull_back",
    "Alerts": "alerts",
    "PageEntry": "alerts.page",
    "MetricEntry": "objective.also",
    "BlockOverride": "block",
    "PullBackOverride": "pull_back",
}
_ABOUT = {
    "Objective": "What quality is, and how much of it may be lost.",
    "Leniency": "Which accept rules may be used, in order of preference, and how far.",
    "Evidence": "How loss is measured on touched requests.",
    "Block": "How many tokens may be drafted per round.",
    "PullBack": "When leniency shrinks, stops, and how it comes back.",
    "Alerts": "When a person is paged.",
    "ClassOverride": "What differs for this traffic class.",
}
# As in the tables of docs/policy.md.
MEANINGS = {
    "version": "Version of this format.",
    "pool": "The (target, drafter) pair that this policy is for. It cannot change while the controller runs.",
    "classes": "What differs for a traffic class, by its name; see below.",
    "extends": "A policy file that this one builds on; see below.",
    "objective.metric": ("The score in [0, 1] that says how good an answer is. Scores of other metrics are ignored."),
    "objective.max_loss": (
        "Mean loss of that score, against lossless decoding of the same traffic, that is tolerated over the "
        "window. 0 allows no leniency at all."
    ),
    "objective.window": (
        "The rolling window over which loss is counted; the error budget is `max_loss` × requests in it."
    ),
    "objective.calendar": (
        "A calendar window in UTC instead of a rolling one: the budget starts anew with each `month`, `week` (on "
        "Monday) or `day`. Where a length is needed (evidence, burn factors) it is that of the longest: 31 days, "
        "7 days, 1 day."
    ),
    "objective.confidence": (
        "Probability that the bounds hold: the budget is kept with this confidence, at all times at once. Closer "
        "to 1 asks for more evidence."
    ),
    "objective.floor": (
        "The least mean score that served answers may have, whatever lossless decoding would score. It can only "
        "tighten: above the floor nothing changes, below it leniency is taken back and LenityFloorBreached pages."
    ),
    "objective.also": (
        "Further metrics that must be kept too. The tightest one decides, and the confidence is shared between them."
    ),
    "objective.also.metric": "The score in [0, 1], another one than `objective.metric`.",
    "objective.also.max_loss": "Mean loss of it that is tolerated over the same window.",
    "leniency.rules": (
        "Accept rules that may be used, in order of preference. Evidence is kept per rule. Rules: `threshold`, "
        "`forgive`, `lenience`, `chow`, `diff`, `opt`, `token_v1`, `token_v2`, `token_v3`, and `lossless` (see "
        "[mathematics](mathematics.md))."
    ),
    "leniency.max_theta": (
        "The most lenient knob that may be used, `theta = 1/mu`: 0 is lossless, 1 as lenient as the rule goes."
    ),
    "leniency.structured": (
        "What holds inside structured spans (JSON, tool-call arguments, fenced code): `lossless`, or `lenient` as "
        "elsewhere."
    ),
    "leniency.strategies": (
        "Decoding strategies that may be used, the usual one first; callers may ask for one of them, or for "
        "`plain`. A cascade is chosen by itself only where it is measured to be faster within the budget."
    ),
    "evidence.holdback": "Share of touched requests that are finished losslessly instead, for comparison.",
    "evidence.fork_cold": (
        "Share of touched requests whose other continuation is generated too and scored, while evidence is "
        "scarce. Costs target passes. 0 gathers no paired evidence; leniency then stays at what is certified "
        "without any."
    ),
    "evidence.fork_warm": (
        "The least of it once there is enough evidence. More are drawn where the bound on what was spent needs them."
    ),
    "evidence.label_deadline": "How long after a touch its score may take. Later it counts as the worst case.",
    "evidence.min_labels": (
        "Labelled requests needed before loss is said to be measured, and before anybody is paged."
    ),
    "evidence.fork_passes_max": (
        "The most that forks may cost: their target passes as a share of the passes that served requests make. "
        "Fewer are drawn where they would cost more."
    ),
    "block.max": "The longest block `g` that may be drafted per round.",
    "block.explore": (
        "Share of rounds that draft one token more than the best block length, so that the next position is seen."
    ),
    "pull_back.start": (
        "Leniency shrinks while less than this share of the budget is left. Lenity plans to spend the rest, so "
        "that it normally sits exactly here."
    ),
    "pull_back.stop": (
        "At this share of the budget leniency has shrunk to nothing; it comes back when the budget has recovered "
        "to halfway between `stop` and `start`."
    ),
    "pull_back.cooldown": "After a fast burn (a paging rule fires) leniency stays off for at least this long.",
    "pull_back.max_step_up": (
        "The share of the budget that one step up may put at risk: it must be affordable even if every extra "
        "touch is harmful until its labels have come. Steps down are not limited."
    ),
    "alerts.page": "Paging rules; `[]` pages nobody.",
    "alerts.page.long": "The window that shows that the burn matters.",
    "alerts.page.short": "The window that shows that it still goes on; the page ends soon after the burn does.",
    "alerts.page.budget": "Share of the whole window's budget that is spent within `long` at the factor.",
}


def policy_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a policy document; a file that extends another may leave out what that one has."""
    schema = Policy.model_json_schema()
    definitions = schema["$defs"]
    for name, definition in definitions.items():
        _tidy(definition)
        definition.pop("required", None)
        for key, value in definition["properties"].items():
            definition["properties"][key] = _value(key, value) | {"description": _meaning(name, key)}
        if name in _ABOUT:
            definition["description"] = _ABOUT[name]
        else:
            definition.pop("description", None)
    for name in ("PageEntry", "MetricEntry"):
        definitions[name]["required"] = list(definitions[name]["properties"])
    _tidy(schema)
    for key in ("version", "pool"):
        schema["properties"][key]["description"] = MEANINGS[key]
    schema["properties"]["classes"] = {
        "type": "object",
        "description": MEANINGS["classes"],
        "propertyNames": {"pattern": _pattern(schema["properties"]["pool"]["pattern"])},
        "additionalProperties": {"$ref": "#/$defs/ClassOverride"},
        "maxProperties": schema["properties"]["classes"]["maxProperties"],
    }
    schema["properties"]["pool"]["pattern"] = _pattern(schema["properties"]["pool"]["pattern"])
    schema["properties"]["extends"] = {
        "description": MEANINGS["extends"],
        "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "maxItems": 0}],
    }
    del schema["required"], schema["description"]
    window = [{"required": ["window"]}, {"required": ["calendar"]}]
    whole = {
        "required": ["version", "pool", "objective"],
        "properties": {"objective": {"required": ["metric", "max_loss"], "oneOf": window}},
    }
    extends = {"required": ["extends"], "properties": {"extends": {"type": "string"}}}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Lenity policy"}
    return head | schema | {"if": extends, "else": whole, "title": "Lenity policy"}


def _tidy(schema: dict[str, Any]) -> None:
    """Leave out titles, and the null that stands for a key that was not written."""
    schema.pop("title", None)
    for value in schema["properties"].values():
        value.pop("title", None)
        options = [option for option in value.get("anyOf", []) if option != {"type": "null"}]
        if len(options) == 1:
            del value["anyOf"]
            value.update(options[0])
        if value.get("default", 0) is None:
            del value["default"]
        items = value.get("type") == "array"
        for python, name in (_LENGTHS if items else _LIMITS).items():
            if python in value:
                value[name] = value.pop(python)


def _value(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """What a key takes: numbers, shares and durations also as the text that people write."""
    default = {"default": schema.pop("default")} if "default" in schema else {}
    if key in _DURATIONS:
        if default:
            default["default"] = format_duration(default["default"])
        return {"type": "string", "pattern": f"^(?=.){_UNITS}$", "examples": ["28d", "15m", "90s"]} | default
    if schema.get("type") in ("number", "integer"):
        percent = "" if schema["type"] == "integer" else "%?"
        return {"anyOf": [schema, {"type": "string", "pattern": f"^{_NUMBER}{percent}$"}]} | default
    if key == "rules":
        return schema | default | {"items": {"enum": list(RULES)}, "uniqueItems": True}
    if "pattern" in schema:
        return schema | {"pattern": _pattern(schema["pattern"])}
    return schema | default


def _pattern(python: str) -> str:
    return python.replace(r"\z", "$")


def _meaning(definition: str, key: str) -> str:
    if definition != "ClassOverride":
        return MEANINGS[f"{_SECTIONS[definition]}.{key}"]
    if key in ("block", "pull_back", "alerts"):
        return next(_ABOUT[name] for name, section in _SECTIONS.items() if section == key)
    return MEANINGS[next(top for top, own in KEYS.values() if own == key)]
