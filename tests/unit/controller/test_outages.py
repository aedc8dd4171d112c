"""The stream server away for a while, and a stream that is silent for a while, in simulated time."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import StorageError
from tests.unit.controller.test_loop import T0, Rig, request


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.mark.parametrize("seconds", [2, 20])
def test_a_stream_server_that_was_away_costs_nothing_but_its_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """One attempt a tick; readiness tells; afterwards all that workers kept counts once, and all is well."""
    attempts: list[int] = []
    read = rig.stream.read

    def counted(max_entries: int = 1000, block_ms: int = 0) -> list[tuple[str, dict[bytes, bytes]]]:
        attempts.append(max_entries)
        return read(max_entries, block_ms)

    monkeypatch.setattr(rig.stream, "read", counted)
    for n in range(5):
        rig.stream.put(request(n))
        rig.loop.tick(T0 + n)
    theta = rig.leases.written[-1].table
    leased = len(rig.leases.written)
    attempts.clear()

    rig.stream.away, rig.leases.error = True, StorageError("connection refused")
    for n in range(5, 5 + seconds):
        rig.loop.tick(T0 + n)
        assert any("connection refused" in text for text in rig.view().degraded)
        assert any("lease not renewed" in text for text in rig.view().degraded)
    assert len(attempts) == seconds
    assert len(rig.leases.written) == leased

    rig.stream.away, rig.leases.error = False, None
    rig.stream.put(*(request(n) for n in range(5, 5 + seconds)))
    rig.loop.tick(T0 + 5 + seconds)
    assert rig.view().degraded == ()
    assert len(rig.leases.written) == leased + 1
    assert rig.leases.written[-1].table == theta
    assert len(rig.stream.acked) == len(set(rig.stream.acked)) == 5 + seconds
    assert rig.history.requests_between("p", 0, 1e11)["requests"] == 5 + seconds
    assert rig.loop.classes["default"].totals["requests.untouched"] == 5 + seconds


def test_one_entry_after_a_minute_of_silence_counts(rig: Rig) -> None:
    """Leases go on meanwhile, with what they said, and the silence is shown."""
    rig.stream.put(request(0))
    rig.loop.tick(T0)
    for n in range(1, 61):
        rig.loop.tick(T0 + n)
        assert rig.view().last_telemetry_age_s == n
        assert rig.view().degraded == ()
    assert len(rig.leases.written) == 61
    assert all(lease.table == rig.leases.written[0].table for lease in rig.leases.written)
    rig.stream.put(request(1))
    rig.loop.tick(T0 + 61)
    assert rig.view().last_telemetry_age_s == 0
    assert rig.stream.acked == ["1-0", "2-0"]
    assert rig.history.requests_between("p", 0, 1e11)["requests"] == 2
