"""YAML to policy, with every fault placed: file, line and dotted key.

The reader takes a small, safe part of YAML: one document, mappings, lists, plain and quoted scalars, anchors and merge
keys within limits; no tags. Keys are text as written, so that ``on`` and ``yes`` stay words. A key given twice, a key
that does not exist and a value that cannot be are refused, and all of them are reported at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from policies.errors import PolicyError
from policies.model import ClassOverride, Path, Policy
from policies.scalars import format_duration, looks_numeric, shown

MAX_BYTES = 64 * 1024
MAX_DEPTH = 16
MAX_VALUES = 5_000
MAX_FAULTS = 20
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_MERGE = "<<"


class InvalidPolicy(PolicyError):
    """A document that cannot be used; the first fault is the error itself, the rest are in ``others``."""

    def __init__(self, message: str, *, path: str, line: int, key: str | None = None) -> None:
        super().__init__(message, path=path, line=line, key=key)
        self.others: tuple[InvalidPolicy, ...] = ()


def load_policy(path: str | FilePath) -> Policy:
    """The policy in the file at ``path``; raises PolicyError, without a line where the file cannot be read at all."""
    return parse_policy(read_text(path), str(path))


def parse_policy(text: str, path: str = "<policy>") -> Policy:
    """The policy in ``text``; raises PolicyError that names ``path``, the line (from 1) and the dotted key."""
    return parse_with_lines(text, path)[0]


def parse_with_lines(text: str, path: str = "<policy>") -> tuple[Policy, dict[Path, int]]:
    """As `parse_policy`, and the line of every key and list item that the document writes, by path."""
    data, lines = _read(text, path)
    try:
        return Policy.model_validate(data), lines
    except ValidationError as e:
        # A missing key comes last: where one is misspelt, the misspelling says more.
        faults = sorted(_faults(e, data, lines, path), key=lambda f: (f.message == _WORDS["missing"], f.line or 0))
        faults = faults[:MAX_FAULTS]
    faults[0].others = tuple(faults[1:])
    raise faults[0]


def to_yaml(policy: Policy) -> str:
    """Canonical text of ``policy`` (`Policy.document`); `parse_policy` reads it back as an equal policy."""
    return yaml.safe_dump(policy.document(), sort_keys=False, allow_unicode=True, width=120)


def read_text(path: str | FilePath) -> str:
    """The text of a policy file; raises PolicyError for what is not a readable UTF-8 file of sensible size."""
    file = FilePath(path)
    try:
        if not file.is_file():
            state = "is not a regular file" if file.exists() else "does not exist"
            raise PolicyError(f"the policy file {state}", path=str(path))
        with file.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise PolicyError(f"the policy file cannot be read: {reason}", path=str(path)) from e
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        if len(raw) > MAX_BYTES:
            return raw.decode("latin-1")  # refused for its size, which is the greater trouble
        raise InvalidPolicy("not UTF-8 text", path=str(path), line=raw[: e.start].count(b"\n") + 1) from e


class _Reader(yaml.SafeLoader):
    """Composes nodes (never constructs objects), without tags and within limits of depth and size."""

    depth = 0
    nodes = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise _Refused(f"more than {MAX_VALUES} values", _line(event))
        if self.depth >= MAX_DEPTH:
            raise _Refused(f"nested more than {MAX_DEPTH} deep", _line(event))
        if getattr(event, "tag", None) not in (None, "!"):
            raise _Refused("tags such as !!str are not used in a policy; quote text instead", _line(event))
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Refused(Exception):
    def __init__(self, message: str, line: int, key: str | None = None) -> None:
        super().__init__(message)
        self.message, self.line, self.key = message, line, key


def _read(text: str, path: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Plain data, and the line of every key and list item."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise InvalidPolicy(f"larger than {MAX_BYTES // 1024} KiB; this is not a policy", path=path, line=1)
    reader = None
    try:
        reader = _Reader(text)
        root = reader.get_single_node()
        if root is None:
            raise _Refused("the document is empty", 1)
        if not isinstance(root, MappingNode):
            raise _Refused("a policy is a mapping of keys, starting with version: lenity/v1", _line(root))
        plain = _Plain()
        return plain.value(root, ()), plain.lines
    except _Refused as e:
        raise InvalidPolicy(e.message, path=path, line=e.line, key=e.key) from None
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise InvalidPolicy("a character that YAML does not allow", path=path, line=line) from e
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        what = ", ".join(part for part in (e.context, e.problem) if part)
        if "expected a single document" in what:
            what = "holds more than one document; write one policy per file"
        raise InvalidPolicy(f"not valid YAML: {what}", path=path, line=mark.line + 1 if mark else 1) from e
    except (yaml.YAMLError, ValueError, OverflowError) as e:
        # PyYAML lets some of Python's own errors through, for instance for "\UFFFFFFFF".
        line = reader.line + 1 if reader is not None else 1
        raise InvalidPolicy(f"not valid YAML: {e}", path=path, line=line) from e


class _Plain:
    """Turns composed nodes into dicts, lists and scalars; remembers lines; counts what aliases expand to."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.values = 0
        self.open: set[int] = set()

    def value(self, node: Node, path: Path) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise _Refused("aliases expand to too many values", _line(node), _dotted(path))
        if isinstance(node, ScalarNode):
            return _scalar(node)
        if id(node) in self.open:
            raise _Refused("an alias refers to what it is part of", _line(node), _dotted(path))
        self.open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            return [self.item(child, (*path, str(i))) for i, child in enumerate(node.value)]
        finally:
            self.open.discard(id(node))

    def item(self, node: Node, path: Path) -> Any:
        self.lines[path] = _line(node)
        return self.value(node, path)

    def mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        """Keys in the order written; what a merge key brings comes first, so that keys written here win."""
        result: dict[str, Any] = {}
        seen: dict[str, int] = {}
        merged = [value for key, value in node.value if _key(key, path) == _MERGE]
        for source in merged:
            for part in source.value if isinstance(source, SequenceNode) else [source]:
                if not isinstance(part, MappingNode):
                    raise _Refused("<< merges a mapping or a list of mappings", _line(part), _dotted(path))
                for name, value in self.value(part, path).items():
                    result.setdefault(name, value)
        for key_node, value_node in node.value:
            name = _key(key_node, path)
            here, line = (*path, name), _line(key_node)
            if name in seen:
                raise _Refused(f"given twice, first on line {seen[name]}", line, _dotted(here))
            seen[name] = line
            if name != _MERGE:
                result[name] = self.value(value_node, here)
                self.lines[here] = line
        return result


def _key(node: Node, path: Path) -> str:
    if not isinstance(node, ScalarNode):
        raise _Refused("a key must be a plain word", _line(node), _dotted(path))
    return str(node.value)


def _scalar(node: ScalarNode) -> str | float | int | bool | None:
    text = str(node.value)
    if node.style is not None:
        return text
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if not looks_numeric(text):
        return text
    number = int(text) if text.lstrip("+-").isdigit() else float(text)
    return number if math.isfinite(number) else text


def _line(at: Any) -> int:
    return int(at.start_mark.line) + 1


def _dotted(path: Sequence[str]) -> str | None:
    return ".".join(part if part.isidentifier() and part.isascii() else _quoted(part) for part in path) or None


def _quoted(part: str) -> str:
    plain = part.isprintable() and part and not set(part) & set(" .'\"")
    return part if plain and len(part) <= 128 else shown(part)


def _faults(error: ValidationError, data: Any, lines: dict[Path, int], path: str) -> Iterator[InvalidPolicy]:
    for fault in error.errors(include_url=False):
        where: Path = tuple(str(part) for part in fault["loc"] if part != "[key]")
        context = fault.get("ctx", {})
        if fault["type"] == "conflict":
            for candidates, text in context["faults"]:
                chosen = next((c for c in candidates if c in lines), candidates[0])
                unwritten = chosen != candidates[0]
                message = f"the default of {_dotted(candidates[0])} {text}; write it out" if unwritten else text
                yield InvalidPolicy(message, path=path, line=_nearest(chosen, lines), key=_dotted(chosen))
        elif fault["type"] != "default_factory_not_called":  # the generated alerts wait for a valid objective
            message = _message(fault["type"], fault["msg"], context, where, _dig(data, where))
            if fault["loc"][-1] == "[key]":
                message = "a class name must be letters, digits and . _ : - (at most 128)"
            yield InvalidPolicy(message, path=path, line=_nearest(where, lines), key=_dotted(where))


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
    known = _known(section)
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


def _nearest(where: Path, lines: dict[Path, int]) -> int:
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where, 1)


def _dig(data: Any, where: Path) -> Any:
    for part in where:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data
