"""Leases: the controller writes them by compare-and-set, workers read them with the time they have left."""

from __future__ import annotations

from typing import Any, cast

import redis

from storage.connection import attempt, fence_key, lease_key
from storage.errors import LeaseRefused, SampleError
from storage.records import Lease

FENCE_TTL_S = 30 * 86400

# A lease is written only when its (epoch, seq) is newer than any before. Writing the newest one again changes nothing
# and is no error, so that a write whose reply was lost can be tried again without extending the lease.
_WRITE_LEASE = """
local fence = redis.call('HMGET', KEYS[2], 'epoch', 'seq')
local epoch, seq = tonumber(fence[1] or '-1'), tonumber(fence[2] or '-1')
local new_epoch, new_seq = tonumber(ARGV[1]), tonumber(ARGV[2])
if new_epoch < epoch or (new_epoch == epoch and new_seq <= seq) then
  if new_epoch == epoch and new_seq == seq and redis.call('GET', KEYS[1]) == ARGV[3] then return {1, epoch, seq} end
  return {0, epoch, seq}
end
redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'seq', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
return {1, new_epoch, new_seq}
"""


class LeaseStore:
    """The current lease of each class: the controller writes, workers read."""

    def __init__(self, client: redis.Redis):
        self._client = client

    def write(self, lease: Lease) -> None:
        """Make `lease` the current one for its ttl. Raises LeaseRefused when its (epoch, seq) is not newer than every
        lease before it, expired ones included; StorageError when the server cannot be asked."""
        ttl_ms = int(lease.ttl * 1000)
        if ttl_ms < 1:
            raise ValueError(f"lease ttl must be at least a millisecond, not {lease.ttl} s")
        keys = (lease_key(lease.pool, lease.traffic_class), fence_key(lease.pool, lease.traffic_class))
        args = (lease.epoch, lease.seq, lease.to_json(), ttl_ms, max(FENCE_TTL_S * 1000, 2 * ttl_ms))
        reply = cast(
            "list[int]",
            attempt(lambda: self._client.eval(_WRITE_LEASE, 2, *keys, *cast("tuple[Any, ...]", args)), keys[0]),
        )
        if not reply[0]:
            raise LeaseRefused(
                f"lease {(lease.epoch, lease.seq)} of {lease.pool}/{lease.traffic_class} refused: "
                f"{(reply[1], reply[2])} was leased before"
            )

    def read(self, pool: str, traffic_class: str) -> tuple[Lease, float] | None:
        """The current lease and the seconds that the store says are left of it, read at one instant; None when there is
        none. Raises SampleError for a lease that cannot be understood, StorageError when the server cannot be asked."""
        key = lease_key(pool, traffic_class)

        def ask() -> list[Any]:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.get(key)
                pipe.pttl(key)
                return pipe.execute()

        text, left_ms = attempt(ask, key)
        if text is None or left_ms <= 0:  # a lease without an end (-1) is not one that we wrote
            return None
        lease = Lease.from_json(text)
        if (lease.pool, lease.traffic_class) != (pool, traffic_class):
            raise SampleError(f"lease: {key} holds the lease of {lease.pool!r}/{lease.traffic_class!r}"[:300])
        return lease, min(left_ms / 1000, lease.ttl)

    def fence(self, pool: str, traffic_class: str) -> tuple[int, int] | None:
        """The newest (epoch, seq) ever leased, None when none is remembered."""
        key = fence_key(pool, traffic_class)
        epoch, seq = cast("list[bytes | None]", attempt(lambda: self._client.hmget(key, "epoch", "seq"), key))
        return None if epoch is None or seq is None else (int(epoch), int(seq))
