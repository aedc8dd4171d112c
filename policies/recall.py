"""What was in force before a restart, for a file that cannot be used now: whose it is, and the policy that it had."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from policies.compose import alone
from policies.errors import PolicyError
from policies.load import Loaded, validate
from policies.read import read_yaml


@dataclass(frozen=True)
class Accepted:
    """The newest policy of a pool that was accepted: its whole text, and the file that it came from."""

    pool: str
    text: str
    source: str


def recall(path: str | Path, text: str, known: Iterable[Accepted]) -> Loaded | None:
    """The policy of ``known`` (newest first) that the unusable file at ``path`` had; None where there is none.

    It is that of the pool that ``text`` names; where none can be read or it is not known, the newest that came from the
    same file. A policy that this version no longer takes is none.
    """
    known = list(known)
    pool = _pool_of(text, str(path))
    found = next((k for k in known if k.pool == pool), None) or next((k for k in known if same(k.source, path)), None)
    if found is None:
        return None
    try:
        loaded = validate(alone(found.text, str(path)))
    except PolicyError:
        return None
    return loaded if loaded.policy.pool == found.pool else None


def same(one: str | Path, other: str | Path) -> bool:
    """Whether two paths name the same file, without looking at the disk."""
    return os.path.normpath(Path(one).absolute()) == os.path.normpath(Path(other).absolute())


def _pool_of(text: str, path: str) -> str | None:
    """The pool that a document names, as far as it can be read."""
    try:
        pool = read_yaml(text, path)[0].get("pool")
    except PolicyError:
        return None
    return pool if isinstance(pool, str) else None
