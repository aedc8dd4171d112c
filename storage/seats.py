"""Who leads a pool, as the stream server knows it: a heartbeat, the controllers that wait beside it, and turns of jobs.

The heartbeat only says when it is worth while to claim a pool, and keeps two from claiming at once. What keeps two from
steering is the epoch (storage.leader): it is claimed in the database and checked by every write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import redis

from storage.connection import attempt, epoch_key, leader_key, members_key, turn_key
from storage.leases import FENCE_TTL_S

# Register as a member; with an epoch that is not older than the heartbeat's, or as its holder, renew it.
_ATTEND = """
local name, ttl, epoch = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZADD', KEYS[3], now + ttl, name)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
redis.call('PEXPIRE', KEYS[3], 4 * ttl)
local seat = redis.call('HMGET', KEYS[1], 'holder', 'epoch')
local highest = tonumber(redis.call('GET', KEYS[2]) or '0')
local held = tonumber(seat[2] or '0')
if epoch > 0 and epoch >= highest and (not seat[1] or held < epoch or seat[1] == name) then
  redis.call('HSET', KEYS[1], 'holder', name, 'epoch', epoch)
  redis.call('PEXPIRE', KEYS[1], ttl)
  redis.call('SET', KEYS[2], epoch, 'PX', ARGV[4])
  seat, highest = {name, epoch}, epoch
elseif seat[1] == name then
  redis.call('PEXPIRE', KEYS[1], ttl)
end
return {seat[1], tonumber(seat[2] or '0'), highest, redis.call('ZRANGE', KEYS[3], 0, -1)}
"""

# Take an empty or vacated seat, one's own, or that of a holder known to be gone.
_ACQUIRE = """
local holder = redis.call('HMGET', KEYS[1], 'holder')[1]
if holder and holder ~= '' and holder ~= ARGV[1] and holder ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', 0)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

_RELEASE = """
if redis.call('HMGET', KEYS[1], 'holder')[1] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'holder', '')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

# A turn is a period of the server's clock; whoever asks first has it.
_TURN = """
local turn = math.floor(redis.call('TIME')[1] / tonumber(ARGV[1]))
if tonumber(redis.call('GET', KEYS[1]) or '-1') >= turn then return 0 end
redis.call('SET', KEYS[1], turn, 'PX', ARGV[2])
return 1
"""


@dataclass(frozen=True)
class Seat:
    """A pool's heartbeat: who holds it (None: nobody, "": its holder left) under which epoch (0: about to claim one),
    the highest epoch that ever beat, and the controllers that are there for the pool, holder included."""

    holder: str | None
    epoch: int
    highest: int
    members: tuple[str, ...]


class SeatStore:
    """Heartbeats and turns on a stream server. Every method raises StorageError when it cannot be asked."""

    def __init__(self, client: redis.Redis):
        self._client = client

    def attend(self, pool: str, name: str, ttl_s: float, epoch: int = 0) -> Seat:
        """Be a member for `ttl_s` seconds, and with an `epoch` hold the heartbeat as long; how the seat stands then."""
        keys = (leader_key(pool), epoch_key(pool), members_key(pool))
        reply = self._eval(_ATTEND, keys, name, int(ttl_s * 1000), epoch, int(FENCE_TTL_S * 1000))
        holder, held, highest, members = reply
        return Seat(
            None if holder is None else holder.decode(),
            int(held),
            int(highest),
            tuple(sorted(m.decode() for m in members)),
        )

    def acquire(self, pool: str, name: str, ttl_s: float, instead_of: str | None = None) -> bool:
        """Take the seat before claiming an epoch; False while another has it. `instead_of`: one known to be gone."""
        args = (name, int(ttl_s * 1000), instead_of or name)
        return bool(self._eval(_ACQUIRE, (leader_key(pool),), *args))

    def release(self, pool: str, name: str, ttl_s: float) -> None:
        """Vacate the seat, so that another need not wait until the heartbeat ends."""
        self._eval(_RELEASE, (leader_key(pool),), name, int(ttl_s * 1000))

    def leave(self, pool: str, name: str) -> None:
        """Be no member any more."""
        attempt(lambda: self._client.zrem(members_key(pool), name), members_key(pool))

    def take_turn(self, job: str, period_s: float) -> bool:
        """Whether this caller is the first of all controllers to ask for the job in this period of the server's clock,
        which is at least a second."""
        period = max(1, int(period_s))
        return bool(self._eval(_TURN, (turn_key(job),), period, 2000 * period))

    def _eval(self, script: str, keys: tuple[str, ...], *args: Any) -> Any:
        return attempt(lambda: self._client.eval(script, len(keys), *keys, *cast("Any", args)), keys[0])
