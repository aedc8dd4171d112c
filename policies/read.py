"""A small, safe part of YAML, read into plain data that remembers its lines.

One document, mappings, lists, plain and quoted scalars, anchors and merge keys within limits; no tags. Keys are text as
written, so that ``on`` and ``yes`` stay words. A key given twice is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from policies.errors import PolicyError
from policies.scalars import looks_numeric, shown

Path = tuple[str, ...]  # the keys that lead to a value

MAX_BYTES = 64 * 1024
MAX_DEPTH = 16
MAX_VALUES = 5_000
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_MERGE = "<<"


class InvalidPolicy(PolicyError):
    """A document that cannot be used; the first fault is the error itself, the rest are in ``others``."""

    def __init__(self, message: str, *, path: str, line: int, key: str | None = None) -> None:
        super().__init__(message, path=path, line=line, key=key)
        self.others: tuple[InvalidPolicy, ...] = ()


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


def read_yaml(text: str, path: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Plain data, and the line (from 1) of every key and list item; raises InvalidPolicy that names ``path``."""
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


def dump_yaml(data: dict[str, Any]) -> str:
    """Text that `read_yaml` reads back as ``data``, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


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


class _Plain:
    """Turns composed nodes into dicts, lists and scalars; remembers lines; counts what aliases expand to."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.values = 0
        self.open: set[int] = set()

    def value(self, node: Node, path: Path) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise _Refused("aliases expand to too many values", _line(node), dotted(path))
        if isinstance(node, ScalarNode):
            return _scalar(node)
        if id(node) in self.open:
            raise _Refused("an alias refers to what it is part of", _line(node), dotted(path))
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
                    raise _Refused("<< merges a mapping or a list of mappings", _line(part), dotted(path))
                for name, value in self.value(part, path).items():
                    result.setdefault(name, value)
        for key_node, value_node in node.value:
            name = _key(key_node, path)
            here, line = (*path, name), _line(key_node)
            if name in seen:
                raise _Refused(f"given twice, first on line {seen[name]}", line, dotted(here))
            seen[name] = line
            if name != _MERGE:
                result[name] = self.value(value_node, here)
                self.lines[here] = line
        return result


def _key(node: Node, path: Path) -> str:
    if not isinstance(node, ScalarNode):
        raise _Refused("a key must be a plain word", _line(node), dotted(path))
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


def dotted(path: Sequence[str]) -> str | None:
    return ".".join(part if part.isidentifier() and part.isascii() else _quoted(part) for part in path) or None


def _quoted(part: str) -> str:
    plain = part.isprintable() and part and not set(part) & set(" .'\"")
    return part if plain and len(part) <= 128 else shown(part)


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as a number, such as ``1e-3``, which YAML 1.1 takes for text."""


def _text(dumper: yaml.SafeDumper, value: str) -> ScalarNode:
    quoted = looks_numeric(value) or value in _NULLS or value in _BOOLEANS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if quoted else None)


_Dumper.add_representer(str, _text)
