"""What operators ordered for one pool: polled from the history by number, or given while the database is away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import structlog

from controller.desk import Task
from controller.saver import Saver
from storage.errors import StorageError
from storage.history import History
from storage.records import ALL_CLASSES, OperatorAction

log = structlog.get_logger(__name__)

PAGE = 100
_STANDING = ("freeze", "lossless")


class Orders:
    """Orders in the order of their numbers, each given out once. The API's thread calls `give`, the loop's the rest."""

    def __init__(self, history: History, saver: Saver, pool: str, state: Mapping[str, Any] | None = None):
        self._history, self._saver, self._pool = history, saver, pool
        state = state or {}
        self._last = int(state.get("last", 0))
        self._skip = {int(number) for number in state.get("skip", ())}  # obeyed already, before they had a number
        self.standing = [OperatorAction(**action) for action in state.get("standing", ())]
        self._given: SimpleQueue[OperatorAction] = SimpleQueue()
        self._unwritten: list[OperatorAction] = []
        self._asked: Task[list[OperatorAction]] | None = None

    def ask(self) -> None:
        """Begin to ask the history for news."""
        if self._asked is None:
            last = self._last
            self._asked = self._saver.begin(lambda: self._history.operator_actions(self._pool, last, PAGE))

    def take(self, patience_s: float) -> list[OperatorAction]:
        """What is to be obeyed now, oldest first."""
        found: list[OperatorAction] = []
        if self._asked is not None and self._asked.wait(0.0 if self._saver.away else patience_s):
            task, self._asked = self._asked, None
            try:
                found = task.result()
            except StorageError as e:
                log.warning("operators' orders cannot be read", pool=self._pool, error=str(e))
            self._last = max([self._last, *(action.id for action in found)])
        found = [action for action in found if action.id not in self._skip]
        self._skip = {number for number in self._skip if number > self._last}
        while True:
            try:
                action = self._given.get_nowait()
            except Empty:
                break
            self._unwritten.append(action)
            found.append(action)
        self._stand(found)
        self._write()
        return found

    def give(self, action: OperatorAction) -> None:
        """Have an order obeyed that could not be written down yet."""
        self._given.put(replace(action, id=0))

    def to_state(self) -> dict[str, Any]:
        """JSON-able; what could not be written down yet is not part of it."""
        return {"last": self._last, "skip": sorted(self._skip), "standing": [vars(action) for action in self.standing]}

    def _stand(self, actions: list[OperatorAction]) -> None:
        """Remember what holds for all classes, for those that come later."""
        for action in actions:
            if action.traffic_class != ALL_CLASSES:
                continue
            if action.action == "resume":
                self.standing = []
            elif action.action in _STANDING:
                self.standing = [*(a for a in self.standing if a.action != action.action), action]

    def _write(self) -> None:
        """Write down what was obeyed without a record, once the database is back."""
        while self._unwritten and not self._saver.away:
            a = self._unwritten[0]
            values = (a.pool, a.traffic_class, a.action, a.who, a.why, a.time, a.amount)
            number = self._saver.ask(partial(self._history.add_operator_action, *values), 0)
            if not number:
                return
            self._skip.add(number)
            del self._unwritten[0]
