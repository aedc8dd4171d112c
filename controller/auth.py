"""Who may do what over HTTP: tokens with names and roles, and how often each may write.

A tokens file has one token a line, ``role name token``, where role is viewer, labeller or operator and token is the
secret itself (16 characters or more) or ``sha256:`` and the hex digest of it; ``#`` begins a comment. Only digests are
kept in memory. A token is compared with every one there is, in constant time, and never logged. The name becomes the
``who`` of the record.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from policies.errors import LenityError

log = logging.getLogger("lenity.auth")

Role = Literal["viewer", "labeller", "operator"]
RANK: Mapping[str, int] = {"viewer": 0, "labeller": 1, "operator": 2}
MIN_LENGTH = 16
ENVIRONMENT = "LENITY_TOKENS"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_STAMP = tuple[int, int, int]


class TokenError(LenityError):
    """A tokens file that cannot be used; the message names file and line, never a token."""


@dataclass(frozen=True)
class Identity:
    """Who presented a token, and what that token allows."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """Whether this role includes ``role``: an operator may label, a labeller may view."""
        return RANK[self.role] >= RANK[role]


def parse_tokens(text: str, source: str) -> dict[bytes, Identity]:
    """Identities by SHA-256 digest; raises TokenError with ``source`` and line for anything that is not a token."""
    found: dict[bytes, Identity] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{source}:{number}"
        if len(words) != 3:
            raise TokenError(f"{where}: expected 'role name token', found {len(words)} words")
        role, name, token = words
        if role not in RANK:
            raise TokenError(f"{where}: the role must be viewer, labeller or operator")
        if not _NAME.match(name):
            raise TokenError(f"{where}: the name must be letters, digits and . _ : - (128 at most)")
        if name in names:
            raise TokenError(f"{where}: {name!r} has a token already; give each its own name")
        if token.startswith("sha256:") and not _DIGEST.match(token):
            raise TokenError(f"{where}: after 'sha256:' come 64 hex digits, in lower case")
        if not token.startswith("sha256:") and len(token) < MIN_LENGTH:
            raise TokenError(f"{where}: a token needs {MIN_LENGTH} characters or more")
        digest = bytes.fromhex(token[7:]) if token.startswith("sha256:") else _digest(token)
        if digest in found:
            raise TokenError(f"{where}: the same token as that of {found[digest].name!r}")
        names.add(name)
        found[digest] = Identity(name, role)  # type: ignore[arg-type]
    return found


class Tokens:
    """The tokens of a file, read again when it changes, or of the environment.

    A change that cannot be used leaves the last good tokens in force and is logged and kept in `problem`; a file that
    is gone grants nothing. Safe from any thread.
    """

    def __init__(self, path: Path | None = None, *, text: str | None = None):
        """Read ``path`` or ``text`` (lines, or separated by ``;``); raises TokenError when that cannot be used."""
        self._path, self._lock = path, threading.Lock()
        self.problem: str | None = None
        self._stamp: _STAMP | None = None
        self._known: dict[bytes, Identity] = {}
        if path is not None:
            try:
                self._stamp = _stamp(path)
                self._known = parse_tokens(path.read_text(encoding="utf-8"), str(path))
            except (OSError, UnicodeDecodeError) as e:
                raise TokenError(f"{path}: tokens cannot be read: {type(e).__name__}") from e
        elif text is not None:
            self._known = parse_tokens(text.replace(";", "\n"), ENVIRONMENT)

    @classmethod
    def configured(cls, path: Path | None, environment: Mapping[str, str] | None = None) -> Tokens | None:
        """Those of ``path``, else of LENITY_TOKENS, else None: nobody may write."""
        text = (os.environ if environment is None else environment).get(ENVIRONMENT)
        if path is None and not text:
            return None
        return cls(path) if path is not None else cls(text=text)

    def __len__(self) -> int:
        return len(self._known)

    def identify(self, token: str) -> Identity | None:
        """Whose token this is, None for nobody's. Compares with all of them."""
        self._refresh()
        presented, found = _digest(token), None
        for digest, identity in self._known.items():
            if hmac.compare_digest(digest, presented):
                found = identity
        return found

    def _refresh(self) -> None:
        if self._path is None:
            return
        with self._lock:
            try:
                stamp = _stamp(self._path)
            except OSError:
                if self._stamp is not None:
                    log.warning("%s is gone: no token is valid until it is back", self._path)
                self._stamp, self._known, self.problem = None, {}, f"{self._path} is gone"
                return
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._known = parse_tokens(self._path.read_text(encoding="utf-8"), str(self._path))
            except (TokenError, OSError, UnicodeDecodeError) as e:
                self.problem = str(e) if isinstance(e, TokenError) else f"{self._path}: {type(e).__name__}"
                log.warning("tokens not changed, the last good ones stay: %s", self.problem)
            else:
                self.problem = None
                log.info("%d tokens read from %s", len(self._known), self._path)


class Buckets:
    """Token buckets by name: ``burst`` writes at once, then ``per_second`` of them. ``clock`` is monotonic seconds."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float]):
        self.per_second, self.burst, self._clock = per_second, burst, clock
        self._lock = threading.Lock()
        self._levels: dict[str, tuple[float, float]] = {}  # name -> (level, when)

    def take(self, name: str, cost: float = 1.0) -> float:
        """Take ``cost`` from the bucket of ``name``: 0 when it was there, else the seconds until it will be."""
        with self._lock:
            now = self._clock()
            level, at = self._levels.get(name, (self.burst, now))
            level = min(self.burst, level + (now - at) * self.per_second)
            cost = min(cost, self.burst)
            if level >= cost:
                self._levels[name] = (level - cost, now)
                return 0.0
            self._levels[name] = (level, now)
            return (cost - level) / self.per_second


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _stamp(path: Path) -> _STAMP:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
