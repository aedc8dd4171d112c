#!/bin/sh
# Makes the secrets of compose.yaml once, into ops/compose/secrets (or the directory given): random, never overwritten.
set -eu

directory=${1:-$(dirname "$0")/secrets}
if [ -e "$directory/valkey_users" ]; then
    echo "$directory has secrets already; delete the directory for new ones" >&2
    exit 1
fi
mkdir -p "$directory"
chmod 700 "$directory" # whoever may enter may read: the containers run as users of their own

random() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
digest() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }

controller=$(random)
worker=$(random)
database=$(random)
operator=$(random)

# Users of the stream server, with the rights of storage/access.py (and for workers what steers the demo's traffic):
# workers append telemetry and read leases, and cannot write a lease. Without a password one can only ask for life signs.
cat >"$directory/valkey_users" <<ACL
user default on nopass resetkeys resetchannels -@all +ping
user controller on #$(digest "$controller") resetkeys resetchannels -@all ~lenity:* +xadd +xreadgroup +xack +xclaim +xpending +xrange +xtrim +xgroup|create +xgroup|delconsumer +xinfo|stream +xinfo|groups +xinfo|consumers +eval +get +set +del +pttl +pexpire +hmget +hset +zadd +zrange +zrem +zremrangebyscore +time +multi +exec +ping +select +client|setname
user worker on #$(digest "$worker") resetkeys resetchannels -@all %W~lenity:*:telemetry %R~lenity:*:lease:* +xadd +get +pttl +multi +exec +ping +select +client|setname %R~lenity:*:demo +hgetall
ACL

printf 'redis://controller:%s@valkey:6379/0\n' "$controller" >"$directory/redis_url_controller"
printf 'redis://worker:%s@valkey:6379/0\n' "$worker" >"$directory/redis_url_worker"
printf '%s\n' "$database" >"$directory/postgres_password"
printf 'postgresql://lenity:%s@postgres/lenity\n' "$database" >"$directory/database_url"
printf 'operator operator %s\n' "$operator" >"$directory/api_tokens"
printf '%s\n' "$operator" >"$directory/operator_token" # for people: lenity freeze POOL --token-file ...
random >"$directory/grafana_password"
chmod 644 "$directory"/*

echo "secrets are in $directory; the token for freeze, resume and lossless is in operator_token"
