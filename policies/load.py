"""YAML to policy, with every fault placed: file, line and dotted key.

A key given twice, a key that does not exist and a value that cannot be are refused, and all of them are reported at
once. `policies.read` reads one file, `policies.compose` puts it on top of what it extends.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, ValidationError

from policies.compose import Document, Place, alone, compose
from policies.model import ClassOverride, Policy
from policies.read import MAX_BYTES, InvalidPolicy, Path, dotted, dump_yaml, read_text
from policies.scalars import format_duration, looks_numeric, shown

__all__ = ["MAX_BYTES", "InvalidPolicy", "Loaded", "load", "load_policy", "parse_policy", "read_text", "to_yaml"]

MAX_FAULTS = 20


@dataclass(frozen=True)
class Loaded:
    """A policy, its self-contained text, the files that it was read from (its own first), and where ``pool`` stands."""

    policy: Policy
    text: str
    sources: tuple[str, ...]
    pool_at: Place


def load(path: str | FilePath) -> Loaded:
    """The policy in the file at ``path`` on top of what it extends; raises PolicyError as `load_policy`."""
    return validate(compose(str(path), read_text))


def load_policy(path: str | FilePath) -> Policy:
    """The policy in the file at ``path``; raises PolicyError, without a line where the file cannot be read at all."""
    return load(path).policy


def parse_policy(text: str, path: str = "<policy>") -> Policy:
    """The policy in ``text``; raises PolicyError that names ``path``, the line (from 1) and the dotted key."""
    return validate(alone(text, path)).policy


def validate(document: Document) -> Loaded:
    """The policy that ``document`` describes; raises InvalidPolicy with every fault."""
    try:
        policy = Policy.model_validate(document.data)
    except ValidationError as e:
        # A missing key comes last: where one is misspelt, the misspelling says more.
        order = {name: i for i, name in enumerate(document.sources)}
        faults = sorted(
            _faults(e, document.data, document.places, document.sources[0]),
            key=lambda f: (f.message == _WORDS["missing"], order.get(f.path, 0), f.line or 0),
        )
        faults = faults[:MAX_FAULTS]
    else:
        return Loaded(policy, document.text, document.sources, document.places[("pool",)])
    faults[0].others = tuple(faults[1:])
    raise faults[0]


def to_yaml(policy: Policy) -> str:
    """Canonical text of ``policy`` (`Policy.document`); `parse_policy` reads it back as an equal policy."""
    return dump_yaml(policy.document())


def _faults(error: ValidationError, data: Any, places: Mapping[Path, Place], path: str) -> Iterator[InvalidPolicy]:
    def at(where: Path, message: str, key: Path) -> InvalidPolicy:
        while where and where not in places:
            where = where[:-1]
        file, line = places.get(where, (path, 1))
        return InvalidPolicy(message, path=file, line=line, key=dotted(key))

    for fault in error.errors(include_url=False):
        where: Path = tuple(str(part) for part in fault["loc"] if part != "[key]")
        context = fault.get("ctx", {})
        if fault["type"] == "conflict":
            for candidates, text in context["faults"]:
                chosen = next((c for c in candidates if c in places), candidates[0])
                unwritten = chosen != candidates[0]
                message = f"the default of {dotted(candidates[0])} {text}; write it out" if unwritten else text
                yield at(chosen, message, chosen)
        elif fault["type"] != "default_factory_not_called":  # the generated alerts wait for a valid objective
            message = _message(fault["type"], fault["msg"], context, where, _dig(data, where))
            if fault["loc"][-1] == "[key]":
                message = "a class name must be letters, digits and . _ : - (at most 128)"
            yield at(where, message, where)


_WORDS = {
    "missing": "is required",
    "model_type": "must be a section of keys, not {shown}",
    "dict_type": "must be a section of keys, not {shown}",
    "string_type": "must be text, not {shown}; put it in quotes if that is meant",
    "string_pattern_mismatch": "must be a name of letters, digits and . _ : - (at most 128), not {shown}",
    "literal_error": "must be {expected}, not {shown}",
    "greater_than": "must be more than {gt}, not {shown}",
    "greater_than_equal": "must be at least {ge}, not {shown}",
    "less_than": "must be less than {lt}, not {shown}",
    "less_than_equal": "must be at most {le}, not {shown}",
    "too_short": "must not be empty",
    "too_long": "has {actual_length} entries; {max_length} are allowed",
}


def _message(kind: str, given: str, context: dict[str, Any], where: Path, value: Any) -> str:
    """What pydantic found, in our words; ``value`` is what the document says there."""
    if kind == "extra_forbidden":
        return "unknown key" + _suggestion(where)
    is_duration = isinstance(value, str) and not value.endswith("%") and not looks_numeric(value)
    limits = {
        name: (format_duration(limit) if is_duration else f"{limit:g}") if name in ("ge", "gt", "le", "lt") else limit
        for name, limit in context.items()
    }
    return _WORDS[kind].format(shown=shown(value), **limits) if kind in _WORDS else given


def _suggestion(where: Path) -> str:
    """The closest key that exists here, or the section that the key belongs to."""
    section, name = where[:-1], where[-1]
    known = _known(section) + ([] if section else ["extends"])
    close = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
    elsewhere = [
        s for s in ("objective", "leniency", "evidence", "block", "pull_back", "alerts") if name in _known((s,))
    ]
    if not close and elsewhere:
        return f"; it belongs under {elsewhere[0]}"
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _known(section: Path) -> list[str]:
    """Keys that exist in a section of the document."""
    model: type[BaseModel] | None = Policy
    if section[:1] == ("classes",) and len(section) > 1:
        model, section = ClassOverride, section[2:]
    for part in section:
        if part.isdigit():
            continue
        field = model.model_fields.get(part) if model else None
        model = _model_of(field.annotation) if field else None
    return list(model.model_fields) if model else []


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_of(argument)
        if found is not None:
            return found
    return None


def _dig(data: Any, where: Path) -> Any:
    for part in where:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data
