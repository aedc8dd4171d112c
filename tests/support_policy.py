"""A pool's history made by playing the real controller against a simulated pool for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.simulation.document import parse_scenario
from controller.simulation.pilot import Pilot
from controller.simulation.plant import ORIGIN, LeaseStore, Plant
from controller.steer import ClassSteer
from controller.views import point_of
from storage.history import History, Point
from storage.records import Decision, ForkRecord, QualityScore, RequestRecord

POLICY = """\
version: lenity/v1
pool: sim
objective: {metric: correct, max_loss: 5%, window: 30m}
alerts: {page: [{long: 5m, short: 1m, budget: 20%}]}
leniency: {rules: [token_v3]}
evidence: {label_deadline: 2m, min_labels: 80}
block: {max: 8}
"""
SCENARIO = """\
about: An ordinary pool with a scorer, whose loss per touch rises late in the hour
duration: 1h
tick: 15s
ttl: 45s
plant:
  rate: 4
  kinds: {chat: {tokens: 60, acceptance: 0.7}}
  quality: {loss_per_touch: LOSS}
policy:
"""
CHECKS = '\nchecks:\n  - {quantity: theta, min: [0, null], why: "it must be something"}\n'


@dataclass
class Played:
    """What one played pool left behind, tick by tick."""

    ticks: list[tuple[float, list[Any], Decision, Point]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def save(self, history: History, source: str) -> None:
        """Put all of it into a history, as the loop does."""
        pool, first = "sim", self.ticks[0][0]
        epoch = history.claim_epoch(pool, "test", first)
        history.add_policy_revision(pool, POLICY, "a" * 64, source, first, accepted=True, error=None)
        for now, records, decision, point in self.ticks:
            kinds = {
                name: [r for r in records if isinstance(r, kind)]
                for name, kind in (("requests", RequestRecord), ("forks", ForkRecord), ("scores", QualityScore))
            }
            history.save_tick(pool, epoch, now, decisions=[decision], points=[point], **kinds)
        history.save_tick(pool, epoch, self.ticks[-1][0], snapshot=self.state)


def play(minutes: float, loss: str = "0.005", policy: str = POLICY) -> Played:
    """Play ``minutes`` of traffic under ``policy``; ``loss`` is the loss per touch, a number or a scenario's signal."""
    indented = "".join(f"  {line}\n" for line in policy.splitlines())
    scenario = parse_scenario(SCENARIO.replace("LOSS", loss) + indented + CHECKS)
    plant = Plant(scenario.plant, "sim", "correct", 1, Path())
    pilot = Pilot(scenario.first_policy, ttl=scenario.ttl, half_life_rounds=4000.0, meter_s=90.0)
    store, played = LeaseStore(), Played()
    for i in range(round(minutes * 60 / scenario.tick)):
        t, until = i * scenario.tick, (i + 1) * scenario.tick
        records, _ = plant.step(t, until, store)
        decision = pilot.tick(ORIGIN + until, records)
        store.write(decision.lease, until)
        played.ticks.append((ORIGIN + until, records, decision, point_of(pilot.steer, decision, ORIGIN + until)))
    played.state = state_of(pilot.steer, pilot, played.ticks[-1][0])
    return played


def state_of(steer: ClassSteer, pilot: Pilot, now: float) -> dict[str, Any]:
    """The state as `controller.loop.PoolLoop.to_state` saves it, in what matters here."""
    costs = pilot.costs.to_state()
    return {"time": now, "g_max": pilot.policy.block.max, "costs": costs, "classes": {"default": steer.to_state()}}
