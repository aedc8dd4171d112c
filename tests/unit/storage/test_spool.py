"""What waits while the database is away comes back in order, each once, whatever cut the writing short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import LeaseRefused, StorageError
from storage.history import Alert, History, Point
from storage.spool import Spool
from tests.support_storage import NOW, a_decision, a_fork, a_request, a_round_row, a_score, a_slice, a_token_row


def a_tick(n: int = 0, epoch: int = 1, **changes: Any) -> dict[str, Any]:
    """Tick number `n`, with one of everything."""
    tick: dict[str, Any] = {
        "pool": "chat",
        "epoch": epoch,
        "now": NOW + n,
        "decisions": [a_decision(epoch=epoch, seq=n, time=NOW + n + 1 / 3)],
        "requests": [a_request(request_id=f"r{n}")],
        "forks": [a_fork(request_id=f"r{n}")],
        "scores": (a_score(request_id=f"r{n}"),),
        "points": [Point("chat", "default", NOW + n, {"theta": 0.1 + 0.2})],
        "alerts": [Alert("chat", "default", NOW + n, "LenityFastBurn", True, "burns")],
        "slices": [a_slice()],
        "rollups": [a_token_row(time=NOW + n), a_round_row(time=NOW + n)],
        "snapshot": {"n": n, "estimate": [float("inf"), 1 / 3]},
        "last_id": f"{n}-0",
    }
    return tick | changes


class Saved(list[dict[str, Any]]):
    """Stands for `History.save_tick`; refuses epochs other than `epoch`, and stops after `fails_after` calls."""

    def __init__(self, epoch: int = 1, fails_after: int | None = None):
        super().__init__()
        self.epoch, self.fails_after = epoch, fails_after

    def __call__(self, **tick: Any) -> None:
        if self.fails_after is not None and len(self) >= self.fails_after:
            raise StorageError("away again")
        if tick["epoch"] != self.epoch and not tick.get("superseded"):
            raise LeaseRefused("superseded")
        self.append(tick)


def test_ticks_come_back_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    """Records are equal to what was given, through a restart; only the newest state comes, last."""
    spool = Spool(tmp_path / "chat.spool")
    ticks = [a_tick(n) for n in range(3)]
    assert [spool.append(tick) for tick in ticks] == [True] * 3
    saved, again = Saved(), Spool(tmp_path / "chat.spool")
    assert (len(again), again.broken) == (3, 0)
    assert again.replay(saved) == 3
    assert len(saved) == 4
    for tick, found in zip(ticks, saved, strict=False):
        wanted = {
            k: list(v) if isinstance(v, tuple) else v for k, v in tick.items() if k not in ("snapshot", "last_id")
        }
        assert found == wanted
    assert saved[3] == {name: ticks[2][name] for name in ("pool", "epoch", "now", "snapshot", "last_id")}
    assert list(tmp_path.iterdir()) == []
    assert again.replay(saved) == 0


def test_numpy_numbers_are_kept_as_numbers(tmp_path: Path) -> None:
    """Estimates come out of NumPy."""
    spool, saved = Spool(tmp_path / "s"), Saved()
    spool.append(a_tick(decisions=[a_decision(estimates={"reach": np.array([1.0, 0.5]), "n": np.int64(3)})]))
    spool.replay(saved)
    assert saved[0]["decisions"][0].estimates == {"reach": [1.0, 0.5], "n": 3}


def test_a_replay_that_is_cut_starts_again_and_keeps_what_came_meanwhile(tmp_path: Path) -> None:
    """The database goes away after one tick; nothing was forgotten."""
    spool = Spool(tmp_path / "s")
    for n in range(2):
        spool.append(a_tick(n))
    with pytest.raises(StorageError, match="away again"):
        spool.replay(Saved(fails_after=1))
    spool.append(a_tick(2))
    saved = Saved()
    assert Spool(tmp_path / "s").replay(saved) == 3
    assert [tick["now"] - NOW for tick in saved] == [0, 1, 2, 2]


def test_a_torn_record_is_left_out_at_any_byte(tmp_path: Path) -> None:
    """Whatever part of the last append reached the disk: the ticks before it are whole, and the file can go on."""
    path = tmp_path / "s"
    spool = Spool(path)
    spool.append(a_tick(0))
    whole = path.read_bytes()
    spool.append(a_tick(1))
    both = path.read_bytes()
    for cut in (*range(len(whole) + 1, len(both), 97), len(both) - 1):
        path.write_bytes(both[:cut])
        reopened = Spool(path)
        assert (len(reopened), reopened.broken) == (1, 1)
        assert path.read_bytes() == whole
    reopened.append(a_tick(2))
    assert len(Spool(path)) == 2
    path.write_bytes(both[:5])
    assert len(Spool(path)) == 0


def test_a_damaged_record_and_what_follows_is_set_aside(tmp_path: Path) -> None:
    """One flipped bit is found, and the bytes are kept for whoever wants to look."""
    path = tmp_path / "s"
    spool = Spool(path)
    spool.append(a_tick(0))
    start = path.stat().st_size
    spool.append(a_tick(1))
    raw = bytearray(path.read_bytes())
    raw[start + 40] ^= 1
    path.write_bytes(raw)
    reopened = Spool(path)
    assert (len(reopened), reopened.broken) == (1, 1)
    assert (tmp_path / "s.broken").read_bytes() == bytes(raw[start:])


def test_a_damaged_state_is_not_used(tmp_path: Path) -> None:
    """The database's own state stays, and the stream brings the rest again."""
    spool, saved = Spool(tmp_path / "s"), Saved()
    spool.append(a_tick(0))
    raw = bytearray(spool.state_path.read_bytes())
    raw[-3] ^= 1
    spool.state_path.write_bytes(raw)
    assert spool.replay(saved) == 1
    assert [("snapshot" in tick) for tick in saved] == [False]


def test_a_full_spool_keeps_the_newest_state(tmp_path: Path) -> None:
    """It never grows beyond its limit, and counts what it could not take."""
    spool = Spool(tmp_path / "s")
    spool.append(a_tick(0))
    limit = spool.size + 100
    small, saved = Spool(tmp_path / "s", limit), Saved()
    assert [small.append(a_tick(n)) for n in (1, 2)] == [False, False]
    assert (small.dropped, len(small)) == (2, 1)
    assert small.size <= limit
    assert small.replay(saved) == 1
    assert saved[-1]["snapshot"]["n"] == 2


def test_ticks_of_an_older_epoch_are_superseded(tmp_path: Path) -> None:
    """Each is given again with the mark; their state is not."""
    spool, saved = Spool(tmp_path / "s"), Saved(epoch=2)
    for n in range(2):
        spool.append(a_tick(n))
    assert spool.replay(saved) == 2
    assert [tick["superseded"] for tick in saved] == [True, True]


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    """Like every other store."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="spool"):
        Spool(tmp_path / "file" / "s")


def test_a_tick_that_no_database_takes_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """It is set aside; a number beyond 64 bits here."""
    history = History(f"sqlite:///{tmp_path / 'history.db'}")
    history.upgrade()
    epoch = history.claim_epoch("chat", "first", NOW)
    spool = Spool(tmp_path / "s")
    spool.append(a_tick(0, epoch))
    spool.append(a_tick(1, epoch, requests=[a_request(request_id="r1", tokens=1 << 70)]))
    spool.append(a_tick(2, epoch))
    assert spool.replay(history.save_tick) == 3
    assert (len(spool), spool.broken) == (0, 1)
    assert (tmp_path / "s.broken").exists()
    assert history.requests_between("chat", 0, NOW + 60)["requests"] == 2
    history.close()


def test_an_outage_ends_with_everything_in_the_history(tmp_path: Path) -> None:
    """Replayed twice, as after a crash before the spool was emptied: each row is there once, the state is the last."""
    history = History(f"sqlite:///{tmp_path / 'history.db'}")
    history.upgrade()
    epoch = history.claim_epoch("chat", "first", NOW)
    for _ in range(2):
        spool = Spool(tmp_path / "s")
        for n in range(3):
            spool.append(a_tick(n, epoch))
        assert spool.replay(history.save_tick) == 3
    assert history.requests_between("chat", 0, NOW + 60)["requests"] == 3
    assert [d["seq"] for d in history.decisions("chat")] == [2, 1, 0]
    assert history.load_snapshot("chat") == ({"n": 2, "estimate": [float("inf"), 1 / 3]}, "2-0")
    history.close()
