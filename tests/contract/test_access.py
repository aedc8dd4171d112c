"""Who may do what on the stream server: real users with the documented rules, and encrypted connections."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import trustme

from storage.access import ACL_RULES
from storage.embedded import EmbeddedServer
from storage.errors import StorageError
from storage.seats import SeatStore
from storage.stream import LeaseStore, StreamReader, StreamWriter, connect, lease_key, telemetry_key
from tests.support import wait_until
from tests.support_storage import a_block, a_lease, a_score


@pytest.fixture
def as_role(client: redis.Redis, stream_server: EmbeddedServer) -> Iterator[Callable[[str], redis.Redis]]:
    """A connection of a user with a role's documented rules, by URL."""
    made = []

    def connected(role: str) -> redis.Redis:
        client.execute_command("ACL", "SETUSER", f"lenity-{role}", "on", ">s3cret/word", *ACL_RULES[role].split())
        path = stream_server.url.removeprefix("unix://")
        made.append(connect(f"unix://lenity-{role}:s3cret%2Fword@{path}", name=f"lenity-{role}"))
        return made[-1]

    yield connected
    for connection in made:
        connection.close()
    client.execute_command("ACL", "DELUSER", *(f"lenity-{role}" for role in ACL_RULES))


def test_a_worker_sends_telemetry_and_reads_leases_and_nothing_else(
    as_role: Callable[[str], redis.Redis], client: redis.Redis, pool: str
) -> None:
    """It cannot write or end a lease, nor read or remove what was sent."""
    worker = as_role("worker")
    LeaseStore(client).write(a_lease(pool))
    assert StreamWriter(worker, pool).append([a_block(pool)]) == 1
    found = LeaseStore(worker).read(pool, "default")
    assert found is not None
    assert found[0] == a_lease(pool)
    with pytest.raises(StorageError):
        LeaseStore(worker).write(a_lease(pool, seq=2))
    forbidden: list[Callable[[], object]] = [
        lambda: worker.set(lease_key(pool, "default"), "{}"),
        lambda: worker.delete(lease_key(pool, "default")),
        lambda: worker.eval("return redis.call('DEL', KEYS[1])", 1, lease_key(pool, "default")),
        lambda: worker.xadd(lease_key(pool, "other"), {"a": "b"}),
        lambda: worker.get(f"lenity:{{{pool}}}:leader"),
        lambda: worker.xrange(telemetry_key(pool)),
        lambda: worker.xtrim(telemetry_key(pool), maxlen=0),
        lambda: worker.delete(telemetry_key(pool)),
        worker.flushall,
        lambda: worker.get("another-program"),
    ]
    for attempt in forbidden:
        with pytest.raises(redis.ResponseError, match=r"(?i)permission|NOPERM"):
            attempt()
    assert LeaseStore(client).read(pool, "default") is not None
    assert client.xlen(telemetry_key(pool)) == 1


def test_a_controller_can_do_all_that_it_does(
    as_role: Callable[[str], redis.Redis], client: redis.Redis, pool: str
) -> None:
    """Everything that the reader, the leases and leadership need, pending entries of others included."""
    controller = as_role("controller")
    writer, reader = StreamWriter(client, pool), StreamReader(controller, pool, keep_s=0.0)
    assert reader.read() == []
    client.xreadgroup("controller", "gone", {telemetry_key(pool): ">"}, count=1)
    writer.append([a_block(pool, seq=n) for n in range(3)])
    client.xreadgroup("controller", "gone", {telemetry_key(pool): ">"}, count=1)
    successor = StreamReader(controller, pool, keep_s=0.0)
    entries = [*successor.read(), *successor.read()]
    assert len(entries) == 3
    successor.resume_from("0-1")
    successor.dead_letter(entries[0][0], entries[0][1], "for the test")
    successor.ack([entry_id for entry_id, _ in entries])
    assert successor.lag() == 0
    store = LeaseStore(controller)
    store.write(a_lease(pool))
    assert store.read(pool, "default") is not None
    assert store.fence(pool, "default") == (1, 1)
    seats = SeatStore(controller)
    assert seats.acquire(pool, "c1", 5.0)
    assert seats.attend(pool, "c1", 5.0, epoch=3).epoch == 3
    assert seats.take_turn(pool, 3600.0)
    seats.release(pool, "c1", 5.0)
    seats.leave(pool, "c1")
    with pytest.raises(redis.ResponseError, match=r"(?i)permission|NOPERM"):
        controller.get("another-program")
    with pytest.raises(redis.ResponseError, match=r"(?i)permission|NOPERM"):
        controller.flushall()


def test_a_scorer_sends_labels_only(as_role: Callable[[str], redis.Redis], client: redis.Redis, pool: str) -> None:
    """It reads no lease and no telemetry."""
    scorer = as_role("scorer")
    assert StreamWriter(scorer, pool).append([a_score(pool)]) == 1
    for attempt in (lambda: scorer.get(lease_key(pool, "default")), lambda: scorer.xrange(telemetry_key(pool))):
        with pytest.raises(redis.ResponseError, match=r"(?i)permission|NOPERM"):
            attempt()


def test_the_rules_are_documented_as_they_are() -> None:
    """To be copied from the page."""
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    for role, rules in ACL_RULES.items():
        assert f"ACL SETUSER lenity-{role} on >PASSWORD {rules}\n" in page


def test_a_wrong_password_is_an_error_that_does_not_tell_it(
    as_role: Callable[[str], redis.Redis], stream_server: EmbeddedServer
) -> None:
    """Named as such, at the first use."""
    as_role("worker")
    path = stream_server.url.removeprefix("unix://")
    wrong = connect(f"unix://lenity-worker:guess@{path}")
    with pytest.raises(StorageError, match=r"(?i)password|WRONGPASS") as caught:
        LeaseStore(wrong).read("p", "default")
    assert "guess" not in str(caught.value)
    wrong.close()


@pytest.mark.peer("redis-server")
def test_an_encrypted_connection_checks_the_certificate(tmp_path: Path) -> None:
    """`rediss://` with a given authority works; without it the server is refused."""
    authority, port = trustme.CA(), _free_port()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    options = {"port": "0", "tls-port": str(port), "bind": "127.0.0.1", "save": "", "tls-auth-clients": "no"}
    options |= {"tls-cert-file": "cert.pem", "tls-key-file": "key.pem", "tls-ca-cert-file": "ca.pem"}
    command = [str(shutil.which("redis-server")), *(part for k, v in options.items() for part in (f"--{k}", v))]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server:
        try:
            trusted = connect(f"rediss://localhost:{port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}")

            def answers() -> bool:
                try:
                    return StreamWriter(trusted, "p").append([a_score("p")]) == 1
                except StorageError:
                    return False

            wait_until(answers)
            trusted.close()
            with pytest.raises(StorageError, match=r"(?i)certificate"):
                StreamWriter(connect(f"valkeys://localhost:{port}"), "p").append([a_score("p")])
        finally:
            server.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
