"""A real Prometheus scrapes a running controller; a regression pages, and the page ends once leniency is gone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.simulation.document import PlantSpec, parse_scenario
from controller.simulation.plant import ORIGIN, LeaseStore, Plant
from policies.alerts import rules_yaml
from policies.load import load_policy
from storage.embedded import EmbeddedServer
from storage.leases import LeaseStore as Leases
from storage.records import Record
from storage.stream import StreamWriter, connect
from tests.support import wait_until
from tests.support_grafana import dashboards, queries

STEP_S = 0.2
LATE_S = 5.0  # so that it burns for longer than the controller needs to see it
# Everything in seconds: a rule that pages when 11% of a minute's budget goes within 6 s (a burn of 1.1).
POLICY = """\
version: lenity/v1
pool: sim
objective: {metric: correct, max_loss: 6%, window: 60s}
leniency: {rules: [token_v3]}
evidence: {label_deadline: 10s, min_labels: 60, fork_warm: 1, fork_passes_max: 5}
block: {max: 6, explore: 0.05}
pull_back: {start: 0.35, stop: 0.2, cooldown: 5s, max_step_up: 1}
alerts: {page: [{long: 6s, short: 3s, budget: 11%}]}
"""
SCENARIO = """\
about: A pool whose touches cost little until they cost nearly every answer
duration: 1h
tick: 10s
ttl: 30s
plant:
  rate: 60
  max_rows: 64
  kinds: {chat: {tokens: 40, acceptance: 0.7}}
  quality: {loss_per_touch: LOSS}
  labels: {delay: 100ms}
policy:
"""
CHECKS = '\nchecks:\n  - {quantity: theta, min: [0, null], why: "it must be something"}\n'


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def shifted(record: Record, by: float) -> Record:
    """``record`` with its Unix times moved, from the simulation's to ours."""
    times = {name: getattr(record, name) for name in ("started", "first_touch_at", "time") if name in names(record)}
    return replace(record, **{name: value + by for name, value in times.items() if value is not None})


def names(record: Record) -> set[str]:
    return {field.name for field in fields(record)}


@contextmanager
def running(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(15)


class Site:
    """A controller, Prometheus beside it, and traffic that this process makes."""

    def __init__(self, directory: Path, server: EmbeddedServer) -> None:
        self.policy = directory / "policy.yaml"
        self.policy.write_text(POLICY)
        self.port, self.prometheus = free_port(), free_port()
        rules = directory / "rules.yml"
        rules.write_text(rules_yaml([load_policy(self.policy)]).replace("interval: 1s", "interval: 250ms"))
        self.config = directory / "prometheus.yml"
        scrape = {"job_name": "controller", "static_configs": [{"targets": [f"127.0.0.1:{self.port}"]}]}
        every = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"}
        text = yaml.safe_dump({"global": every, "rule_files": [str(rules)], "scrape_configs": [scrape]})
        self.config.write_text(text)
        self._plant = Plant(self._spec("0.01"), "sim", "correct", 1, directory)
        client = connect(server.url)
        self._writer, self._leases, self._store = StreamWriter(client, "sim"), Leases(client), LeaseStore()
        self._t, self._began, self._late_until = 0.0, 0.0, 0.0

    def begin(self) -> None:
        """Let the traffic begin now."""
        self._began = time.time()

    @staticmethod
    def _spec(loss: str) -> PlantSpec:
        indented = "".join(f"  {line}\n" for line in POLICY.splitlines())
        return parse_scenario(SCENARIO.replace("LOSS", loss) + indented + CHECKS).plant

    def regress(self) -> None:
        """From now on nearly every touch costs the answer, and for some seconds workers see no newer lease."""
        self._plant.spec = self._spec("0.9")
        self._late_until = time.time() + LATE_S

    def serve(self) -> None:
        """Make the traffic of every step that is due; nothing before."""
        while time.time() - self._began >= self._t + STEP_S:
            found = self._leases.read("sim", "default") if time.time() >= self._late_until else None
            lease = self._store.lease if found is None else found[0]
            if lease is not None:
                self._store.write(lease, self._t)
            records, _ = self._plant.step(self._t, self._t + STEP_S, self._store)
            self._writer.append([shifted(r, self._began - ORIGIN) for r in records])
            self._t += STEP_S

    def ask(self, path: str, **query: str) -> Any:
        """What Prometheus answers; None while it is not up."""
        url = f"http://127.0.0.1:{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as e:
            if e.code == 503:  # it is starting
                return None
            raise AssertionError(f"{query}: {e.read().decode()}") from e
        except OSError:
            return None

    def firing(self, name: str) -> bool:
        """Whether Prometheus fires an alert now, with the traffic kept going."""
        self.serve()
        found = self.ask("query", query=f'ALERTS{{alertname="{name}", alertstate="firing"}}')
        return bool(found and found["result"])

    def state(self) -> Any:
        """What the controller says of the class, with the traffic kept going."""
        self.serve()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/pools/sim", timeout=10) as answer:
            [cls] = json.load(answer)["classes"]
        return cls

    def measured(self) -> bool:
        """Whether leniency is open on evidence, well above what is certified without."""
        cls = self.state()
        return bool(cls["forks_matured"] >= 60 and cls["theta"] > 0 and (cls["touches_per_request_seen"] or 0) > 0.5)


@pytest.mark.peer("prometheus")
def test_a_regression_fires_the_burn_alert_and_it_resolves(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "valkey") as server:
        site = Site(tmp_path, server)
        lenity = (sys.executable, "-m", "controller.cli", "controller", "--policy", str(site.policy))
        lenity += ("--redis-url", server.url, "--database", f"sqlite:///{tmp_path / 'h.db'}")
        lenity += ("--port", str(site.port), "--tick", "0.25", "--ttl", "2")
        prometheus = ("prometheus", f"--config.file={site.config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}")
        prometheus += (f"--web.listen-address=127.0.0.1:{site.prometheus}", "--log.level=warn")
        with running(*lenity, log=tmp_path / "lenity.log"), running(*prometheus, log=tmp_path / "prometheus.log"):
            leads = lambda: (site.ask("query", query="lenity_leader == 1") or {}).get("result")  # noqa: E731
            wait_until(leads, timeout=30, every=0.1)
            site.begin()
            wait_until(site.measured, timeout=60, every=0.1)
            site.regress()
            wait_until(lambda: site.firing("LenityBudgetBurn"), timeout=60, every=0.1)
            assert wait_until(lambda: site.state()["reason"] == "fast_burn", timeout=10, every=0.1), "as the page says"
            for name, dashboard in dashboards().items():
                for title, query in queries(dashboard, "sim", "default"):
                    assert site.ask("query", query=query) is not None, (name, title)
            wait_until(lambda: not site.firing("LenityBudgetBurn"), timeout=30, every=0.1)
            assert not site.firing("LenityControllerDown")
