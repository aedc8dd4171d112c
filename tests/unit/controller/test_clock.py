"""The steady clock."""

from __future__ import annotations

from controller.clock import SteadyClock, elapsed_seconds


def test_a_stepping_wall_clock_does_not_move_it() -> None:
    """After the start only elapsed time counts, whatever the wall clock says."""
    wall, elapsed = [1_000.0], [5.0]
    clock = SteadyClock(lambda: wall[0], lambda: elapsed[0])
    assert clock.now() == 1_000.0
    wall[0], elapsed[0] = 87_400.0, 7.5
    assert clock.now() == 1_002.5


def test_it_never_starts_before_what_is_already_recorded() -> None:
    """A wall clock that went backwards over a restart does not make the new past overlap the old one."""
    assert SteadyClock(lambda: 900.0, lambda: 0.0, floor=1_000.0).now() == 1_000.0


def test_elapsed_seconds_do_not_go_back() -> None:
    """Two readings are in order."""
    first = elapsed_seconds()
    assert elapsed_seconds() >= first
