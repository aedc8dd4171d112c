"""A policy file that is followed while the program runs: validate everything, then swap.

`PolicyFile.poll` reads the file (a few kilobytes) and compares its content; modification times and inodes are not
trusted, since a copy can keep them and a coarse clock can hide a second edit. So an atomic replace, an edit in place
and the symlink swap of a mounted ConfigMap all count once each. Whatever is wrong with an edit, the last good policy
stays in force.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from policies.errors import PolicyError
from policies.load import parse_policy, parse_with_lines, read_text
from policies.model import Policy


@dataclass(frozen=True)
class Change:
    """A policy that has just become the current one; ``text`` is the file's own text, ``revision`` its SHA-256."""

    policy: Policy
    revision: str
    text: str
    previous_revision: str


class PolicyFile:
    """Follows one policy file. Raises PolicyError where the first reading finds no usable policy.

    ``rejected`` is the reason why what the file holds now is not in force, or None; ``rejected_text`` and
    ``rejected_revision`` are what was refused (empty where the file could not be read).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.text = read_text(self.path)
        self._current = (parse_policy(self.text, str(self.path)), revision_of(self.text))
        self.rejected: PolicyError | None = None
        self.rejected_text = ""
        self.rejected_revision = ""

    @property
    def current(self) -> tuple[Policy, str]:
        """The policy in force and the revision (SHA-256 of its text)."""
        return self._current

    def poll(self) -> Change | None:
        """Look at the file once: the change that took effect, or None where nothing did (then see ``rejected``)."""
        try:
            text = read_text(self.path)
        except PolicyError as e:
            if self.rejected is None or str(self.rejected) != str(e):
                self._reject(e, "", "")
            return None
        revision = revision_of(text)
        policy, current = self._current
        if revision == current:
            self._clear()
            return None
        if revision == self.rejected_revision:
            return None
        try:
            new, lines = parse_with_lines(text, str(self.path))
            if new.pool != policy.pool:
                raise PolicyError(
                    f"the running pool is {policy.pool!r}; start another controller for pool {new.pool!r}",
                    path=str(self.path),
                    line=lines[("pool",)],
                    key="pool",
                )
        except PolicyError as e:
            self._reject(e, text, revision)
            return None
        self.text, self._current = text, (new, revision)
        self._clear()
        return Change(new, revision, text, current)

    def _clear(self) -> None:
        self._reject(None, "", "")

    def _reject(self, error: PolicyError | None, text: str, revision: str) -> None:
        self.rejected, self.rejected_text, self.rejected_revision = error, text, revision


def revision_of(text: str) -> str:
    """SHA-256 of a policy text in hexadecimal; comments count, since the text is what history keeps."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
