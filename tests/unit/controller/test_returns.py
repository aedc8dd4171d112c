"""When leniency comes back, in words: with the clock time where a cooldown runs, without conditions that are met."""

from __future__ import annotations

from typing import Any

import pytest

from controller.view import ClassView
from controller.why import Why, explain

NOW = 1_800_000_000.0  # 08:00:00 UTC
DECISION = {"inputs": {"policy": {"start": 0.2, "stop": 0.05, "cooldown_s": 1800.0}}, "unix_time": NOW}


def answer(reason: str, **values: Any) -> Why:
    view = ClassView(
        traffic_class="default", state="breached", reason=reason, explanation="", rule="token_v3", g=4, theta=0.0,
        rho=0.0, mu=None, lease_epoch=1, lease_seq=1, lease_ttl_s=5.0, max_loss=0.01, window_s=86400.0, **values,
    )  # fmt: skip
    return explain("p", view, DECISION, NOW)


def returns(reason: str, **values: Any) -> str | None:
    return answer(reason, **values).returns


def test_a_cooldown_is_given_as_a_time_and_a_duration() -> None:
    """And says that it moves while the burn goes on; budget that is there is no condition."""
    said = returns("fast_burn", remaining=0.9, held_until=NOW + 1500)
    assert said == (
        "Not before 08:25:00 UTC, in 25m. "
        "Later if it goes on: the cooldown begins anew with every tick that still sees it."
    )


def test_a_spent_budget_says_how_much_must_come_back_and_when_at_the_latest() -> None:
    """A fast burn that has also spent the budget waits for both."""
    said = returns("exhausted", remaining=-0.1)
    assert said == "When 12.5% of the budget is left again, as old requests leave the window; after 1d at the latest."
    both = returns("fast_burn", remaining=0.01, held_until=NOW + 60)
    assert both is not None
    assert both.startswith("Not before 08:01:00 UTC, in 1m.")
    assert both.endswith("after 1d at the latest.")


@pytest.mark.parametrize("reason", ["frozen", "forced_lossless"])
def test_an_order_waits_for_an_operator(reason: str) -> None:
    """Whatever the budget does."""
    assert returns(reason) == "Only when an operator resumes it."


def test_an_order_beside_another_reason_is_said_too() -> None:
    """Else nobody would know why it stays lossless when the budget is back."""
    said = answer("exhausted", remaining=0.0, override="lossless", override_who="sam", override_why="ticket 4711")
    assert "Besides, sam ordered lossless: ticket 4711." in said.sentences
    assert said.returns is not None
    assert said.returns.endswith("Besides, an operator has to resume it.")


def test_what_is_not_held_does_not_come_back() -> None:
    """Nothing is said."""
    assert returns("steady") is None
