"""The controller as a process: it starts, serves, follows its policies, and ends cleanly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from controller.loop import LoopConfig
from controller.service import Service, ServiceConfig, spool_directory
from storage.embedded import EmbeddedServer
from storage.errors import StorageError
from storage.history import History
from storage.records import OperatorAction
from storage.stream import LeaseStore, StreamWriter, connect
from tests.support import wait_until
from tests.support_control import POLICY
from tests.support_storage import a_request


@pytest.fixture
def config(valkey: EmbeddedServer, tmp_path: Path) -> Iterator[ServiceConfig]:
    """Two pools in a directory."""
    for pool in ("one", "two"):
        (tmp_path / f"{pool}.yaml").write_text(POLICY.format(pool=f"service-{pool}"))
    yield ServiceConfig(valkey.url, f"sqlite:///{tmp_path / 'h.db'}", (tmp_path,), loop=LoopConfig(ttl_s=60.0))
    client = connect(valkey.url)
    client.delete(*client.keys("lenity:{service-*"))
    client.close()


@pytest.fixture
def service(config: ServiceConfig) -> Iterator[Service]:
    """Ticked by hand."""
    made = Service(config)
    yield made
    made.close()


@pytest.fixture
def log_output() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries  # type: ignore[misc]


def leading(service: Service) -> list[str]:
    return [loop.pool for loop in service.loops]


def test_every_pool_of_a_directory_is_led(service: Service) -> None:
    """The second one a tick later."""
    wait_until(lambda: service.tick(100.0) or len(leading(service)) == 2)  # type: ignore[func-returns-value]
    service.ticker.run_once()
    assert service.ready() == (True, [])


def test_pools_come_and_go_with_their_files(service: Service, tmp_path: Path) -> None:
    """While running; a bad file is said and harms nobody."""
    wait_until(lambda: service.tick(100.0) or len(leading(service)) == 2)  # type: ignore[func-returns-value]
    (tmp_path / "three.yaml").write_text(POLICY.format(pool="service-three"))
    (tmp_path / "bad.yaml").write_text("pool: [")
    wait_until(lambda: service.tick(101.0) or "service-three" in leading(service))  # type: ignore[func-returns-value]
    assert "bad.yaml" in str(service.ready()[1])
    (tmp_path / "one.yaml").unlink()
    wait_until(lambda: service.tick(102.0) or "service-one" not in leading(service))  # type: ignore[func-returns-value]
    assert [view.pool for view in service.board.pools()] == ["service-three", "service-two"]


def test_one_pool_that_fails_does_not_hold_up_the_others(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick counts as failed, and the others have ticked."""
    wait_until(lambda: service.tick(100.0) or len(leading(service)) == 2)  # type: ignore[func-returns-value]

    def fail(now: float, **how: Any) -> None:
        raise ZeroDivisionError("bad block")

    monkeypatch.setattr(service.runners["service-one"], "tick", fail)
    with pytest.raises(RuntimeError, match="service-one: ZeroDivisionError"):
        service.tick(200.0)
    view = service.board.pool("service-two")
    assert view is not None
    assert view.time == 200.0


def test_a_restart_with_bad_policies_goes_on_with_the_last_good_ones(
    config: ServiceConfig, tmp_path: Path, log_output: list[Any]
) -> None:
    """From the database, by pool or, where the file names none, by file; what is refused is said everywhere."""
    service = Service(config)
    now = service.clock.now()
    wait_until(lambda: service.tick(now) or len(leading(service)) == 2)  # type: ignore[func-returns-value]
    before = {loop.pool: loop.revision for loop in service.loops}
    service.close()
    (tmp_path / "one.yaml").write_text(POLICY.format(pool="service-one").replace("max_loss: 0.2", "max_los: 0.3"))
    (tmp_path / "two.yaml").write_text("pool: [")
    (tmp_path / "new.yaml").write_text("version: lenity/v1\npool: service-new\n")
    again = Service(config)
    try:
        wait_until(lambda: again.tick(now + 1) or len(leading(again)) == 2)  # type: ignore[func-returns-value]
        again.tick(now + 2)
        assert {loop.pool: loop.revision for loop in again.loops} == before, "no new revision is made of it"
        assert {loop.policy.objective.max_loss for loop in again.loops} == {0.2}
        api = TestClient(again.app, base_url="http://127.0.0.1")
        for pool, file, words in (("one", "one.yaml:3: objective.max_los", "unknown key"), ("two", "two.yaml:1", "")):
            view = again.board.pool(f"service-{pool}")
            assert view is not None and view.policy_rejected is not None
            assert file in view.policy_rejected and words in view.policy_rejected
            told = api.get(f"/v1/pools/service-{pool}/policy").json()
            assert (told["active"]["revision"], told["rejection"]) == (before[view.pool], view.policy_rejected)
            assert told["rejected"]["error"] == view.policy_rejected
            assert f'lenity_policy_rejected{{pool="service-{pool}"}} 1.0' in api.get("/metrics").text
            refused = [e for e in log_output if e["event"].startswith("policy edit refused") and e["pool"] == view.pool]
            assert len(refused) == 1
        assert "lenity_policy_files_rejected 1.0" in api.get("/metrics").text, "the one without a past"
        for pool, file in (("one", "one.yaml"), ("two", "two.yaml")):
            good = POLICY.format(pool=f"service-{pool}").replace("max_loss: 0.2", "max_loss: 0.1")
            (tmp_path / file).write_text(good)
        for later in (3, 4, 5):
            again.tick(now + later)
        assert {loop.policy.objective.max_loss for loop in again.loops} == {0.1}
        assert all(view.policy_rejected is None for view in again.board.pools())
    finally:
        again.close()


def test_lossless_can_be_forced_while_the_database_is_away(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that leads; what needs a record is refused, and so is a pool that is led elsewhere."""
    wait_until(lambda: service.tick(100.0) or len(leading(service)) == 2)  # type: ignore[func-returns-value]

    def away(*args: Any, **values: Any) -> Any:
        raise StorageError("connection refused")

    monkeypatch.setattr(service.history, "add_operator_action", away)
    order = OperatorAction(0, "service-one", "*", "lossless", None, "ada", "a drill", 101.0)
    assert service.act(order)
    assert not service.act(replace(order, action="reset_budget"))
    assert not service.act(replace(order, pool="elsewhere"))
    service.tick(102.0)
    assert [order.action for order in service.runners["service-one"].loop.orders.standing] == ["lossless"]  # type: ignore[union-attr]


def test_two_controllers_on_a_machine_have_spools_of_their_own(tmp_path: Path) -> None:
    """And after a restart the same ones again; one that cannot be written is named."""
    first, lock = spool_directory(tmp_path, "host:1")
    second, other = spool_directory(tmp_path, "host:1")
    assert first != second
    lock.close()
    other.close()
    again, lock = spool_directory(tmp_path, "host:1")
    lock.close()
    assert again == first
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="spool"):
        spool_directory(tmp_path / "file", "host")


# -- as a process ------------------------------------------------------------------------------------------------------

MAIN = """
import sys
from pathlib import Path
from controller.loop import LoopConfig
from controller.service import Service, ServiceConfig
redis_url, database, policies, port = sys.argv[1:5]
service = Service(ServiceConfig(redis_url, database, (Path(policies),), port=int(port), loop=LoopConfig(0.05, 2.0)))
sys.exit(service.run())
"""


def ask(port: int, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        with e:
            return json.load(e)
    except OSError:
        return None


def test_sigterm_during_a_write_ends_the_process_cleanly(tmp_path: Path) -> None:
    """Another program holds the database's write lock: the process ends in time, and nothing is lost."""
    (tmp_path / "policy.yaml").write_text(POLICY.format(pool="p"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free_port = probe.getsockname()[1]
    url, database = f"sqlite:///{tmp_path / 'h.db'}", tmp_path / "h.db"
    with EmbeddedServer(tmp_path / "stream") as server:
        arguments = [server.url, url, str(tmp_path / "policy.yaml"), str(free_port)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen([sys.executable, "-c", MAIN, *arguments], env=environment) as process:
            try:
                wait_until(lambda: (ask(free_port, "/readyz") or {}).get("ok"), timeout=60)
                client = connect(server.url)
                history = History(url)
                release, held = threading.Event(), threading.Event()

                def hold() -> None:
                    with history.transaction():
                        held.set()
                        release.wait(60)

                holder = threading.Thread(target=hold)
                holder.start()
                assert held.wait(10)
                StreamWriter(client, "p").append([a_request("p", f"r{i}") for i in range(20)])
                wait_until(lambda: (ask(free_port, "/readyz") or {}).get("ok") is False, timeout=30)
                assert LeaseStore(client).read("p", "default") is not None, "leases go on"
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
                release.set()
                holder.join()
                assert client.xpending("lenity:{p}:telemetry", "controller")["pending"] in (0, 20)  # type: ignore[index]
                client.close()
                history.close()
            finally:
                process.kill()
        assert database.exists()
        successor = ServiceConfig(server.url, url, (tmp_path / "policy.yaml",), loop=LoopConfig(0.05, 2.0))
        service = Service(successor)
        wait_until(lambda: service.tick(service.clock.now()) or service.loops)  # type: ignore[func-returns-value]
        service.tick(service.clock.now())
        assert service.history.requests_between("p", 0, 1e11)["requests"] == 20
        service.close()
    assert len(database.read_bytes()) > 0
