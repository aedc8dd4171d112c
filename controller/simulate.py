"""Play a scenario: the real controller in a closed loop with a simulated pool, under simulated time.

    run = simulate(load_scenario("tests/scenarios/iid.yaml"))
    run.passed, run.verdicts, run.series["g"]

Nothing sleeps and nothing is random beyond the scenario's seed, so a run is repeated exactly. See `docs/simulate.md`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from controller.simulation.document import Event, Scenario, ScenarioError, load_scenario, parse_scenario
from controller.simulation.judge import Verdict, judge
from controller.simulation.pilot import Pilot
from controller.simulation.plant import ORIGIN, LeaseStore, Plant, Tick
from controller.simulation.signals import inside
from policies.errors import PolicyError
from policies.load import parse_policy
from storage.records import Decision, Record, from_fields, to_fields

__all__ = [
    "Run",
    "Scenario",
    "ScenarioError",
    "command",
    "load_scenario",
    "parse_scenario",
    "scenario_files",
    "simulate",
]

BUDGET_ALERTS = ("LenityBudgetBurn", "LenityBudgetExhausted")
SIGNALS = ("draft", "cost", "mix", "quality")  # what the controller says has changed
_TRUTH = (
    "requests", "leased", "tokens", "rounds", "seconds", "plain_seconds", "drafted", "examined", "accepted",
    "touches", "touched", "forks", "loss", "reported",
)  # fmt: skip


@dataclass
class Run:
    """A played scenario: per-tick series (by quantity, see `controller.simulation.judge`), verdicts and timing."""

    scenario: Scenario
    series: dict[str, npt.NDArray[Any]]
    verdicts: list[Verdict]
    cpu_s: float
    seed: int
    refused_policies: list[str] = field(default_factory=list)
    duplicates: int = 0

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(v.passed for v in self.verdicts)

    @property
    def as_expected(self) -> bool:
        """Whether the outcome is the one the scenario announces; a known gap may also have been closed."""
        return {"pass": self.passed, "fail": not self.passed, "known_gap": True}[self.scenario.expect]

    @property
    def outcome(self) -> str:
        """One word or two: what came out, against what was expected."""
        if self.scenario.expect == "known_gap":
            return "gap closed" if self.passed else "known gap"
        if self.scenario.expect == "fail":
            return "passes, but must fail" if self.passed else "fails as it must"
        return "passes" if self.passed else "fails"

    @property
    def alert_times(self) -> list[tuple[float, float]]:
        """When any budget alert fired, as (begin, end) in seconds."""
        firing = (self.series["alert.any"] > 0).astype(int)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], firing, [0]))))
        times = np.append(self.series["time"], self.scenario.duration)
        return [(float(times[a]), float(times[b])) for a, b in edges.reshape(-1, 2)]

    def to_json(self) -> dict[str, Any]:
        """Verdicts and timing, JSON-able."""
        return {
            "scenario": self.scenario.name,
            "about": self.scenario.about,
            "seed": self.seed,
            "expect": self.scenario.expect,
            "reason": self.scenario.reason,
            "outcome": self.outcome,
            "as_expected": self.as_expected,
            "simulated_s": self.scenario.duration,
            "cpu_s": round(self.cpu_s, 3),
            "simulated_per_cpu": round(self.scenario.duration / max(self.cpu_s, 1e-9), 1),
            "requests": int(self.series["requests"].sum()),
            "checks": [v.to_json() for v in self.verdicts],
        }


class _Recorder:
    """Collects the series, tick by tick."""

    def __init__(self, window_s: float):
        self.columns: dict[str, list[Any]] = {}
        self._window_s = window_s
        self._window: deque[tuple[float, float, float]] = deque()
        self._sums = np.zeros(2)

    def add(self, t: float, tick: Tick, decision: Decision, pilot: Pilot, *, probing: bool, alive: bool) -> None:
        """One tick that ended at ``t``; while it was ``probing`` it has no chosen knobs."""
        knobs, allowance = tick.knobs, pilot.steer.allowance
        assert allowance is not None
        row: dict[str, Any] = {"time": t, "rows": float(tick.rows)}
        row |= {name: tick.sums.get(name, 0.0) for name in _TRUTH}
        row["probe"] = float(probing)
        chosen = {"g": np.nan, "plain": np.nan, "theta": np.nan, "rho": np.nan, "lenient": np.nan}
        if knobs is not None and not probing:
            chosen |= {"g": knobs.g, "plain": knobs.g == 0, "theta": knobs.theta, "rho": knobs.rho}
            chosen["lenient"] = knobs.lenient
        row |= {name: float(value) for name, value in chosen.items()}
        row["window_loss"] = self._over_window(t, row["loss"], row["requests"])
        row["state"], row["reason"] = decision.state, decision.reason
        row["alive"] = float(alive)
        acceptance = pilot.steer.estimator.acceptance
        row["rounds_effective"] = pilot.steer.estimator.rounds_effective
        row["acceptance"] = np.nan if acceptance is None else acceptance
        for name in (
            "tau_allowed",
            "d_allowed",
            "u_kappa",
            "tau_seen",
            "mean_length",
            "spent",
            "spent_upper",
            "budget",
        ):
            row[name] = float(getattr(allowance, name))
        row["remaining"], row["fork"] = allowance.remaining, allowance.fork
        row["labelled"], row["max_loss"] = float(allowance.forks_matured), pilot.steer.policy.max_loss
        row["evidence_epoch"] = float(allowance.evidence_epoch)
        solution = pilot.steer.solution
        row["predicted_speed"] = np.nan if solution is None else solution.speedup_plain
        row["held"] = float(decision.state == "breached")
        row["spent_rate"] = allowance.tau_allowed * allowance.u_kappa
        alarms = [alarm["signal"] for alarm in decision.estimates.get("detected", ())] if alive else []
        row |= {f"detected.{signal}": float(alarms.count(signal)) for signal in SIGNALS}
        row |= {f"alert.{a.name}": float(a.firing) for a in allowance.alerts}
        row["alert.any"] = float(any(a.firing for a in allowance.alerts if a.name in BUDGET_ALERTS))
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)

    def series(self) -> dict[str, npt.NDArray[Any]]:
        """The columns as arrays."""
        return {name: np.array(values) for name, values in self.columns.items()}

    def _over_window(self, t: float, loss: float, requests: float) -> float:
        self._window.append((t, loss, requests))
        self._sums += (loss, requests)
        while self._window[0][0] <= t - self._window_s:
            _, gone, left = self._window.popleft()
            self._sums -= (gone, left)
        return float(self._sums[0] / self._sums[1]) if self._sums[1] > 0.5 else 0.0


def simulate(scenario: Scenario, *, seed: int | None = None, wire: bool = False) -> Run:
    """Play a scenario to its end and judge it.

    ``seed`` replaces the scenario's own. ``wire`` sends every record through its stream encoding and the checks that
    readers make (slower). Raises ValueError for a recording that cannot be used.
    """
    seed = scenario.seed if seed is None else seed
    began = time.process_time()
    policy = scenario.first_policy
    of_class = policy.for_class("default")
    plant = Plant(scenario.plant, policy.pool, of_class.metric, seed, Path(scenario.path).parent)
    pilot = Pilot(
        policy, ttl=scenario.ttl, half_life_rounds=scenario.half_life_rounds, meter_s=max(10.0, 3 * scenario.tick)
    )
    store, recorder = LeaseStore(), _Recorder(of_class.window_s)
    waiting: list[Record] = []
    refused: list[str] = []
    events = deque(sorted(scenario.events, key=lambda e: e.at))
    document, snapshot, decision, was_down = scenario.policy, "", None, False
    for i in range(max(1, round(scenario.duration / scenario.tick))):
        t, until = i * scenario.tick, (i + 1) * scenario.tick
        while events and events[0].at <= t:
            document = _happen(events.popleft(), scenario, document, plant, pilot, t, refused)
        arrived, tick = plant.step(t, until, store)
        waiting += [from_fields(to_fields(r)) for r in arrived] if wire else arrived
        probing = decision is not None and bool(decision.estimates.get("probe"))
        down = inside(scenario.plant.links.controller_down, t)
        if down and not was_down:
            snapshot = pilot.snapshot(ORIGIN + t)
        elif was_down and not down:
            pilot.restart(snapshot, ORIGIN + t)
        was_down = down
        if not down:
            decision = pilot.tick(ORIGIN + until, waiting)
            waiting = []
            store.write(decision.lease, until)
        if decision is not None:
            recorder.add(until, tick, decision, pilot, probing=probing, alive=not down)
    series = recorder.series()
    cpu_s = time.process_time() - began
    return Run(scenario, series, judge(scenario, series), cpu_s, seed, refused, pilot.duplicates)


def _happen(
    event: Event, scenario: Scenario, document: dict[str, Any], plant: Plant, pilot: Pilot, t: float, refused: list[str]
) -> dict[str, Any]:
    """Let an event happen; returns the policy document that is in force afterwards."""
    if event.restart is not None:
        plant.restart(event.restart)
        return document
    edited = _merged(document, event.policy or {})
    try:
        pilot.edit(parse_policy(yaml.safe_dump(edited, sort_keys=False), f"{scenario.path} at {t:g} s"), ORIGIN + t)
    except PolicyError as e:  # as in the loop: the last good one stays active
        refused.append(str(e))
        return document
    return edited


def _merged(document: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(document)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def scenario_files(path: Path) -> list[Path]:
    """The scenario file at ``path``, or the *.yaml files of that directory in order; raises ScenarioError if none."""
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise ScenarioError("no *.yaml files here", path=str(path))
    return files


def command(path: Path, *, plot: Path | None = None, as_json: bool = False, seed: int | None = None) -> int:
    """What `lenity simulate` does: play, report, plot; returns 0 only if every outcome is the announced one."""
    from controller.simulation.plot import plot_run

    runs: list[Run] = []
    many = path.is_dir()
    for run in _played(path, seed):
        runs.append(run)
        if plot is not None:
            plot_run(run, plot / f"{run.scenario.name}.png" if many else plot)
        if not as_json:
            sys.stdout.write("\n".join(_report(run, verbose=not many or not run.as_expected)) + "\n")
            sys.stdout.flush()
    if as_json:
        results = [run.to_json() for run in runs]
        sys.stdout.write(json.dumps(results if many else results[0]) + "\n")
    return 0 if all(run.as_expected for run in runs) else 1


def _played(path: Path, seed: int | None) -> Iterator[Run]:
    for file in scenario_files(path):
        yield simulate(load_scenario(file), seed=seed)


def _report(run: Run, *, verbose: bool) -> list[str]:
    per_cpu = run.scenario.duration / max(run.cpu_s, 1e-9)
    hours = run.scenario.duration / 3600
    lines = [f"{run.scenario.name}: {run.outcome} ({hours:.3g} h in {run.cpu_s:.1f} s, {per_cpu:,.0f}x)"]
    if run.scenario.reason is not None:
        lines.append(f"  {run.scenario.expect}: {run.scenario.reason}")
    for v in run.verdicts:
        if verbose or not v.passed:
            c = v.check
            when = "" if c.during is None else f" in {c.during[0]:g}-{c.during[1]:g} s"
            allowed = ", ".join("-" if a is None else str(a) for a in c.allowed)
            mark = "ok  " if v.passed else "FAIL"
            lines.append(f"  {mark} {c.quantity} {c.how}{when} in [{allowed}]: {v.detail} ({c.why})")
    lines += [f"  policy refused: {text}" for text in run.refused_policies]
    return lines
