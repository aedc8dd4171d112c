"""What each role may do on the stream server, as access rules of Redis and Valkey. docs/scaling.md shows them.

    ACL SETUSER lenity-worker on >PASSWORD <rules>

A worker appends telemetry and reads leases: it can neither write a lease nor read what others have sent.
"""

from __future__ import annotations

_CONNECT = "+ping +select +client|setname"

ACL_RULES = {
    "worker": (
        f"resetkeys resetchannels -@all %W~lenity:*:telemetry %R~lenity:*:lease:* "
        f"+xadd +get +pttl +multi +exec {_CONNECT}"
    ),
    "controller": (
        "resetkeys resetchannels -@all ~lenity:* "
        "+xadd +xreadgroup +xack +xclaim +xpending +xrange +xtrim +xgroup|create +xgroup|delconsumer "
        "+xinfo|stream +xinfo|groups +xinfo|consumers "
        "+eval +get +set +del +pttl +pexpire +hmget +hset +zadd +zrange +zrem +zremrangebyscore +time "
        f"+multi +exec {_CONNECT}"
    ),
    "scorer": f"resetkeys resetchannels -@all %W~lenity:*:telemetry +xadd +multi +exec {_CONNECT}",
}
