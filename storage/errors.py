"""Errors of what outlives a process."""

from __future__ import annotations


class StorageError(Exception):
    """A stream, lease or database refused, or is unreachable."""


class SampleError(StorageError):
    """An entry from outside is malformed, non-finite or out of range; it belongs on the dead-letter stream."""


class LeaseRefused(StorageError):
    """A lease write lost its compare-and-set: somebody with a newer (epoch, seq) wrote first."""


class SchemaTooNew(StorageError):
    """The database was migrated by a newer program than this one."""


class RecordRefused(StorageError):
    """The database works and will never take this: a value out of its range, a broken constraint."""
