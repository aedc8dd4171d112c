"""How the stream server is reached: connections, key names, and what may be tried twice.

Whatever the server or the network does arrives as StorageError; the next call connects anew. Every key has a length cap
or a ttl.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from storage.errors import StorageError

T = TypeVar("T")

SOCKET_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 1.0
_ATTEMPTS = 2
_RETRY_PAUSE_S = 0.05


def connect(url: str, *, name: str = "lenity") -> redis.Redis:
    """A client for `redis://`, `rediss://` (TLS), `unix://` or the same with `valkey`; connects on first use.

    Replies stay bytes. Timeouts are short and the client itself tries nothing twice: whether a repeat is safe depends
    on the command, so the classes below decide. Raises StorageError when the URL cannot be used.
    """
    try:
        return redis.Redis.from_url(
            re.sub(r"\Avalkey(s?)://", r"redis\1://", url),
            client_name=re.sub(r"[^!-~]", "-", name),
            decode_responses=False,
            protocol=2,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except (ValueError, redis.RedisError) as e:
        shown = re.sub(r"//[^/@]*@", "//***@", url)
        raise StorageError(f"stream server URL {shown!r}: {e}") from e


# The pool is in braces so that in a cluster all keys of a pool are on one node.
def telemetry_key(pool: str) -> str:
    """The stream of a pool's telemetry."""
    return f"lenity:{{{pool}}}:telemetry"


def dead_key(pool: str) -> str:
    """The stream of entries that were set aside."""
    return f"lenity:{{{pool}}}:dead"


def lease_key(pool: str, traffic_class: str) -> str:
    """The current lease of a class; workers may read it."""
    return f"lenity:{{{pool}}}:lease:{traffic_class}"


def fence_key(pool: str, traffic_class: str) -> str:
    """The highest (epoch, seq) leased for a class; it outlives the lease."""
    return f"lenity:{{{pool}}}:fence:{traffic_class}"


def leader_key(pool: str) -> str:
    """The heartbeat of the controller that leads a pool."""
    return f"lenity:{{{pool}}}:leader"


def epoch_key(pool: str) -> str:
    """The highest epoch that ever led a pool; it outlives the database."""
    return f"lenity:{{{pool}}}:epoch"


def members_key(pool: str) -> str:
    """The controllers that could lead a pool."""
    return f"lenity:{{{pool}}}:controllers"


def turn_key(job: str) -> str:
    """Which turn of a job was taken last."""
    return f"lenity:{{jobs}}:{job}"


def attempt(call: Callable[[], T], what: str) -> T:
    """Call; once more after a short pause when the connection failed. Only for what may safely be repeated."""
    for tries in range(_ATTEMPTS):
        try:
            return call()
        except (redis.ConnectionError, redis.TimeoutError) as e:
            if tries + 1 == _ATTEMPTS:
                raise StorageError(f"{what}: {e}") from e
            time.sleep(_RETRY_PAUSE_S)
        except redis.RedisError as e:
            raise StorageError(f"{what}: {e}") from e
    raise AssertionError("unreachable")
