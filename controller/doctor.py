"""`lenity doctor`: looks at everything a controller depends on, changes nothing, and says what to fix.

Each check looks at one thing and gives findings; one that cannot look for lack of rights says so and warns. The
thresholds are here, the wording too; the commands print them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import redis
from sqlalchemy import text

from policies.errors import LenityError
from policies.load import load_policy
from policies.model import Policy
from policies.reload import policy_files
from storage import upkeep
from storage.connection import connect, epoch_key, leader_key, telemetry_key
from storage.database import Database
from storage.errors import StorageError
from storage.history import History
from storage.leases import LeaseStore

Status = Literal["ok", "warn", "fail"]

OLDEST_SERVER = {"redis": (7, 0), "valkey": (8, 0)}
CLOCK_WARN_S, CLOCK_FAIL_S = 2.0, 120.0
MEMORY_WARN = 0.8
DISK_WARN_BYTES, DISK_FAIL_BYTES = 2 << 30, 200 << 20
FULL_WARN_DAYS = 30.0


@dataclass(frozen=True)
class Finding:
    """What one check found of one thing; `fix` says what to do unless the status is ok."""

    check: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Patient:
    """Where everything is. Without a spool, the one beside a SQLite database; no controller is asked without a URL."""

    redis_url: str
    database_url: str
    policies: tuple[Path, ...] = ()
    controller_url: str | None = None
    spool: Path | None = None


def examine(patient: Patient, wall: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Every finding, in the order in which one thing depends on another. Raises nothing for what is broken outside."""
    policies = yield from _policies(patient.policies)
    client = yield from _stream(patient.redis_url, wall)
    history = yield from _database(patient.database_url, wall)
    if history is not None:
        yield from _leadership(history, client, policies)
        history.close()
    if client is not None:
        client.close()
    yield from _spool(patient)
    if patient.controller_url is not None:
        yield from _controller(patient.controller_url)


# -- policies ----------------------------------------------------------------------------------------------------------


def _policies(paths: tuple[Path, ...]) -> Generator[Finding, None, dict[str, Policy]]:
    """Every file loads, and no pool has two."""
    found: dict[str, Policy] = {}
    for path in paths:
        try:
            files = policy_files(path)
        except OSError as e:
            yield Finding("policy", "fail", f"{path}: {e.strerror}", "give a policy file or a directory of them")
            continue
        if not files:
            yield Finding("policy", "warn", f"{path} holds no *.yaml", "put a policy there, or leave the path out")
        for file in files:
            try:
                policy = load_policy(file)
            except LenityError as e:
                yield Finding("policy", "fail", str(e), "correct the file; `lenity policy validate` lists every fault")
                continue
            if policy.pool in found:
                fix = "keep one policy for a pool"
                yield Finding("policy", "fail", f"{file}: pool {policy.pool!r} has a policy already", fix)
                continue
            found[policy.pool] = policy
            yield Finding("policy", "ok", f"{file}: good (pool {policy.pool})")
    return found


# -- stream server -----------------------------------------------------------------------------------------------------


def _stream(url: str, wall: Callable[[], float]) -> Generator[Finding, None, redis.Redis | None]:
    try:
        client = connect(url, name="lenity-doctor")
        client.ping()
    except (StorageError, redis.RedisError) as e:
        yield Finding("stream", "fail", f"no answer: {e}", "start the stream server, or correct --redis-url")
        return None
    yield Finding("stream", "ok", "reachable")
    info = _ask(client.info)
    if info is None:
        fix = "run the doctor as a user that may call INFO, to have version, memory and persistence looked at"
        yield Finding("stream server", "warn", "this user may not call INFO", fix)
    else:
        yield _version(info)
        yield _memory(info)
        yield _persistence(info, _ask(lambda: cast("dict[str, str]", client.config_get("save"))))
    yield from _rights(client, guarded=url.startswith("unix:"))
    before = wall()
    answer = _ask(client.time)
    if answer is not None:
        yield _clock("stream clock", answer[0] + answer[1] / 1e6, before, wall())
    return client


def _ask(call: Callable[[], Any]) -> Any:
    """The answer, None when the user has no right to ask or the server does not know the question."""
    try:
        return call()
    except redis.RedisError:
        return None


def _version(info: Mapping[str, Any]) -> Finding:
    name = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{name}_version", "0"))
    parts = tuple(int(p) for p in version.split(".")[:2] if p.isdigit())
    least = OLDEST_SERVER[name]
    if parts < least:
        fix = f"use Redis {OLDEST_SERVER['redis'][0]} or Valkey {OLDEST_SERVER['valkey'][0]}, or newer"
        return Finding("stream server", "fail", f"{name} {version} is too old", fix)
    return Finding("stream server", "ok", f"{name} {version}")


def _memory(info: Mapping[str, Any]) -> Finding:
    """Evicting would drop telemetry that nobody read, and leases."""
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if limit and policy != "noeviction":
        detail = f"maxmemory-policy {policy} drops leases and telemetry when memory is full"
        return Finding(
            "stream memory", "fail", detail, "set maxmemory-policy noeviction; streams have caps of their own"
        )
    if limit and used > MEMORY_WARN * limit:
        detail = f"{used / 1e6:.0f} of {limit / 1e6:.0f} MB are used; when it is full, workers drop telemetry"
        return Finding("stream memory", "warn", detail, "raise maxmemory, or look for a pool that no controller reads")
    return Finding(
        "stream memory", "ok", f"{used / 1e6:.0f} MB used, {f'{limit / 1e6:.0f} MB' if limit else 'no'} limit"
    )


def _persistence(info: Mapping[str, Any], save: Mapping[str, str] | None) -> Finding:
    if info.get("rdb_last_bgsave_status", "ok") != "ok" or info.get("aof_last_write_status", "ok") != "ok":
        fix = "look into the server's log; its disk may be full"
        return Finding(
            "stream persistence", "fail", "the server could not write its data to disk and may refuse writes", fix
        )
    if not int(info.get("aof_enabled", 0)) and save is not None and not save.get("save"):
        detail = "off: a restart of the stream server loses telemetry that was not read yet"
        return Finding("stream persistence", "warn", detail, "set appendonly yes (appendfsync everysec is enough)")
    return Finding("stream persistence", "ok", "append-only file" if int(info.get("aof_enabled", 0)) else "snapshots")


# What a controller asks; each of these changes nothing.
_NEEDED: tuple[tuple[str, ...], ...] = (
    ("EVAL", "return 1", "0"),
    ("XPENDING", telemetry_key("lenity-doctor"), "doctor"),
    ("XRANGE", telemetry_key("lenity-doctor"), "-", "+", "COUNT", "1"),
    ("HMGET", leader_key("lenity-doctor"), "holder"),
    ("GET", epoch_key("lenity-doctor")),
    ("TIME",),
)


def _rights(client: redis.Redis, *, guarded: bool) -> Iterator[Finding]:
    """Whether this user may do a controller's work, and whether others may do it without a password."""
    denied = []
    for command in _NEEDED:
        try:
            client.execute_command(*command)  # type: ignore[no-untyped-call]
        except redis.exceptions.NoPermissionError:
            denied.append(command[0])
        except redis.RedisError:  # no such group, which is all that was asked
            continue
    if denied:
        detail = f"this user may not call {', '.join(denied)}"
        yield Finding("stream rights", "fail", detail, "give it the controller's rules (docs/scaling.md)")
    else:
        yield Finding("stream rights", "ok", "this user may do a controller's work")
    default = _ask(lambda: cast("dict[str, Any]", client.acl_getuser("default")))
    if default is not None and not guarded:
        flags = [f.decode() if isinstance(f, bytes) else str(f) for f in default.get("flags", ())]
        if "on" in flags and "nopass" in flags:
            detail = "whoever reaches the stream server may write leases: its default user has no password"
            yield Finding("stream access", "warn", detail, "give each role a user of its own (docs/scaling.md)")


# -- database ----------------------------------------------------------------------------------------------------------


def _database(url: str, wall: Callable[[], float]) -> Generator[Finding, None, History | None]:
    try:
        history = History(url)
    except StorageError as e:
        yield Finding("database", "fail", str(e), "correct --database")
        return None
    finding = _schema(history)
    yield finding
    if finding.status != "ok":
        history.close()
        return None
    try:
        yield _size(upkeep.size(history.database, details=False), upkeep.growth(history.database, wall()))
        if not history.database.sqlite:
            before = wall()
            with history.database.reading("read the database's clock") as connection:
                there = connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()
            yield _clock("database clock", float(there), before, wall())
    except StorageError as e:
        yield Finding("database size", "warn", str(e), "look at the database's load and its log")
    return history


def _schema(history: History) -> Finding:
    path = history.database.path
    if path is not None and not path.exists():
        fix = "run `lenity db upgrade`, or start the controller once"
        return Finding("database", "fail", f"{path} does not exist", fix)
    try:
        schema = history.schema_status()
    except StorageError as e:
        return Finding("database", "fail", str(e), "start the database, or correct --database")
    if schema.state == "current":
        return Finding("database", "ok", f"{history.database}: {schema}")
    newer = schema.state == "newer"
    fix = "run the newer program" if newer else "run `lenity db upgrade`, or start the new controller"
    return Finding("database", "fail", f"{history.database}: {schema}", fix)


def _size(found: upkeep.Size, growth: float) -> Finding:
    detail = f"{found.bytes / 1e6:.0f} MB, requests bring {growth / 1e6:.1f} MB a day"
    if found.unused is not None and found.unused > max(100e6, found.bytes / 2):
        fix = "stop the controller and run `lenity db vacuum`"
        return Finding("database size", "warn", f"{detail}; {found.unused / 1e6:.0f} MB of it are unused", fix)
    if found.disk_free is None:
        return Finding("database size", "ok", detail)
    days = found.disk_free / growth if growth else float("inf")
    detail += f", {found.disk_free / 1e9:.1f} GB of disk are free"
    if found.disk_free < DISK_FAIL_BYTES:
        return Finding("database size", "fail", detail, "make room on the disk of the database")
    if days < FULL_WARN_DAYS or found.disk_free < DISK_WARN_BYTES:
        return Finding("database size", "warn", f"{detail}: full in {days:.0f} days", "make room, or use shorter ages")
    return Finding("database size", "ok", detail)


def _clock(check: str, there: float, before: float, after: float) -> Finding:
    """The other side's time lies between ours before and after asking, or it is off by the rest."""
    off = max(before - there, there - after, 0.0)
    if off > CLOCK_WARN_S:
        status: Status = "fail" if off > CLOCK_FAIL_S else "warn"
        return Finding(check, status, f"{off:.1f} s away from this machine's", "synchronize the clocks (NTP)")
    return Finding(check, "ok", f"within {max(off, after - before):.2f} s of this machine's")


# -- leadership --------------------------------------------------------------------------------------------------------


def _leadership(history: History, client: redis.Redis | None, policies: Mapping[str, Policy]) -> Iterator[Finding]:
    """For each pool: who leads, and whether database and stream server agree on the epoch."""
    try:
        for pool, policy in sorted(policies.items()):
            yield _epochs(history, client, pool, policy)
    except (StorageError, redis.RedisError) as e:
        yield Finding("leadership", "warn", str(e), "look again when stream server and database are well")


def _epochs(history: History, client: redis.Redis | None, pool: str, policy: Policy) -> Finding:
    check, epoch = f"leadership of {pool}", history.current_epoch(pool) or 0
    if client is None:
        return Finding(check, "warn", f"epoch {epoch} in the database", "look again when the stream server answers")
    store = LeaseStore(client)
    fences = [store.fence(pool, cls) for cls in ("default", *policy.classes)]
    fenced = max((fence[0] for fence in fences if fence is not None), default=0)
    holder, held = cast("list[bytes | None]", client.hmget(leader_key(pool), "holder", "epoch"))
    if max(fenced, int(held or 0)) > epoch:
        detail = f"leases of epoch {max(fenced, int(held or 0))} were written, the database knows only {epoch}"
        fix = "this is not the database that they were written with, or an old backup of it: use the right one"
        return Finding(check, "fail", detail, fix)
    if not holder:
        fix = "start a controller; until then its workers are lossless"
        return Finding(check, "warn", f"nobody leads; the last epoch was {epoch}", fix)
    if int(held or 0) not in (0, epoch):
        fix = "look again in a minute; if it stays, restart that controller"
        return Finding(
            check, "warn", f"{holder.decode()} leads under epoch {int(held or 0)}, the newest is {epoch}", fix
        )
    return Finding(check, "ok", f"{holder.decode()} leads under epoch {epoch}; last lease of epoch {fenced}")


# -- the machine and the controller ------------------------------------------------------------------------------------


def _spool(patient: Patient) -> Iterator[Finding]:
    """Room for the spool, and ticks that wait in it."""
    root = patient.spool
    if root is None:
        try:
            path = Database(patient.database_url).path
        except StorageError:
            return
        root = Path("lenity-spool") if path is None else path.with_name(path.name + ".spool")
    existing = next(p for p in (root, *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    waiting = sum(file.stat().st_size for file in root.rglob("*.ticks")) if root.exists() else 0
    if free < DISK_FAIL_BYTES:
        fix = f"make room on the disk of {existing}, or choose another with --spool"
        yield Finding("spool", "fail", f"{free / 1e6:.0f} MB of disk are free", fix)
    elif waiting:
        fix = "they are saved when the controller reaches its database; start it if it does not run"
        yield Finding("spool", "warn", f"{waiting / 1e6:.1f} MB of ticks wait in {root}", fix)
    else:
        yield Finding("spool", "ok", f"empty, {free / 1e9:.1f} GB of disk are free")


def _controller(url: str) -> Iterator[Finding]:
    try:
        answer = httpx.get(url.rstrip("/") + "/readyz", timeout=5.0)
        reasons = [] if answer.is_success else list(answer.json().get("reasons", ()))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError) as e:
        yield Finding("controller", "warn", f"no answer at {url}: {e}", "start `lenity controller`, or correct --url")
        return
    if answer.is_success:
        yield Finding("controller", "ok", f"{url} is ready")
        return
    detail = "; ".join(map(str, reasons)) or f"answers {answer.status_code}"
    yield Finding("controller", "fail", f"not ready: {detail}", "see the other findings and the controller's log")
