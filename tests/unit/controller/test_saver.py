"""Ticks on their way into the history while the database is well, away, slow, or another's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from controller.desk import Desk
from controller.saver import Saver, Tick
from storage.errors import LeaseRefused, StorageError
from storage.spool import Spool
from tests.support import wait_until


class Database:
    """Keeps what it is given; `error` makes it fail (of an older epoch's ticks it may keep the rows all
    the same), `gate` makes it hang."""

    def __init__(self) -> None:
        self.saved: list[float] = []
        self.states: list[object] = []
        self.error: Exception | None = None
        self.takes_superseded = False
        self.gate: threading.Event | None = None

    def save_tick(self, pool: str, epoch: int, now: float, **values: Any) -> None:
        if self.gate is not None:
            self.gate.wait(30)
        if self.error is not None and not (self.takes_superseded and values.get("superseded")):
            raise self.error
        self.saved.append(now)
        if values.get("snapshot") is not None:
            self.states.append(values["snapshot"])

    def news(self) -> str:
        if self.error is not None:
            raise self.error
        return "news"


def tick(n: float) -> Tick:
    values = {"pool": "p", "epoch": 1, "now": n, "snapshot": f'{{"n":{n:g}}}', "last_id": f"{n:g}-0"}
    return Tick(values, [f"{n:g}-0"], f"{n:g}-0")


class Rig:
    def __init__(self, directory: Path, *, inline: bool = True, patience_s: float = 1.0):
        self.database, self.spool = Database(), Spool(directory / "p.ticks")
        self.desk = Desk("save", inline=inline)
        self.saver = Saver(self.database, self.spool, self.desk, patience_s=patience_s)  # type: ignore[arg-type]

    def save(self, *numbers: float) -> None:
        for n in numbers:
            self.saver.save(tick(n))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_what_is_saved_may_be_acknowledged(rig: Rig) -> None:
    """Once."""
    rig.save(1)
    assert rig.saver.settled().ids == ["1-0"]
    assert rig.saver.settled().ids == []
    assert rig.database.saved == [1]


def test_while_the_database_is_away_ticks_go_to_the_spool_and_come_in_order_after(rig: Rig) -> None:
    """Nothing is acknowledged until it is back; then everything."""
    rig.database.error = StorageError("connection refused")
    rig.save(1, 2)
    found = rig.saver.settled()
    assert (found.ids, found.trouble, rig.saver.spooled) == ([], "connection refused", 2)
    rig.database.error = None
    rig.save(2.5)
    assert rig.saver.settled().ids == [], "it is not asked at every tick"
    rig.save(4)
    found = rig.saver.settled()
    assert found.ids == ["1-0", "2-0", "2.5-0", "4-0"]
    assert found.trouble is None
    assert rig.database.saved[:3] + rig.database.saved[-1:] == [1, 2, 2.5, 4]
    assert rig.database.states[-1] == '{"n":4}'
    assert rig.saver.spooled == 0


def test_attempts_become_rare_while_it_stays_away(rig: Rig) -> None:
    """After 1, 2, 4, 8, 15, 15 ... seconds."""
    rig.database.error = StorageError("away")
    real, tried = rig.database.save_tick, list[int]()
    rig.spool.append = lambda tick: True  # type: ignore[method-assign]
    for n in range(60):

        def counted(*args: Any, n: int = n, **values: Any) -> None:
            tried.append(n)
            real(*args, **values)

        rig.database.save_tick = counted  # type: ignore[method-assign]
        rig.save(n)
    assert tried == [0, 1, 3, 7, 15, 30, 45]


def test_a_newer_epoch_is_told_at_once(rig: Rig) -> None:
    """The loop must not lease again."""
    rig.database.error = LeaseRefused("epoch 2 was claimed")
    rig.save(1)
    with pytest.raises(LeaseRefused, match="epoch 2"):
        rig.saver.settled()


def test_a_tick_that_no_database_takes_is_left_out_and_the_next_ones_count(rig: Rig) -> None:
    """Its state is part of theirs, so its entries are done with."""
    rig.database.error = ValueError("not a number")
    rig.save(1)
    rig.database.error = None
    rig.save(2)
    assert rig.saver.settled().ids == ["1-0", "2-0"]
    assert rig.saver.rows_lost == 1


def test_a_database_that_hangs_costs_one_patience_and_then_nothing(tmp_path: Path) -> None:
    """The loop goes on; the state of the last tick is saved and those before it are not needed."""
    rig = Rig(tmp_path, inline=False, patience_s=0.05)
    rig.database.gate = threading.Event()
    rig.save(1)
    assert rig.saver.settled().trouble == "the database has not answered yet"
    wait_until(lambda: rig.saver.away)
    rig.save(2, 3, 4)
    assert rig.saver.ask(rig.database.news, "nothing") == "nothing"
    rig.database.gate.set()
    wait_until(lambda: rig.database.saved == [1, 2, 3, 4])
    assert wait_until(lambda: rig.saver.settled().ids)[-1] == "4-0"
    assert rig.database.states == ['{"n":1}', '{"n":4}']


def test_entries_wait_for_a_state_that_includes_them(tmp_path: Path) -> None:
    """Ticks without a state come between; one of them must not take the place of a state that waits."""
    rig = Rig(tmp_path, inline=False, patience_s=0.05)
    rig.database.gate = threading.Event()
    rig.save(1)
    rig.save(2)
    bare = Tick({"pool": "p", "epoch": 1, "now": 3.0, "snapshot": None, "last_id": None})
    rig.saver.save(bare)
    rig.database.gate.set()
    assert wait_until(lambda: rig.saver.settled().ids)[-1] == "2-0"
    assert rig.database.states == ['{"n":1}', '{"n":2}']
    wait_until(lambda: rig.saver.settled().trouble is None)


def test_a_state_that_no_database_took_leaves_its_entries_open(rig: Rig) -> None:
    """Rows of later ticks are no state."""
    rig.database.error = ValueError("not a number")
    rig.save(1)
    rig.database.error = None
    rig.saver.save(Tick({"pool": "p", "epoch": 1, "now": 2.0, "snapshot": None, "last_id": None}))
    assert rig.saver.settled().ids == []
    rig.save(3)
    assert rig.saver.settled().ids == ["1-0", "3-0"]


def test_asking_gives_what_the_database_says_or_the_other_thing(rig: Rig) -> None:
    """Whatever it raises."""
    assert rig.saver.ask(rig.database.news, "nothing") == "news"
    rig.database.error = StorageError("away")
    assert rig.saver.ask(rig.database.news, "nothing") == "nothing"


def test_a_long_outage_is_remembered_in_bounded_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand entries are acknowledged by their range."""
    monkeypatch.setattr(rig.spool, "append", lambda tick: True)
    rig.database.error = StorageError("away")
    for n in range(1100):
        values = {"pool": "p", "epoch": 1, "now": n / 100, "snapshot": None, "last_id": None}
        rig.saver.save(Tick(values, [f"{n}-{i}" for i in range(100)], f"{n}-99"))
    assert len(rig.saver._unsettled) <= 1001
    assert sum(len(t.ids) for t in rig.saver._unsettled) <= 50_000
    rig.database.error = None
    rig.save(2000)
    found = rig.saver.settled()
    assert found.up_to == "2000-0"


def test_a_full_disk_loses_rows_and_says_how_many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loop goes on."""

    def full(tick: Any) -> bool:
        raise StorageError("no space left on device")

    monkeypatch.setattr(rig.spool, "append", full)
    rig.database.error = StorageError("away")
    rig.save(1, 1.5)
    assert rig.saver.rows_lost == 2
    rig.database.error = None
    rig.save(3)
    assert rig.saver.settled().ids == ["1-0", "1.5-0", "3-0"]


def test_finishing_asks_once_more(rig: Rig) -> None:
    """Before the process ends: whether everything is in the database."""
    rig.database.error = StorageError("away")
    rig.save(1)
    assert not rig.saver.finish(1.0)
    rig.database.error = None
    assert rig.saver.finish(1.0)
    assert rig.saver.settled().ids == ["1-0"]


def test_finishing_under_a_newer_epoch_leaves_the_entries_to_its_leader(rig: Rig) -> None:
    """The rows that waited are kept, but the state is not taken: its entries are not in the one that counts."""
    rig.database.error = StorageError("away")
    rig.save(1)
    rig.database.error = LeaseRefused("epoch 2 was claimed by another")
    rig.database.takes_superseded = True
    rig.saver.finish(1.0)
    assert rig.database.saved == [1] and rig.database.states == []
    with pytest.raises(LeaseRefused):
        rig.saver.settled()


def test_finishing_leaves_open_what_no_state_on_the_spool_includes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick whose state found no place on the disk is not saved when the rest is."""
    rig.database.error = StorageError("away")
    rig.save(1)

    def full(tick: Any) -> bool:
        raise StorageError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rig.spool, "append", full)
        rig.save(2)
    rig.database.error = None
    assert not rig.saver.finish(1.0)
    assert rig.saver.settled().ids == ["1-0"]
