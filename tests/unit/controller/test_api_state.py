"""What the API says of the present: leases, estimates, budgets, and reasons in sentences."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from controller.view import AlertView, Estimate
from controller.why import ADVICE, explain
from storage.records import Lease
from tests.support_api import CLASS, NOW, POOL, ApiWorld
from tests.support_storage import a_lease


@pytest.fixture
def world() -> ApiWorld:
    world = ApiWorld()
    code = replace(CLASS, traffic_class="code", max_loss=0.0, state="disabled", reason="disabled", theta=0.0)
    shown = replace(
        CLASS,
        lease=a_lease("demo"),
        estimates={"loss": Estimate(value=0.001, high=0.003)},
        positions=(0.9, 0.8),
        frontier=((0.0, 1.8), (0.01, 2.0)),
    )
    world.board.publish(replace(POOL, classes=(shown, code)))
    return world


def test_leases_come_as_workers_get_them(world: ApiWorld) -> None:
    """Whole, so that a worker's knobs can be compared with them."""
    (lease,) = world.get("/v1/pools/demo/leases").json()
    assert Lease.from_json(json.dumps(lease)) == a_lease("demo")
    assert world.get("/v1/pools/demo/leases?class=code").json() == []


def test_estimates_come_with_intervals(world: ApiWorld) -> None:
    first, _ = world.get("/v1/pools/demo/estimates").json()
    assert first["estimates"]["loss"] == {"value": 0.001, "low": None, "high": 0.003}
    assert first["positions"] == [0.9, 0.8]
    assert first["frontier"] == [[0.0, 1.8], [0.01, 2.0]]


def test_a_budget_says_what_is_left(world: ApiWorld) -> None:
    (budget,) = world.get("/v1/pools/demo/budget?class=default").json()
    assert (budget["remaining"], budget["spent_upper"], budget["budget"], budget["window_s"]) == (0.72, 2.8, 10, 86_400)


def test_what_is_not_there_is_named(world: ApiWorld) -> None:
    for what in ("leases", "estimates", "budget", "why"):
        assert world.get(f"/v1/pools/nope/{what}").status_code == 404
        assert world.get(f"/v1/pools/demo/{what}?class=chat").status_code == 404


def test_reasons_do_not_need_the_history(world: ApiWorld) -> None:
    """The newest view says most of it."""
    world.history.broken = True
    first, second = world.get("/v1/pools/demo/why").json()
    assert first["headline"] == "demo / default decodes lenient: measured, steady."
    assert first["sentences"][0] == CLASS.explanation
    assert second["headline"] == "demo / code decodes lossless: disabled, disabled."
    assert second["advice"] == "Raise max_loss in the policy to allow leniency."


def test_numbers_stand_in_sentences() -> None:
    """Budget, evidence, knobs and alerts, each once."""
    alert = AlertView(name="LenityBudgetBurn", firing=True, detail="burning 16 times the plan.")
    view = replace(CLASS, alerts=(alert,), reason="fast_burn", state="breached", theta=0.0, mu=None, u_kappa=1.0)
    why = explain("demo", view, None, NOW)
    text = " ".join(why.sentences)
    for words in (
        "72.0% of the error budget is left: at most 2.80 of 10.00 requests' worth of quality are spent in the window",
        "without enough compared answers every touch counts as a loss",
        "drafts 5 tokens with theta 0 (mu ∞, rho 1, rule token_v3), predicted 2.13× as fast as plain decoding",
        "Alert LenityBudgetBurn: burning 16 times the plan.",
    ):
        assert words in text
    assert why.headline == "demo / default decodes lossless: breached, fast burn."
    assert why.advice == ADVICE["fast_burn"]
    plain = explain("demo", replace(view, g=0, predicted_speedup_plain=None), None, NOW)
    assert "decodes plain" in plain.headline
    assert "its speed is not known yet" in " ".join(plain.sentences)
