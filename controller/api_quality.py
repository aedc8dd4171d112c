"""Quality labels: scores come in, and judges are told which requests are worth one. Arms are never told.

Labels are checked, looked up and sent on to their pool's stream, where the loop takes them like those of the workers'
own scorers; nothing is written to the governor from here.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, HTTPException, Query
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from controller.api_context import NOT_FOUND, AnyClass, Context
from controller.api_guard import WRITE_ERRORS
from controller.auth import Identity
from controller.view import ClassView
from storage.records import QualityScore

MAX_LABELS = 1_000
REMEMBERED = 100_000

log = logging.getLogger("lenity.api")

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]


class Label(BaseModel):
    """A score of one branch of a request. Given again it is the same label: another score needs another version."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    request_id: Annotated[Name, Field(description="the id that the server gave the request")]
    branch: Annotated[Literal["served", "fork"], Field(description="which of the two answers was scored")] = "served"
    metric: Annotated[Name, Field(description="the metric that the policy names")]
    score: Annotated[float, Field(ge=0, le=1, description="1 is best")]
    scorer: Annotated[Name | None, Field(description="who scored; the token's name by default")] = None
    scorer_version: Annotated[Name, Field(description="a new version starts new evidence")]
    time: Annotated[float | None, Field(ge=0, le=1e11, description="Unix seconds; now by default")] = None
    pool: Annotated[Name | None, Field(description="looked up by default")] = None
    traffic_class: Annotated[Name | None, Field(description="looked up by default")] = None


class LabelBatch(BaseModel):
    """Many labels at once; one that cannot be taken is named in the answer, and the others are taken."""

    model_config = ConfigDict(strict=True, extra="forbid")

    labels: Annotated[list[Label], Field(min_length=1, max_length=MAX_LABELS)]


def _kind(value: Any) -> str:
    return "batch" if isinstance(value, LabelBatch) or (isinstance(value, dict) and "labels" in value) else "single"


Labels = Annotated[Annotated[Label, Tag("single")] | Annotated[LabelBatch, Tag("batch")], Discriminator(_kind), Body()]


@dataclass(frozen=True)
class Refused:
    """A label that was not taken: its place in the batch from 0, its request, and why."""

    index: int
    request_id: str
    reason: str


@dataclass(frozen=True)
class Taken:
    """How many labels were sent on, how many were known already, and which were refused."""

    accepted: int
    duplicates: int
    refused: list[Refused]


@dataclass(frozen=True)
class WantedLabel:
    """A request that is worth a label. ``branches`` come in random order; times are Unix seconds."""

    pool: str
    traffic_class: str
    request_id: str
    branches: tuple[str, ...]
    metric: str
    touched_at: float
    deadline: float


@dataclass(frozen=True)
class Need:
    """How many more labels one class needs, and what they would certify."""

    pool: str
    traffic_class: str
    metric: str
    labels_needed: int | None
    certifies: str


@dataclass(frozen=True)
class WantedList:
    """What to label, the most useful first, and what it is good for."""

    wanted: list[WantedLabel]
    needs: list[Need]


class Intake:
    """Takes labels: looks up where they belong, leaves out those that it has had, and sends the others on."""

    def __init__(self, context: Context):
        self._context, self._lock = context, threading.Lock()
        self._had: OrderedDict[tuple[str, ...], float] = OrderedDict()

    def take(self, labels: Sequence[Label], who: Identity) -> Taken:
        """Send ``labels`` on; raises StorageError when they cannot be, and then none of them counts as had."""
        fresh: dict[tuple[str, ...], QualityScore] = {}
        refused: list[Refused] = []
        duplicates = 0
        for index, label in enumerate(labels):
            score = self._score(label, who)
            if isinstance(score, str):
                refused.append(Refused(index, label.request_id, score))
                continue
            key = (score.pool, score.request_id, score.branch, score.metric, score.scorer, score.scorer_version)
            known = fresh[key].score if key in fresh else self._had.get(key)
            if known is None:
                fresh[key] = score
            elif known == score.score:
                duplicates += 1
            else:
                reason = "scored otherwise before by the same version; a changed scorer needs a new scorer_version"
                refused.append(Refused(index, label.request_id, reason))
        if fresh:
            assert self._context.submit is not None
            self._context.submit(list(fresh.values()))
        with self._lock:
            self._had.update((key, score.score) for key, score in fresh.items())
            while len(self._had) > REMEMBERED:
                self._had.popitem(last=False)
        if refused:
            log.info(
                "%d of %d labels of %s refused, such as: %s", len(refused), len(labels), who.name, refused[0].reason
            )
        return Taken(len(fresh), duplicates, refused)

    def _score(self, label: Label, who: Identity) -> QualityScore | str:
        """The record of a label, or why there is none."""
        pool, cls = label.pool, label.traffic_class
        if pool is not None and self._context.board.pool(pool) is None:
            return f"no pool {pool!r} here"
        if pool is None or cls is None:
            request = self._context.history.find_request(label.request_id, pool)
            if request is None:
                return "unknown request; one that has just finished is known a moment later"
            if cls is not None and cls != request["traffic_class"]:
                return f"the request is not of class {cls!r}"
            pool, cls = str(request["pool"]), str(request["traffic_class"])
        return QualityScore(
            request_id=label.request_id,
            pool=pool,
            traffic_class=cls,
            branch=label.branch,
            metric=label.metric,
            score=label.score,
            scorer=label.scorer or who.name,
            scorer_version=label.scorer_version,
            time=self._context.clock() if label.time is None else label.time,
        )


def router(context: Context) -> APIRouter:
    """Labels in, and which are wanted."""
    routes = APIRouter(tags=["quality"])
    intake = Intake(context)
    labeller: Any = Depends(context.access.writer("labeller"))

    @routes.post("/v1/quality", status_code=202, responses=WRITE_ERRORS)
    def quality(labels: Labels, who: Identity = labeller) -> Taken:
        """Take one label or a batch of them. Labels may come late, twice and out of order."""
        if context.submit is None:
            raise HTTPException(503, "labels cannot be sent on here")
        return intake.take(labels.labels if isinstance(labels, LabelBatch) else [labels], who)

    @routes.get("/v1/quality/wanted", responses=NOT_FOUND, dependencies=[Depends(context.access.reader)])
    def wanted(
        pool: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
        cls: AnyClass = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LABELS)] = 100,
    ) -> WantedList:
        """Requests that are worth a label, and how many more labels would certify what."""
        if pool is not None:
            context.check_class(pool, cls)
        views = [v for v in context.board.pools() if pool in (None, v.pool)]
        found: list[WantedLabel] = []
        needs: list[Need] = []
        for view in views:
            metrics = {c.traffic_class: c.metric for c in view.classes}
            needs += [_need(view.pool, c) for c in view.classes if cls in (None, c.traffic_class) and c.max_loss > 0]
            for w in () if context.wanted is None else context.wanted(view.pool):
                if cls in (None, w.traffic_class):
                    metric = metrics.get(w.traffic_class, "")
                    found.append(
                        WantedLabel(
                            view.pool, w.traffic_class, w.request_id, w.branches, metric, w.touched_at, w.deadline
                        )
                    )
        return WantedList(found[:limit], needs)

    return routes


def _need(pool: str, c: ClassView) -> Need:
    confidence = f"{c.confidence:.0%} confidence" if c.confidence else "the policy's confidence"
    if c.labels_needed is None:
        text = f"nothing is missing: a loss per touch of at most {c.u_kappa:.3g} is certified at {confidence}"
    else:
        text = f"a lower bound on the loss per touch than {c.u_kappa:.3g}, at {confidence}, so that more leniency fits"
    return Need(pool, c.traffic_class, c.metric, c.labels_needed, text)
