"""Operators' orders on their way to the classes of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.desk import Desk
from controller.orders import Orders
from controller.saver import Saver, Tick
from storage.errors import StorageError
from storage.history import History
from storage.records import ALL_CLASSES, Action, OperatorAction
from storage.spool import Spool

NOW = 1_000_000.0


class Rig:
    def __init__(self, directory: Path):
        self.history = History(f"sqlite:///{directory / 'h.db'}")
        self.history.upgrade()
        self.epoch = self.history.claim_epoch("p", "test", NOW)
        self.saver = Saver(self.history, Spool(directory / "p.ticks"), Desk("save", inline=True))
        self.orders = Orders(self.history, self.saver, "p")

    def add(self, action: Action, cls: str = ALL_CLASSES) -> int:
        return self.history.add_operator_action("p", cls, action, "ada", "a drill", NOW)

    def taken(self) -> list[tuple[str, str]]:
        self.orders.ask()
        return [(a.action, a.traffic_class) for a in self.orders.take(1.0)]

    def save(self, now: float) -> None:
        self.saver.save(Tick({"pool": "p", "epoch": self.epoch, "now": now}))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def order(action: Action) -> OperatorAction:
    return OperatorAction(0, "p", ALL_CLASSES, action, None, "ada", "the database is away", NOW)


def test_each_order_is_given_out_once_in_its_order(rig: Rig) -> None:
    """Also by a successor."""
    assert rig.taken() == []
    rig.add("freeze")
    rig.add("lossless", "code")
    assert rig.taken() == [("freeze", "*"), ("lossless", "code")]
    assert rig.taken() == []
    rig.orders = Orders(rig.history, rig.saver, "p", rig.orders.to_state())
    rig.add("resume")
    assert rig.taken() == [("resume", "*")]


def test_what_stands_for_all_classes_is_remembered_for_later_ones(rig: Rig) -> None:
    """Until it is taken back; an order for one class says nothing about others."""
    rig.add("lossless", "code")
    rig.add("freeze")
    rig.add("lossless")
    rig.add("freeze")
    rig.taken()
    assert [a.action for a in rig.orders.standing] == ["lossless", "freeze"]
    assert [a.action for a in Orders(rig.history, rig.saver, "p", rig.orders.to_state()).standing] == [
        "lossless",
        "freeze",
    ]
    rig.add("resume")
    rig.taken()
    assert rig.orders.standing == []


def test_an_order_is_obeyed_while_the_database_is_away_and_written_down_after(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not obeyed a second time when it then has a number."""

    def away(*args: Any, **kwargs: Any) -> None:
        raise StorageError("away")

    real = rig.history.save_tick
    monkeypatch.setattr(rig.history, "save_tick", away)
    rig.save(NOW)
    rig.orders.give(order("lossless"))
    assert rig.taken() == [("lossless", "*")]
    assert rig.history.operator_log("p") == []
    monkeypatch.setattr(rig.history, "save_tick", real)
    rig.save(NOW + 60)
    assert rig.taken() == []
    [written] = rig.history.operator_log("p")
    assert (written.action, written.who, written.time) == ("lossless", "ada", NOW)
    rig.add("resume")
    assert rig.taken() == [("resume", "*")]
    assert rig.orders.to_state()["skip"] == []


def test_a_database_that_does_not_answer_delays_orders_and_loses_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come with the next answer."""
    rig.add("freeze")
    real = rig.history.operator_actions

    def away(*args: Any, **kwargs: Any) -> Any:
        raise StorageError("away")

    monkeypatch.setattr(rig.history, "operator_actions", away)
    assert rig.taken() == []
    monkeypatch.setattr(rig.history, "operator_actions", real)
    assert rig.taken() == [("freeze", "*")]
