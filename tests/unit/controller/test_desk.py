"""What may hang is done in a thread of its own."""

from __future__ import annotations

import threading

import pytest

from controller.desk import Desk
from tests.support import wait_until


def test_tasks_are_done_in_order_and_give_what_they_gave() -> None:
    """A task that raises gives that."""
    desk, seen = Desk("test"), list[int]()
    tasks = [desk.submit(lambda i=i: seen.append(i) or i) for i in range(5)]  # type: ignore[func-returns-value]
    bad = desk.submit(lambda: 1 // 0)
    assert bad.wait(10)
    assert seen == [0, 1, 2, 3, 4]
    assert [t.result() for t in tasks] == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert desk.close(10)


def test_a_desk_says_how_long_it_has_been_busy_and_can_be_left() -> None:
    """A task that hangs holds up nobody's exit."""
    desk, release = Desk("test"), threading.Event()
    task = desk.submit(lambda: release.wait(30))
    wait_until(lambda: desk.busy_s() > 0)
    assert not task.done
    assert not desk.close(0.01)
    release.set()
    assert task.wait(10)
    wait_until(lambda: desk.busy_s() == 0)


def test_an_inline_desk_does_it_at_once() -> None:
    """For tests and simulations."""
    assert Desk("test", inline=True).submit(lambda: 3).result() == 3
