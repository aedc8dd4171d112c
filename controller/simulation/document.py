"""The scenario document: plant, events, policy and the allowed ranges of what the controller did.

`docs/simulate.md` says what each key means. Documents are strict: an unknown key, a key given twice, a wrong type or an
impossible value is a `ScenarioError` that names file, line and key; a bad policy inside is a `PolicyError` at its line.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from yaml.nodes import MappingNode, Node, ScalarNode

from controller.simulation.signals import (
    DurationSignal,
    Interval,
    Intervals,
    NumberSignal,
    ShareSignal,
    Signal,
    constant,
)
from policies.errors import LenityError
from policies.load import parse_policy
from policies.model import Policy
from policies.scalars import Count, Duration, Number, Share, looks_numeric, parse_number

HOW = ("every", "some", "mean", "max", "min", "last", "total", "switches")


class ScenarioError(LenityError):
    """A scenario that cannot be played: says which file, line and key, and what is wrong."""

    def __init__(self, message: str, *, path: str, line: int | None = None, key: str | None = None):
        self.message, self.path, self.line, self.key = message, path, line, key
        where = path if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {key}: {message}" if key else f"{where}: {message}")


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
    )


class Hidden(_Section):
    """Easy and hard stretches of text: a hidden state that stays for a geometric number of tokens."""

    easy: ShareSignal
    hard: ShareSignal
    easy_tokens: Annotated[Number, Field(ge=1)]
    hard_tokens: Annotated[Number, Field(ge=1)]


class Recorded(_Section):
    """Scalars of drafted positions from a file (`controller.simulation.source.save_recording`)."""

    recorded: str


def _acceptance(value: Any) -> Any:
    if isinstance(value, dict) and ({"easy", "hard"} & set(value)):
        return Hidden.model_validate(value)
    if isinstance(value, dict) and "recorded" in value:
        return Recorded.model_validate(value)
    return value if isinstance(value, Hidden | Recorded) else _ShareSignal.model_validate({"value": value}).value


class _ShareSignal(_Section):
    value: ShareSignal


Acceptance = Annotated[Signal | Hidden | Recorded, BeforeValidator(_acceptance)]


class Kind(_Section):
    """One kind of request: how common, how long, and how well its drafts are accepted losslessly."""

    share: NumberSignal = constant(1.0)
    tokens: NumberSignal = constant(100.0)
    spread: Annotated[Number, Field(ge=0, le=3)] = 0.5
    acceptance: Acceptance
    plausible: Annotated[Share, Field(ge=0, le=1)] = 0.5


class Costs(_Section):
    """Seconds of a worker's round, by width and rows."""

    target: DurationSignal = constant(0.020)
    draft: DurationSignal = constant(0.001)
    overhead: DurationSignal = constant(0.001)
    saturates: NumberSignal = constant(256.0)
    draft_saturates: NumberSignal = constant(1024.0)
    noise: Annotated[Share, Field(ge=0, le=1)] = 0.05
    pause: Duration = 2.0
    pause_every: Duration | None = None


class Quality(_Section):
    """What touches do to answers."""

    right: ShareSignal = constant(0.9)
    loss_per_touch: ShareSignal = constant(0.01)
    loss_per_slip: ShareSignal | None = None
    luck: Annotated[Share, Field(ge=0, le=1)] = 0.02


class Labels(_Section):
    """When scores come."""

    delay: DurationSignal = constant(20.0)
    spread: Annotated[Number, Field(ge=0, le=3)] = 0.5
    missing: ShareSignal = constant(0.0)
    missing_when_bad: ShareSignal = constant(0.0)
    fork_fails: ShareSignal = constant(0.0)
    outages: Intervals = ()
    version: NumberSignal = constant(1.0)


class WorkerSpec(_Section):
    """One worker of the pool."""

    share: NumberSignal = constant(1.0)
    slowness: NumberSignal = constant(1.0)
    clock: DurationSignal = constant(0.0)
    down: Intervals = ()


class Links(_Section):
    """What breaks between worker, stream and controller."""

    telemetry_cut: Intervals = ()
    leases_cut: Intervals = ()
    controller_down: Intervals = ()
    duplicates: Annotated[Share, Field(ge=0, le=1)] = 0.0
    buffer: Annotated[Count, Field(ge=1)] = 2000


class PlantSpec(_Section):
    """Traffic, models, machines, scorer and network."""

    rate: NumberSignal = constant(1.0)
    max_rows: Annotated[Count, Field(ge=1, le=1024)] = 32
    prompt_tokens: Annotated[Count, Field(ge=1)] = 200
    report_positions: Annotated[Count, Field(ge=1)] = 150
    kinds: Annotated[dict[str, Kind], Field(min_length=1, max_length=16)]
    costs: Costs = Costs()
    quality: Quality = Quality()
    labels: Labels = Labels()
    workers: Annotated[dict[str, WorkerSpec], Field(min_length=1, max_length=16)] = {"w0": WorkerSpec()}
    links: Links = Links()


class Event(_Section):
    """Something that happens at one time: a worker restarts, or the policy file is edited."""

    at: Duration
    restart: str | None = None
    policy: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.restart is None) == (self.policy is None):
            raise PydanticCustomError("event", "must name exactly one of restart and policy")
        return self


def _bounds(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("range", "must be [low, high] with null for no limit, or a list of words")
    if all(isinstance(v, str) and not looks_numeric(v) for v in value):
        return tuple(value)
    if len(value) != 2:
        raise PydanticCustomError("range", "must be [low, high] with null for no limit")
    low, high = (None if v is None else parse_number(v) for v in value)
    if low is not None and high is not None and low > high:
        raise PydanticCustomError("range", "must not have its low end above its high end")
    return (low, high)


Range = Annotated[tuple[Any, ...], BeforeValidator(_bounds)]


class Check(_Section):
    """An allowed range of one quantity over a time, and why it is the right one."""

    quantity: str
    why: Annotated[str, Field(min_length=10)]
    during: Interval | None = None
    every: Range | None = None
    some: Range | None = None
    mean: Range | None = None
    max: Range | None = None
    min: Range | None = None
    last: Range | None = None
    total: Range | None = None
    switches: Range | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [how for how in HOW if getattr(self, how) is not None]
        if len(given) != 1:
            raise PydanticCustomError("check", "must have exactly one of {how}", {"how": ", ".join(HOW)})
        return self

    @property
    def how(self) -> str:
        """Which of `HOW` this check reads."""
        return next(how for how in HOW if getattr(self, how) is not None)

    @property
    def allowed(self) -> tuple[Any, ...]:
        """The range, (low, high) with None for no limit, or the allowed words."""
        allowed: tuple[Any, ...] = getattr(self, self.how)
        return allowed


class Scenario(_Section):
    """A whole scenario, ready to be played."""

    about: Annotated[str, Field(min_length=10)]
    duration: Annotated[Duration, Field(gt=0, le=366 * 86_400.0)]
    seed: Annotated[Count, Field(ge=0)] = 1
    tick: Annotated[Duration, Field(gt=0)] = 10.0
    ttl: Annotated[Duration, Field(gt=0)] = 30.0
    half_life_rounds: Annotated[Number, Field(ge=100)] = 4000.0
    plant: PlantSpec
    policy: dict[str, Any]
    events: Annotated[list[Event], Field(max_length=200)] = []
    expect: Literal["pass", "fail", "known_gap"] = "pass"
    reason: str | None = None
    checks: Annotated[list[Check], Field(min_length=1, max_length=100)]

    _name: str = PrivateAttr("scenario")
    _path: str = PrivateAttr("<scenario>")
    _policy: Policy | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.expect == "pass") == (self.reason is not None):
            raise PydanticCustomError("reason", "expect: fail and known_gap need a reason; expect: pass has none")
        if self.ttl < 2 * self.tick:
            raise PydanticCustomError("ttl", "must be at least two ticks, or leases run out between them")
        for event in self.events:
            if event.restart is not None and event.restart not in self.plant.workers:
                raise PydanticCustomError("event", "restart names a worker that the plant does not have")
        return self

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self._name

    @property
    def path(self) -> str:
        """Where the document came from."""
        return self._path

    @property
    def first_policy(self) -> Policy:
        """The policy that is in force at the start."""
        assert self._policy is not None
        return self._policy


def load_scenario(path: str | Path) -> Scenario:
    """The scenario in the file at ``path``; raises ScenarioError or PolicyError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ScenarioError(f"cannot be read: {e}", path=str(path)) from e
    return parse_scenario(text, str(path))


def parse_scenario(text: str, path: str = "<scenario>") -> Scenario:
    """The scenario in ``text``; raises ScenarioError (file, line, key) or, for its policy, PolicyError."""
    lines: dict[tuple[str, ...], int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, MappingNode):
            raise ScenarioError("a scenario is a mapping of keys", path=path, line=1)
        data = _plain(root, (), lines, path)
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        raise ScenarioError(f"not valid YAML: {e.problem}", path=path, line=line) from e
    except yaml.YAMLError as e:
        raise ScenarioError(f"not valid YAML: {e}", path=path, line=1) from e
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        keys = tuple(str(part) for part in first["loc"])
        known = next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in lines), ())
        message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        key = ".".join(known if first["type"] != "missing" else keys)
        raise ScenarioError(message, path=path, line=lines.get(known, 1), key=key or None) from e
    scenario._policy = parse_policy(_policy_text(text, root), path)
    scenario._name, scenario._path = Path(path).stem, path
    return scenario


def _plain(node: Node, at: tuple[str, ...], lines: dict[tuple[str, ...], int], path: str) -> Any:
    """Plain data, and the line of every key and list item. Words stay words: ``on`` is no truth value."""
    lines[at] = node.start_mark.line + 1
    if isinstance(node, ScalarNode):
        text = str(node.value)
        if node.style is None and text in ("", "~", "null"):
            return None
        return parse_number(text) if node.style is None and looks_numeric(text) else text
    if isinstance(node, MappingNode):
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode) or key in found:
                raise ScenarioError("a key must be a word, given once", path=path, line=line, key=".".join((*at, key)))
            found[key] = _plain(value_node, (*at, key), lines, path)
            lines[(*at, key)] = line
        return found
    return [_plain(child, (*at, str(i)), lines, path) for i, child in enumerate(node.value)]


def _policy_text(text: str, root: MappingNode) -> str:
    """The policy section as a document of its own whose lines are numbered as in the scenario."""
    node = next(value for key, value in root.value if key.value == "policy")
    start = node.start_mark
    section = text[int(start.index) : int(node.end_mark.index)]
    return "\n" * int(start.line) + textwrap.dedent(" " * int(start.column) + section)
