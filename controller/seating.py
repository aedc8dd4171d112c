"""When a controller claims a pool and when it hands one over; what the stream server says and the time are arguments.

A controller waits beside the leader until the heartbeat has been gone for half its length, so that a server that was
emptied does not look like a leader that died: taking over takes at most 1.5 lengths of the heartbeat and one look. Of
several controllers each pool prefers one (rendezvous hashing: adding or removing a controller moves only the pools that
it gains or had); the others wait longer in the order of preference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from storage.seats import Seat

ABSENT_SHARE = 0.5  # of the heartbeat's length that it must be gone
SETTLED_TTLS = 2.0  # heartbeats for which the same controllers must have been there before a pool moves


def seat_name(place: str, process: int, token: str) -> str:
    """The name of a controller: where it runs (or how it was called), its process id, and something unique."""
    return f"{place}:{process}:{token}"


def place_of(name: str) -> str:
    """The part of a name that outlives a restart."""
    return name.rsplit(":", 2)[0]


def is_predecessor(holder: str, me: str, running: Callable[[int], bool]) -> bool:
    """Whether `holder` is surely gone: it ran at the same place, as a process that is this one or not running."""
    parts = holder.rsplit(":", 2)
    if len(parts) != 3 or holder == me or parts[0] != place_of(me) or not parts[1].isdigit():
        return False
    return parts[1] == me.rsplit(":", 2)[1] or not running(int(parts[1]))


def preference(pool: str, members: tuple[str, ...]) -> list[str]:
    """The members in the order in which the pool prefers them; a member that restarts keeps its place."""

    def weight(member: str) -> tuple[bytes, bytes]:
        return _digest(pool, place_of(member)), _digest(pool, member)

    return sorted(members, key=weight, reverse=True)


class Watch:
    """One pool, as a controller that does not lead it sees it."""

    def __init__(self, pool: str, me: str, ttl_s: float):
        self._pool, self._me, self._ttl = pool, me, ttl_s
        self._gone_since: float | None = None
        self._ever_led = False

    def may_claim(self, seat: Seat, now: float) -> bool:
        """Whether to claim the pool now, from how its seat stands; call at each look, at least every `ttl_s` / 4."""
        self._ever_led = self._ever_led or seat.highest > 0
        if seat.holder:
            self._gone_since = None
            return seat.holder == self._me
        self._gone_since = now if self._gone_since is None else self._gone_since
        order = preference(self._pool, seat.members)
        rank = order.index(self._me) if self._me in order else len(order)
        if rank == 0 and (seat.holder is not None or not self._ever_led):
            return True  # vacated for us, or nobody ever led it
        return now - self._gone_since >= self._ttl * (ABSENT_SHARE + rank)

    def lost_sight(self) -> None:
        """The server could not be asked: what was seen before does not count."""
        self._gone_since = None


class Settled:
    """Whether the same controllers have been there for long enough that a pool may move to the one that it prefers."""

    def __init__(self, pool: str, me: str, ttl_s: float):
        self._pool, self._me, self._ttl = pool, me, ttl_s
        self._members: tuple[str, ...] = ()
        self._since = 0.0

    def should_move(self, seat: Seat, now: float) -> bool:
        """Whether the leader should hand the pool over to another member."""
        if seat.members != self._members:
            self._members, self._since = seat.members, now
        if now - self._since < SETTLED_TTLS * self._ttl:
            return False
        return preference(self._pool, seat.members)[:1] not in ([], [self._me])


def _digest(pool: str, member: str) -> bytes:
    return hashlib.blake2b(f"{pool}|{member}".encode(), digest_size=8).digest()
