"""Policy files that are followed while the program runs: validate everything, then swap.

Files are read at every poll (a few kilobytes) and compared by content; modification times and inodes are not trusted,
since a copy can keep them and a coarse clock can hide a second edit. So an atomic replace, an edit in place and the
symlink swap of a mounted ConfigMap all count once each. Whatever is wrong with an edit, the last good policy stays in
force.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from policies.compose import compose
from policies.errors import PolicyError
from policies.load import Loaded, validate
from policies.model import Policy
from policies.read import read_text
from policies.recall import Accepted, recall, same


@dataclass(frozen=True)
class Change:
    """A policy that has just become the current one; ``text`` says all of it, ``revision`` is the text's SHA-256."""

    policy: Policy
    revision: str
    text: str
    previous_revision: str


@dataclass(frozen=True)
class Refused:
    """What a file holds and why it cannot be used; ``text`` is empty where it could not be read."""

    error: PolicyError
    text: str


@dataclass(frozen=True)
class _Unreadable:
    reason: str


class Source:
    """One policy file and what it extends, read again and again; ``outcome`` is what they say.

    With ``settle``, what has changed counts only once two readings in a row agree, so that a file that is being
    written is not taken half-way.
    """

    def __init__(self, path: str | Path, *, settle: bool = True) -> None:
        self.path, self._settle = Path(path), settle
        self._names: tuple[str, ...] = (str(path),)
        self._last = self._read()
        self.outcome = self._evaluate(self._last)
        self._taken = self._last

    def poll(self) -> bool:
        """Read again; True where there is a new outcome."""
        texts, before = self._read(), self._last
        self._last = texts
        if texts == self._taken or (self._settle and texts != before):
            return False
        outcome = self._evaluate(texts)
        if self._settle and self._last != texts:  # it names parents that were not read before
            return False
        self.outcome, self._taken = outcome, self._last
        return True

    @property
    def settled(self) -> bool:
        """Whether `outcome` is what the files said at the last two readings."""
        return self._last == self._taken

    def _read(self) -> dict[str, str | _Unreadable]:
        return {name: _read(name) for name in self._names}

    def _evaluate(self, texts: dict[str, str | _Unreadable]) -> Loaded | Refused:
        """What ``texts`` say; files that they name and that were not among them are read now and remembered."""
        known = dict(texts)

        def read(name: str) -> str:
            text = known[name] = known[name] if name in known else _read(name)
            if isinstance(text, _Unreadable):
                return read_text(name)  # raises what is wrong, unless it has just come into being
            return text

        def exists(name: str) -> bool:
            known[name] = known[name] if name in known else _read(name)
            return isinstance(known[name], str)

        try:
            return validate(compose(str(self.path), read, exists=exists))
        except PolicyError as e:
            own = known[str(self.path)]
            return Refused(e, own if isinstance(own, str) else "")
        finally:
            self._names, self._last = tuple(known), known


class Followed:
    """The policy in force of one pool, and what speaks against the newest edit.

    ``rejected`` is the reason why what the file holds now is not in force, or None; ``rejected_text`` and
    ``rejected_revision`` are what was refused (empty where the file could not be read).
    """

    def __init__(self, path: str | Path, loaded: Loaded) -> None:
        self.path, self.text = Path(path), loaded.text
        self._current = (loaded.policy, revision_of(loaded.text))
        self.rejected: PolicyError | None = None
        self.rejected_text = ""
        self.rejected_revision = ""

    @property
    def current(self) -> tuple[Policy, str]:
        """The policy in force and the revision (SHA-256 of its text)."""
        return self._current

    def accept(self, loaded: Loaded) -> Change | None:
        """Put ``loaded`` in force; None where that is what was in force already."""
        self.rejected, self.rejected_text, self.rejected_revision = None, "", ""
        revision, before = revision_of(loaded.text), self._current[1]
        if revision == before:
            return None
        self.text, self._current = loaded.text, (loaded.policy, revision)
        return Change(loaded.policy, revision, loaded.text, before)

    def refuse(self, refused: Refused) -> None:
        """Keep what is in force, and the reason why the newest edit is not; the same reason again changes nothing."""
        revision = revision_of(refused.text) if refused.text else ""
        if self.rejected is None or (str(self.rejected), self.rejected_revision) != (str(refused.error), revision):
            self.rejected, self.rejected_text, self.rejected_revision = refused.error, refused.text, revision


class PolicyFile(Followed):
    """Follows one policy file, each edit as soon as it is read; raises PolicyError where the first is not usable."""

    def __init__(self, path: str | Path) -> None:
        self._source = Source(path, settle=False)
        if isinstance(self._source.outcome, Refused):
            raise self._source.outcome.error
        super().__init__(path, self._source.outcome)

    def poll(self) -> Change | None:
        """Look at the file once: the change that took effect, or None where nothing did (then see ``rejected``)."""
        if not self._source.poll():
            return None
        outcome, pool = self._source.outcome, self._current[0].pool
        if isinstance(outcome, Loaded) and outcome.policy.pool != pool:
            outcome = Refused(_renamed(pool, outcome), outcome.text)
        if isinstance(outcome, Refused):
            self.refuse(outcome)
            return None
        return self.accept(outcome)


@dataclass(frozen=True)
class SetChange:
    """What one poll of a `PolicySet` brought: the pools concerned, and what is refused now and was not before."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    rejected: tuple[PolicyError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.rejected)


class Member(Followed):
    """One pool of a `PolicySet`; `poll` puts into force what the set has found since, in the file ``holder``."""

    def __init__(self, path: Path, loaded: Loaded) -> None:
        super().__init__(path, loaded)
        self.holder = path
        self._found: tuple[Loaded | Refused, Refused | None] | None = None

    def offer(self, path: Path, outcome: Loaded | Refused, besides: Refused | None = None) -> bool:
        """Keep ``outcome`` of the file at ``path`` for the next poll; ``besides`` is what another file wanted.

        Returns whether there is a new policy in it.
        """
        self.holder = path
        self._found = (outcome, besides)
        return isinstance(outcome, Loaded) and revision_of(outcome.text) != self._current[1]

    def poll(self) -> Change | None:
        """The change that takes effect now, or None where nothing does (then see ``rejected``)."""
        if self._found is None:
            return None
        (outcome, besides), self._found = self._found, None
        self.path = self.holder
        if isinstance(outcome, Refused):
            self.refuse(outcome)
            return None
        before = (self.rejected, self.rejected_text, self.rejected_revision)
        change = self.accept(outcome)
        if besides is not None:
            self.rejected, self.rejected_text, self.rejected_revision = before
            self.refuse(besides)
        return change


class PolicySet:
    """Follows policy files and directories of them, one policy per pool.

    ``files`` has what is in force by pool; ``rejected`` says by file why it is not used. A bad file leaves the last
    good policy of its pool in force, at the start the one that ``known`` has; PolicyError is raised where there is none
    at all. A file that is gone from a directory takes its pool with it, one that was named stays. Of two files for one
    pool the one in force stays, and neither counts where none is. A file cannot change its pool while no other file
    takes that over. Whatever changes counts once two readings in a row agree.

    ``known`` gives the newest accepted policy of every pool, newest first, and is asked only where a file is bad.
    """

    def __init__(self, paths: Iterable[str | Path], known: Callable[[], Iterable[Accepted]] = tuple) -> None:
        self._paths = _distinct(Path(path) for path in paths)
        self._directories = {path for path in self._paths if path.is_dir()}
        self.files: dict[str, Member] = {}
        self.rejected: dict[str, PolicyError] = {}
        self._listed = self._list(())
        self._new: dict[Path, Source] = {}
        self._sources = {path: Source(path) for path in self._listed}
        self._recall(known)
        self._assign()
        if not self.files:
            where = ", ".join(map(str, self._paths))
            raise next(iter(self.rejected.values()), PolicyError("no policy files (*.yaml) here", path=where))

    def poll(self) -> SetChange:
        """Look at every file once; then each of ``files`` is polled for what is new in it."""
        before = self._listed
        self._listed = self._list(before)
        changed = [source.poll() for source in self._sources.values()]
        for path, source in list(self._new.items()):
            source.poll()
            if source.settled:
                self._sources[path] = self._new.pop(path)
                changed.append(True)
        for path in self._listed:
            if path not in self._sources and path not in self._new:
                self._new[path] = Source(path)
        for known in (self._sources, self._new):
            for path in [path for path in known if path not in self._listed and path not in before]:
                del known[path]
                changed.append(True)
        return self._assign() if any(changed) else SetChange()

    def _recall(self, known: Callable[[], Iterable[Accepted]]) -> None:
        """Put in force again what bad files had before, and of two files for one pool the one that had it."""
        outcomes = {path: source.outcome for path, source in self._sources.items()}
        claims = Counter(o.policy.pool for o in outcomes.values() if isinstance(o, Loaded))
        if len(claims) == claims.total() == len(outcomes):
            return
        accepted = list(known())
        for path, outcome in outcomes.items():
            if isinstance(outcome, Refused):
                loaded = recall(path, outcome.text, accepted)
            elif claims[outcome.policy.pool] > 1:
                of_it = (a for a in accepted if a.pool == outcome.policy.pool and same(a.source, path))
                loaded = recall(path, outcome.text, of_it)
            else:
                continue
            if loaded is not None and (isinstance(outcome, Loaded) or not claims[loaded.policy.pool]):
                self.files.setdefault(loaded.policy.pool, Member(path, loaded))

    def _list(self, before: tuple[Path, ...]) -> tuple[Path, ...]:
        found: list[Path] = []
        for path in self._paths:
            try:
                found += policy_files(path) if path in self._directories else [path]
            except OSError:  # the directory is away; what it held stays
                found += [known for known in before if known.parent == path]
        return _distinct(found)

    def _assign(self) -> SetChange:
        """Give each pool its file, and every other file a reason."""
        claims: dict[str, list[Path]] = {}
        rejected: dict[str, Refused] = {}
        for path, source in self._sources.items():
            if isinstance(source.outcome, Loaded):
                claims.setdefault(source.outcome.policy.pool, []).append(path)
            else:
                rejected[str(path)] = source.outcome
        for pool, member in self.files.items():
            outcome = self._sources[member.holder].outcome if member.holder in self._sources else None
            if pool not in claims and isinstance(outcome, Loaded):
                claims[outcome.policy.pool].remove(member.holder)
                rejected[str(member.holder)] = Refused(_renamed(pool, outcome), outcome.text)
        besides: dict[str, Refused] = {}
        for pool, paths in claims.items():
            holder = self.files[pool].holder if pool in self.files else None
            if len(paths) > 1:
                for path in [p for p in paths if p != holder]:
                    other = next(p for p in (holder, *paths) if p in paths and p != path)
                    besides[pool] = rejected[str(path)] = self._second(pool, path, other)
                claims[pool] = [p for p in paths if p == holder]
        return self._settle({pool: paths[0] for pool, paths in claims.items() if paths}, rejected, besides)

    def _settle(self, owners: dict[str, Path], rejected: dict[str, Refused], besides: dict[str, Refused]) -> SetChange:
        added, removed, changed = [], [], []
        for pool, member in list(self.files.items()):
            path = owners.get(pool, member.holder)
            if pool not in owners and path not in self._sources:
                del self.files[pool]
                removed.append(pool)
            else:
                outcome = self._sources[path].outcome if pool in owners else rejected[str(path)]
                if member.offer(path, outcome, besides.get(pool)):
                    changed.append(pool)
        for pool, path in owners.items():
            outcome = self._sources[path].outcome
            if pool not in self.files and isinstance(outcome, Loaded):
                self.files[pool] = Member(path, outcome)
                added.append(pool)
        known = {str(error) for error in self.rejected.values()}
        self.rejected = {path: refused.error for path, refused in rejected.items()}
        new = tuple(error for error in self.rejected.values() if str(error) not in known)
        return SetChange(tuple(added), tuple(removed), tuple(changed), new)

    def _second(self, pool: str, path: Path, other: Path) -> Refused:
        outcome = self._sources[path].outcome
        file, line = outcome.pool_at if isinstance(outcome, Loaded) else (str(path), 1)
        message = f"pool {pool!r} has a policy already, in {other}; one policy governs a pool"
        return Refused(PolicyError(message, path=file, line=line, key="pool"), outcome.text)


def policy_files(path: str | Path) -> list[Path]:
    """The policy files at ``path``: itself, or the ``*.yaml`` and ``*.yml`` of a directory by name.

    Names that begin with ``.`` or ``_`` are none: parents, and the entries behind a mounted ConfigMap.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.iterdir()
        if file.suffix in (".yaml", ".yml") and not file.name.startswith((".", "_")) and not file.is_dir()
    )


def _distinct(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple({os.path.normpath(path.absolute()): path for path in paths}.values())


def _renamed(pool: str, loaded: Loaded) -> PolicyError:
    path, line = loaded.pool_at
    message = f"a file keeps its pool, which is {pool!r}; write a file of its own for pool {loaded.policy.pool!r}"
    return PolicyError(message, path=path, line=line, key="pool")


def _read(name: str) -> str | _Unreadable:
    try:
        return read_text(name)
    except PolicyError as e:
        return _Unreadable(e.message)


def revision_of(text: str) -> str:
    """SHA-256 of a policy text in hexadecimal; comments count, since the text is what history keeps."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
