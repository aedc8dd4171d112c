"""The HTTP API over a board and a history in memory."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from controller.api import MAX_POINTS, ApiServer, create_app
from controller.metrics import ControllerMetrics
from controller.view import AlertView, Board, BoardFull, ClassView, PoolView
from storage.errors import StorageError
from storage.history import Alert, History, Point

NOW = 1_700_000_000.0

CLASS = ClassView(
    traffic_class="default",
    state="measured",
    reason="steady",
    explanation="Leniency is open within the budget.",
    rule="token_v3",
    g=5,
    theta=0.4,
    rho=1.0,
    mu=2.5,
    lease_epoch=3,
    lease_seq=17,
    lease_ttl_s=10.0,
    alerts=(AlertView(name="burn 1h/5m", firing=False, detail="burn 0.2"),),
)
POOL = PoolView(
    pool="demo",
    policy_revision=1,
    policy_source="policy.yaml",
    policy_rejected=None,
    epoch=3,
    leader=True,
    time=NOW,
    tick_seconds=0.02,
    interval_s=1.0,
    last_telemetry_age_s=0.4,
    stream_lag=0,
    dead_letters=0,
    classes=(CLASS,),
)


@dataclass(frozen=True)
class Row:
    time: float | datetime
    values: dict[str, float | None]


@dataclass
class FakeHistory:
    rows: list[Row] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    broken: bool = False
    revisions: list[dict[str, Any]] = field(default_factory=list)

    def points(self, pool: str, cls: str, since: float, limit: int, *_: object) -> list[Row]:
        if self.broken:
            raise StorageError("sqlite:///secret/path is locked")
        self.asked.append((pool, cls, since, limit))
        return self.rows

    def decisions(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[dict[str, Any]]:
        self.asked.append((pool, cls, since, limit))
        return [{"time": datetime.fromtimestamp(NOW, UTC), "state": "measured", "bounds": {"u": math.inf}}]

    def decision_changes(self, pool: str, cls: str | None, since: float, limit: int) -> list[dict[str, Any]]:
        self.asked.append((pool, cls, since, limit))
        return []

    def alerts(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[AlertView]:
        return [AlertView(name="burn", firing=True, detail="fast")]

    def policy_revisions(self, pool: str, limit: int) -> list[dict[str, Any]]:
        return self.revisions[:limit]

    def find_request(self, request_id: str, pool: str | None = None) -> None:
        return None

    def operator_log(self, pool: str, limit: int) -> list[object]:
        return []

    def add_operator_action(self, *args: object, **more: object) -> int:
        raise AssertionError("nothing here orders anything")


@dataclass
class World:
    board: Board
    history: FakeHistory
    app: FastAPI
    metrics: ControllerMetrics
    now: float = NOW
    ready: tuple[bool, list[str]] = (True, [])

    def get(self, path: str, **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://lenity") as client:
                return await client.get(path, headers=headers)

        return asyncio.run(ask())


@pytest.fixture
def world() -> World:
    board, history, registry = Board(max_subscriptions=2), FakeHistory(), CollectorRegistry()
    metrics = ControllerMetrics(registry)
    app = create_app(board, history, ready=lambda: world.ready, clock=lambda: world.now, registry=registry)
    world = World(board, history, app, metrics)
    board.publish(POOL)
    return world


def test_health_says_only_that_the_process_answers(world: World) -> None:
    """Liveness is true even while the controller cannot act."""
    world.ready = (False, ["stream unreachable"])
    assert world.get("/healthz").json() == {"ok": True, "reasons": []}


def test_ready_while_the_loop_ticks(world: World) -> None:
    """Exactly two intervals after the last tick still count as ticking."""
    world.now = NOW + 2.0
    answer = world.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ok": True, "reasons": []})


def test_not_ready_when_the_loop_is_dead(world: World) -> None:
    """A loop that has not ticked for two intervals turns readiness false, whatever the controller believes."""
    world.now = NOW + 2.1
    answer = world.get("/readyz")
    assert answer.status_code == 503
    assert "pool demo: the control loop has not ticked for 2.1 s" in answer.json()["reasons"][0]


def test_not_ready_before_the_first_tick() -> None:
    """Nothing has been leased yet, so the controller cannot act."""
    board, registry = Board(), CollectorRegistry()
    app = create_app(board, FakeHistory(), ready=lambda: (True, []), clock=lambda: NOW, registry=registry)
    answer = World(board, FakeHistory(), app, ControllerMetrics(CollectorRegistry())).get("/readyz")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["the control loop has not ticked yet"])


def test_not_ready_gives_the_controllers_reasons(world: World) -> None:
    world.ready = (False, ["database down"])
    answer = world.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"ok": False, "reasons": ["database down"]})


def test_pools_carry_the_views_and_the_clock(world: World) -> None:
    world.now = NOW + 0.5
    body = world.get("/v1/pools").json()
    assert body["time"] == NOW + 0.5
    assert body["pools"][0]["classes"][0]["explanation"] == CLASS.explanation
    assert world.get("/v1/pools/demo").json() == body["pools"][0]


def test_numbers_that_json_lacks_become_null(world: World) -> None:
    """An infinite or undefined estimate must not turn an answer into a server error."""
    world.board.publish(replace(POOL, classes=(replace(CLASS, spent_upper=math.inf, acceptance=math.nan),)))
    seen = world.get("/v1/pools/demo").json()["classes"][0]
    assert (seen["spent_upper"], seen["acceptance"]) == (None, None)


def test_unknown_pool_names_those_there_are(world: World) -> None:
    for path in ("", "/series?class=default", "/decisions", "/alerts", "/policy/revisions"):
        answer = world.get(f"/v1/pools/nope{path}")
        assert (answer.status_code, answer.json()["detail"]) == (404, "no pool 'nope'; there are: demo")


def test_unknown_class_names_those_there_are(world: World) -> None:
    answer = world.get("/v1/pools/demo/series?class=chat")
    assert answer.json()["detail"] == "pool 'demo' has no class 'chat'; there are: default"
    assert answer.status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        "",
        "class=default&limit=0",
        f"class=default&limit={MAX_POINTS + 1}",
        "class=default&limit=many",
        "class=default&since=-1",
        "class=default&since=nan",
        "class=default&since=inf",
        f"class={'x' * 129}",
    ],
)
def test_series_refuses_impossible_questions(world: World, query: str) -> None:
    """Bounds are checked before the history is asked."""
    answer = world.get(f"/v1/pools/demo/series?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][0] == "query"
    assert world.history.asked == []


def test_series_are_columns_in_order_of_time(world: World) -> None:
    """Rows of any order and with gaps become equal columns; values that are not finite are null."""
    world.history.rows = [
        Row(NOW + 2, {"theta": 0.2, "g": 4.0}),
        Row(datetime.fromtimestamp(NOW + 1, UTC), {"theta": math.nan}),
        Row(NOW, {"theta": 0.0}),
    ]
    body = world.get(f"/v1/pools/demo/series?class=default&since={NOW}&limit=10").json()
    assert body["time"] == [NOW + 1, NOW + 2], "since is exclusive, so that a reader can continue where it was"
    assert body["values"] == {"g": [None, 4.0], "theta": [None, 0.2]}
    assert world.history.asked == [("demo", "default", NOW, 10)]


def test_series_are_thinned_to_steps(world: World) -> None:
    """A step holds the means of its rows; a step without rows is left out."""
    start = NOW - NOW % 60
    world.history.rows = [Row(start + t, {"theta": t / 100, "g": None}) for t in (0.5, 10, 50, 130)]
    body = world.get("/v1/pools/demo/series?class=default&step=60").json()
    assert body["time"] == [start, start + 120]
    assert body["values"]["theta"] == [pytest.approx(60.5 / 300), 1.3]
    body = world.get(f"/v1/pools/demo/series?class=default&step=60&to={start + 60}").json()
    assert (body["time"], body["step"]) == ([start], 60)


def test_series_keep_the_newest_rows(world: World) -> None:
    world.history.rows = [Row(NOW + i, {"theta": i / 10}) for i in range(10)]
    assert world.get("/v1/pools/demo/series?class=default&limit=2").json()["time"] == [NOW + 8, NOW + 9]


def test_history_rows_become_plain_json(world: World) -> None:
    assert world.get("/v1/pools/demo/decisions?class=default&limit=3").json() == [
        {"time": NOW, "state": "measured", "bounds": {"u": None}}
    ]
    assert world.history.asked == [("demo", "default", None, 3)]
    assert world.get("/v1/pools/demo/decisions?brief=true").json() == [{"time": NOW, "state": "measured"}]
    assert world.get("/v1/pools/demo/alerts").json() == [{"name": "burn", "firing": True, "detail": "fast"}]


def test_revisions_say_what_changed(world: World) -> None:
    """Each has a diff against the policy in force before it; a refused one is compared too, but not compared with."""
    texts = {4: "max_loss: 0.03", 3: "max_loss: -1", 2: "max_loss: 0.02", 1: "max_loss: 0.01"}
    rows = [{"revision": n, "accepted": n != 3, "text": text} for n, text in texts.items()]
    world.history.revisions = rows
    found = world.get("/v1/pools/demo/policy/revisions").json()
    assert [row["revision"] for row in found] == [4, 3, 2, 1]
    assert "-max_loss: 0.02\n+max_loss: 0.03" in found[0]["diff"]
    assert found[3]["diff"] is None
    assert world.get("/v1/pools/demo/policy/revisions?limit=3").json() == found[:3]
    policy = world.get("/v1/pools/demo/policy").json()
    assert (policy["active"]["revision"], policy["rejected"]) == (4, None)
    world.history.revisions = rows[1:]
    policy = world.get("/v1/pools/demo/policy").json()
    assert (policy["active"]["revision"], policy["rejected"]["revision"]) == (2, 3)


def test_only_changes_can_be_asked_for(world: World) -> None:
    """Without a time since when, those of the last day."""
    assert world.get("/v1/pools/demo/decisions?changes=true&limit=7").json() == []
    world.get(f"/v1/pools/demo/decisions?changes=true&since={NOW - 5}")
    assert world.history.asked == [("demo", None, NOW - 86_400, 7), ("demo", None, NOW - 5, 100)]


def test_the_real_history_fits(tmp_path: Path) -> None:
    """Over SQLite: the newest rows after `since`, alerts and policy revisions with times in Unix seconds."""
    history, board = History(f"sqlite:///{tmp_path / 'history.db'}"), Board()
    history.upgrade()
    epoch = history.claim_epoch("demo", "test", NOW)
    history.add_policy_revision("demo", "pool: demo", "abc", "policy.yaml", NOW, True, None)
    history.save_tick(
        "demo",
        epoch,
        NOW,
        points=[Point("demo", "default", NOW + i, {"theta": i / 10}) for i in range(5)],
        alerts=[Alert("demo", "default", NOW, "burn", True, "fast")],
    )
    app = create_app(board, history, ready=lambda: (True, []), clock=lambda: NOW, registry=CollectorRegistry())
    board.publish(POOL)
    world = World(board, FakeHistory(), app, ControllerMetrics(CollectorRegistry()))
    body = world.get(f"/v1/pools/demo/series?class=default&since={NOW + 1}&limit=2").json()
    assert (body["time"], body["values"]) == ([NOW + 3, NOW + 4], {"theta": [0.3, 0.4]})
    means = world.get(f"/v1/pools/demo/series?class=default&step=2&to={NOW + 3}").json()
    assert (means["time"], means["values"]) == ([NOW, NOW + 2], {"theta": [pytest.approx(0.05), pytest.approx(0.25)]})
    alert = world.get("/v1/pools/demo/alerts?class=default").json()[0]
    assert (alert["time"], alert["name"], alert["firing"]) == (NOW, "burn", True)
    revision = world.get("/v1/pools/demo/policy/revisions").json()[0]
    assert (revision["time"], revision["accepted"], revision["source"]) == (NOW, True, "policy.yaml")
    assert world.get("/v1/pools/demo/decisions").json() == []
    history.close()


def test_a_broken_history_is_said_without_its_address(world: World) -> None:
    world.history.broken = True
    answer = world.get("/v1/pools/demo/series?class=default")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "secret" not in answer.text
    assert world.get("/v1/pools").status_code == 200, "the live state does not depend on the history"


def test_every_answer_has_the_security_headers_and_no_cors(world: World) -> None:
    for path in ("/", "/static/index.html", "/v1/pools", "/metrics", "/v1/pools/nope", "/nothing"):
        headers = world.get(path, origin="https://elsewhere.example").headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert not any(name.startswith("access-control") for name in headers)


def test_static_files_stay_inside_the_dashboard(world: World) -> None:
    for path in ("/static/../api.py", "/static/%2e%2e/api.py", "/static/..%2fapi.py"):
        assert world.get(path).status_code == 404


def test_metrics_come_as_text_or_openmetrics(world: World) -> None:
    world.metrics.update(POOL)
    text = world.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    assert 'lenity_ticks_total{pool="demo"} 1.0' in text.text
    openmetrics = world.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_openapi_is_served_and_nothing_loads_from_elsewhere(world: World) -> None:
    """The schema lists the endpoints; pages that need a content network are off."""
    paths = world.get("/openapi.json").json()["paths"]
    assert {"/healthz", "/readyz", "/v1/pools", "/v1/pools/{pool}/series", "/v1/events"} <= set(paths)
    assert world.get("/docs").status_code == 404


@pytest.fixture
def served(world: World) -> Iterator[tuple[World, ApiServer, str]]:
    server = ApiServer(world.app, world.board, port=0)
    url = server.start()
    yield world, server, url
    assert server.stop()


def read_events(lines: Iterator[str], count: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for line in lines:
        if line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == count:
                break
    return events


def test_events_begin_with_the_state_and_follow_it(served: tuple[World, ApiServer, str]) -> None:
    """A stream needs no second question: it starts with every pool and then brings what changes."""
    world, _, url = served
    with httpx.stream("GET", f"{url}/v1/events", timeout=10) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-security-policy" in stream.headers
        lines = stream.iter_lines()
        assert read_events(lines, 1)[0]["time"] == NOW
        world.board.publish(replace(POOL, time=NOW + 1, classes=(replace(CLASS, spent=math.inf),)))
        event = read_events(lines, 1)[0]
        assert (event["time"], event["classes"][0]["spent"]) == (NOW + 1, None)


def test_streams_beyond_the_limit_are_refused(served: tuple[World, ApiServer, str]) -> None:
    world, _, url = served
    with (
        httpx.stream("GET", f"{url}/v1/events", timeout=10) as one,
        httpx.stream("GET", f"{url}/v1/events", timeout=10) as two,
    ):
        lines = one.iter_lines(), two.iter_lines()  # kept: a stream ends with its iterator
        assert all(read_events(each, 1) for each in lines)
        assert world.board.subscribers == 2
        third = httpx.get(f"{url}/v1/events", timeout=10)
        assert (third.status_code, third.headers["retry-after"]) == (503, "10")


def test_a_reader_that_leaves_frees_its_place(served: tuple[World, ApiServer, str]) -> None:
    """A hundred page loads in a row do not use up the streams."""
    world, _, url = served
    with httpx.stream("GET", f"{url}/v1/events", timeout=10) as stream:
        read_events(stream.iter_lines(), 1)
    deadline = time.monotonic() + 5
    while world.board.subscribers and time.monotonic() < deadline:
        httpx.get(f"{url}/healthz")  # a round trip through the server's event loop
    assert world.board.subscribers == 0


def test_an_open_stream_does_not_hold_up_shutdown(world: World) -> None:
    """Stop ends the stream cleanly and leaves no subscription behind."""
    server = ApiServer(world.app, world.board, port=0)
    url = server.start()
    with httpx.stream("GET", f"{url}/v1/events", timeout=10) as stream:
        lines = stream.iter_lines()
        read_events(lines, 1)
        assert server.stop(timeout=2.5), "within the time before open requests are cancelled"
        assert not [line for line in lines if line.startswith("data")]
    assert world.board.subscribers == 0


def test_a_taken_port_is_an_error_at_start(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        ApiServer(world.app, world.board, port=taken.getsockname()[1]).start()


def test_a_slow_reader_gets_only_the_newest_view() -> None:
    """However many ticks pass between two reads, a subscription holds one view per pool."""

    async def run() -> list[PoolView] | None:
        board = Board()
        with board.subscribe() as stream:
            for i in range(100):
                board.publish(replace(POOL, time=NOW + i))
            await asyncio.sleep(0)
            return await stream.next()

    views = asyncio.run(run())
    assert views is not None
    assert [v.time for v in views] == [NOW + 99]


def test_a_closed_board_ends_streams_that_open_later() -> None:
    async def run() -> list[PoolView] | None:
        board = Board()
        board.close()
        with board.subscribe() as stream:
            return await stream.next()

    assert asyncio.run(run()) is None


def test_listeners_hear_every_view() -> None:
    """The metrics count ticks, so they must not be coalesced as the streams are."""
    board, heard = Board(), []
    board.listen(heard.append)
    for i in range(3):
        board.publish(replace(POOL, time=NOW + i))
    assert [v.time for v in heard] == [NOW, NOW + 1, NOW + 2]


def test_the_board_survives_a_stream_whose_event_loop_has_ended() -> None:
    """Publishing never raises because a reader is gone, and the board counts its open streams."""
    board = Board(max_subscriptions=1)

    async def open_only() -> None:
        board.subscribe()
        with pytest.raises(BoardFull):
            board.subscribe()

    asyncio.run(open_only())
    board.publish(POOL)
    assert board.pools() == [POOL]
