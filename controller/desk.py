"""A thread that does what may hang (the database), in order, while the loop waits only as long as it can afford."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """Something that is being done: wait for it, then take what came of it."""

    def __init__(self, call: Callable[[], T]):
        self._call, self._done = call, threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, in whatever thread this is."""
        try:
            self._value.append(self._call())
        except BaseException as e:  # whatever it is, it is the caller's to handle
            self._error = e
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it is done, within so many seconds."""
        return self._done.wait(max(0.0, seconds))

    @property
    def done(self) -> bool:
        """Whether it is done."""
        return self._done.is_set()

    def result(self) -> T:
        """What the call gave, or what it raised; only when done."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class Desk:
    """Does tasks one after the other, in a daemon thread; with `inline` at once, in the caller's."""

    def __init__(self, name: str, *, inline: bool = False):
        self._inline, self._closed = inline, False
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._began: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        if not inline:
            self._thread.start()

    def submit(self, call: Callable[[], T]) -> Task[T]:
        """Have `call` done after everything submitted before."""
        task = Task(call)
        if self._inline:
            task.run()
        elif not self._closed:
            self._queue.put(task)  # type: ignore[arg-type]
        return task

    def busy_s(self) -> float:
        """For how long the task at hand has been going on, in seconds."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self, seconds: float) -> bool:
        """Finish what was submitted, within so many seconds; False where something hangs, which is left behind."""
        self._closed = True
        if self._inline:
            return True
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            self._began = time.monotonic()
            task.run()
            self._began = None
