"""What every part of the API is given, and the parameters they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import HTTPException, Path, Query
from prometheus_client import CollectorRegistry

from controller.api_guard import Access
from controller.api_json import PointLike
from controller.view import Board, PoolView, Wanted
from storage.records import Action, OperatorAction, QualityScore

MAX_POINTS = 5_000
MAX_ROWS = 500


class HistoryStore(Protocol):
    """What the API reads from the history (`limit` keeps the newest rows), and the one thing that it writes there.

    Every method raises StorageError.
    """

    def points(
        self, pool: str, cls: str, since: float, limit: int, until: float | None = None, step: float | None = None
    ) -> Sequence[PointLike]: ...
    def decisions(self, pool: str, cls: str | None, since: float | None, limit: int) -> Sequence[Mapping[str, Any]]: ...
    def decision_changes(self, pool: str, cls: str | None, since: float, limit: int) -> Sequence[Mapping[str, Any]]: ...
    def alerts(self, pool: str, cls: str | None, since: float | None, limit: int) -> Sequence[Any]: ...
    def policy_revisions(self, pool: str, limit: int) -> Sequence[Mapping[str, Any]]: ...
    def find_request(self, request_id: str, pool: str | None = None) -> Mapping[str, Any] | None: ...
    def operator_log(self, pool: str, limit: int) -> Sequence[Any]: ...
    def add_operator_action(
        self, pool: str, traffic_class: str, action: Action, who: str, why: str, now: float, amount: float | None = None
    ) -> int: ...


@dataclass(frozen=True)
class Context:
    """``ready`` says whether the controller can act, with reasons; ``clock`` is the loop's clock in Unix seconds.

    ``act`` has the loop obey an order that cannot be written down yet, False where this process does not lead its pool.
    ``submit`` sends scores on to their pool's stream and raises StorageError, ``wanted`` lists a pool's requests that
    are worth a label; both None where nothing of the kind is wired.
    """

    board: Board
    history: HistoryStore
    ready: Callable[[], tuple[bool, list[str]]]
    clock: Callable[[], float]
    registry: CollectorRegistry
    access: Access
    submit: Callable[[Sequence[QualityScore]], object] | None = None
    wanted: Callable[[str], Sequence[Wanted]] | None = None
    act: Callable[[OperatorAction], bool] | None = None

    def view_of(self, pool: str) -> PoolView:
        """The newest view of a pool; 404 where there is none."""
        view = self.board.pool(pool)
        if view is None:
            known = ", ".join(v.pool for v in self.board.pools()) or "none"
            raise HTTPException(404, f"no pool {pool!r}; there are: {known}")
        return view

    def check_class(self, pool: str, name: str | None) -> None:
        """404 unless the pool has that class; None is any class."""
        names = [c.traffic_class for c in self.view_of(pool).classes]
        if name is not None and name not in names:
            raise HTTPException(404, f"pool {pool!r} has no class {name!r}; there are: {', '.join(names) or 'none'}")


PoolName = Annotated[str, Path(min_length=1, max_length=128)]
ClassName = Annotated[str, Query(alias="class", min_length=1, max_length=128)]
AnyClass = Annotated[str | None, Query(alias="class", min_length=1, max_length=128)]
Since = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="Unix seconds: only later rows")]
PointLimit = Annotated[int, Query(ge=1, le=MAX_POINTS, description="at most so many rows, the newest ones")]
RowLimit = Annotated[int, Query(ge=1, le=MAX_ROWS, description="at most so many rows, the newest ones")]
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"description": "no such pool or class"}}
