"""The error tree.

    LenityError
    ├── PolicyError(path, line, key)   a policy document that cannot be used; the last good one stays active
    ├── SampleError                    an entry from outside that is malformed, non-finite or out of range
    ├── SolveError
    │   ├── Infeasible                 no setting satisfies the constraint
    │   └── TooFewSamples              the estimate cannot carry an answer yet
    ├── StorageError                   stream, lease or database refused or unreachable
    └── ModelError                     a model, tokenizer or drafter that cannot be used as asked

Misuse of a function is ``ValueError``. `storage` imports nothing of ours and defines `StorageError` and `SampleError`
itself (`storage.errors`); catch those there.
"""

from __future__ import annotations


class LenityError(Exception):
    """Base of every error that Lenity raises on purpose."""


class PolicyError(LenityError):
    """A policy document that cannot be used: says which file, line and key, what is wrong and what to do."""

    def __init__(self, message: str, *, path: str = "<policy>", line: int | None = None, key: str | None = None):
        self.message, self.path, self.line, self.key = message, path, line, key
        where = path if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {key}: {message}" if key else f"{where}: {message}")


class SolveError(LenityError):
    """The solver has no answer."""


class Infeasible(SolveError):
    """No block length and knob satisfy the constraint."""


class TooFewSamples(SolveError):
    """There is not enough evidence for an answer."""


class ModelError(LenityError):
    """A model, tokenizer or drafter cannot be used as asked."""
