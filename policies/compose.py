"""A policy file on top of what it extends.

``extends: FILE`` names a parent, beside the file unless it is a path. A file ``_defaults.yaml`` beside the policy lies
below all of that. Mappings are merged key by key; anything else is replaced, lists as a whole. ``extends: []`` stands
for a document that is complete by itself: no parent, and no defaults. Files whose name begins with ``_`` are parents
only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from policies.errors import PolicyError
from policies.read import MAX_BYTES, InvalidPolicy, Path, dump_yaml, read_yaml

MAX_CHAIN = 8
DEFAULTS = "_defaults.yaml"
_KEY = "extends"
_INSTEAD = {"window": "calendar", "calendar": "window"}

Place = tuple[str, int]  # file and line


@dataclass(frozen=True)
class Document:
    """A whole document: plain data without ``extends``, and where each key and item was written.

    ``sources`` are the files it came from, its own first; ``text`` says the same without any other file.
    """

    data: dict[str, Any]
    places: dict[Path, Place]
    sources: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class _Part:
    path: str
    text: str
    data: dict[str, Any]
    places: dict[Path, Place]
    parent: str | None
    complete: bool  # extends: []


def alone(text: str, path: str) -> Document:
    """The document in ``text``, which must not extend another; raises InvalidPolicy."""
    part = _part(path, text)
    if part.parent is not None:
        raise InvalidPolicy("only a policy file can extend another", path=path, line=part.places[(_KEY,)][1], key=_KEY)
    return Document(part.data, part.places, (path,), text)


def compose(path: str, read: Callable[[str], str], *, exists: Callable[[str], bool] | None = None) -> Document:
    """The document at ``path`` with everything it extends; raises PolicyError for the file and line at fault.

    ``read`` gives a file's text or raises PolicyError, and ``exists`` says whether there is one (as the disk says).
    """
    parts = list(_chain(path, read))
    defaults = str(FilePath(path).parent / DEFAULTS)
    exists = exists or (lambda name: FilePath(name).exists())
    if not parts[-1].complete and all(part.path != defaults for part in parts) and exists(defaults):
        parts += _chain(defaults, read)
    if len(parts) == 1:
        return Document(parts[0].data, parts[0].places, (path,), parts[0].text)
    data: dict[str, Any] = {}
    places: dict[Path, Place] = {}
    for part in reversed(parts):
        _merge(data, places, part.data, part.places, ())
    text = _text(data, [part.path for part in parts])
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise InvalidPolicy(f"larger than {MAX_BYTES // 1024} KiB with what it extends", path=path, line=1, key=_KEY)
    return Document(data, places, tuple(part.path for part in parts), text)


def _chain(path: str, read: Callable[[str], str]) -> Iterator[_Part]:
    """The file at ``path``, its parent, and so on."""
    part = _part(path, read(path))
    seen = [path]
    yield part
    while part.parent is not None:
        child, parent = part, os.path.normpath(FilePath(part.path).parent / part.parent)
        line = child.places[(_KEY,)][1]
        if parent in seen:
            way = " -> ".join(FilePath(name).name for name in [*seen[seen.index(parent) :], parent])
            raise InvalidPolicy(f"goes round in a circle: {way}", path=child.path, line=line, key=_KEY)
        if len(seen) >= MAX_CHAIN:
            raise InvalidPolicy(f"more than {MAX_CHAIN} files in a row", path=child.path, line=line, key=_KEY)
        try:
            text = read(parent)
        except InvalidPolicy:
            raise
        except PolicyError as e:
            message = f"{child.parent}: {e.message}"
            raise InvalidPolicy(message, path=child.path, line=line, key=_KEY) from e
        part = _part(parent, text)
        seen.append(parent)
        yield part


def _part(path: str, text: str) -> _Part:
    data, lines = read_yaml(text, path)
    parent = data.pop(_KEY, None)
    written = (_KEY,) in lines
    places = {key: (path, line) for key, line in lines.items()}
    if written and parent != [] and not (isinstance(parent, str) and parent and "\0" not in parent):
        message = "must be the name of a policy file, or [] for a document that is complete by itself"
        raise InvalidPolicy(message, path=path, line=lines[(_KEY,)], key=_KEY)
    return _Part(path, text, data, places, parent or None, parent == [])


def _merge(
    data: dict[str, Any], places: dict[Path, Place], new: dict[str, Any], new_places: dict[Path, Place], at: Path
) -> None:
    """Lay ``new`` over ``data``; a window takes the place of a calendar, and the other way round."""
    for key, value in new.items():
        here = (*at, key)
        other = _INSTEAD.get(key)
        if other is not None and other not in new:
            data.pop(other, None)
        old = data.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            places[here] = new_places[here]
            _merge(old, places, value, new_places, here)
            continue
        data[key] = value
        for path in [path for path in places if path[: len(here)] == here]:
            del places[path]
        places.update({path: place for path, place in new_places.items() if path[: len(here)] == here})


def _text(data: dict[str, Any], sources: list[str]) -> str:
    names = ", ".join(FilePath(name).name for name in sources)
    first = {key: data[key] for key in ("version", "pool") if key in data}
    rest = {key: value for key, value in data.items() if key not in first}
    return f"# Composed of {names}.\n" + dump_yaml(first | {_KEY: []} | rest)
