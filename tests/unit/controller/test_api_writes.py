"""Labels and orders over HTTP: who may, what is refused and why, and what is sent on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.auth import Tokens
from controller.view import Wanted
from tests.support_api import LABELLER, NOW, OPERATOR, VIEWER, ApiWorld

LABEL = {"request_id": "r1", "metric": "answer_correct", "score": 1, "scorer_version": "v1"}
ORDER = {"action": "freeze", "why": "a new drafter is rolled out"}
ACTIONS = "/v1/pools/demo/actions"


@pytest.fixture
def world() -> ApiWorld:
    world = ApiWorld()
    world.history.requests = {f"r{i}": ("demo", "default") for i in range(2_000)}
    return world


# -- who may write -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [("/v1/quality", LABEL), (ACTIONS, ORDER)])
def test_nobody_writes_without_tokens(path: str, body: dict[str, Any]) -> None:
    """The refusal says how to turn writing on."""
    world = ApiWorld(tokens=None)
    answer = world.post(path, body, OPERATOR)
    assert answer.status_code == 403
    assert "--tokens-file" in answer.json()["detail"]
    assert world.sent == [] and world.history.log == []


@pytest.mark.parametrize(("path", "body"), [("/v1/quality", LABEL), (ACTIONS, ORDER)])
def test_a_wrong_token_is_refused(world: ApiWorld, path: str, body: dict[str, Any]) -> None:
    for token in (None, "guess", OPERATOR[:-1], ""):
        answer = world.post(path, body, token)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert world.sent == [] and world.history.log == []


def test_roles_are_held_to(world: ApiWorld) -> None:
    """A viewer may not label, a labeller may not order; an operator may do both."""
    assert world.post("/v1/quality", LABEL, VIEWER).status_code == 403
    assert world.post(ACTIONS, ORDER, LABELLER).status_code == 403
    assert "needs the role operator" in world.post(ACTIONS, ORDER, LABELLER).json()["detail"]
    assert world.post("/v1/quality", LABEL, LABELLER).status_code == 202
    assert world.post("/v1/quality", LABEL, OPERATOR).status_code == 202
    assert world.post(ACTIONS, ORDER, OPERATOR).status_code == 201


def test_a_token_that_writes_too_often_waits(world: ApiWorld) -> None:
    """Twenty at once; the next says when to come again, and another token is not held up."""
    answers = [world.post("/v1/quality", LABEL, LABELLER) for _ in range(21)]
    assert [a.status_code for a in answers] == [202] * 20 + [429]
    assert answers[-1].headers["retry-after"] == "1"
    assert world.post("/v1/quality", LABEL, OPERATOR).status_code == 202
    world.seconds += 1.0
    assert world.post("/v1/quality", LABEL, LABELLER).status_code == 202


def test_tokens_are_never_logged(world: ApiWorld, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for token in (OPERATOR, LABELLER, "a-token-that-nobody-has"):
            world.post(ACTIONS, ORDER, token)
            world.post("/v1/quality", LABEL | {"request_id": "nobody"}, token)
    assert "alice orders freeze" in caplog.text
    assert not any(secret in caplog.text for secret in (OPERATOR, LABELLER, "a-token-that-nobody-has"))


def test_reading_can_need_a_token() -> None:
    """Then everything but the page and the probes is closed, and any known token opens it."""
    world = ApiWorld(read_tokens=Tokens(text="viewer prometheus scrape-secret-00001"))
    closed = (
        "/v1/pools",
        "/v1/pools/demo",
        "/v1/pools/demo/why",
        "/v1/pools/demo/decisions",
        ACTIONS,
        "/v1/quality/wanted",
        "/metrics",
        "/v1/events",
    )
    for path in closed:
        assert world.get(path).status_code == 401
        assert world.get(path, "wrong-wrong-wrong-wrong").status_code == 401
        if path != "/v1/events":
            assert world.get(path, "scrape-secret-00001").status_code == 200
            assert world.get(path, VIEWER).status_code == 200
    for path in ("/", "/healthz", "/readyz", "/static/app.js"):
        assert world.get(path).status_code != 401
    assert world.post(ACTIONS, ORDER, "scrape-secret-00001").status_code == 401, "a read token writes nothing"


def test_a_fault_in_the_tokens_is_told_by_the_probe(tmp_path: Path) -> None:
    """The controller stays ready: the last good tokens are in force."""
    path = tmp_path / "tokens"
    path.write_text(f"operator alice {OPERATOR}\n")
    world = ApiWorld(tokens=Tokens(path))
    path.write_text("operator alice\n\n")
    assert world.post(ACTIONS, ORDER, OPERATOR).status_code == 201
    answer = world.get("/readyz")
    assert answer.status_code == 200
    assert "tokens:1: expected 'role name token'" in answer.json()["reasons"][0]
    assert OPERATOR not in answer.text


def test_a_large_body_is_refused_however_it_comes(world: ApiWorld) -> None:
    """Announced, or sent in parts without a length."""
    assert world.ask("POST", "/v1/quality", LABELLER, content=b"x" * (1 << 20 | 1)).status_code == 413

    async def parts() -> Any:
        for _ in range(40):
            yield b"x" * 40_000

    assert world.ask("POST", "/v1/quality", LABELLER, content=parts()).status_code == 413


# -- labels ------------------------------------------------------------------------------------------------------------


def test_a_label_is_looked_up_and_sent_on(world: ApiWorld) -> None:
    """Pool and class come from the request, the scorer from the token, the time from the clock."""
    assert world.post("/v1/quality", LABEL, LABELLER).json() == {"accepted": 1, "duplicates": 0, "refused": []}
    (score,) = world.sent
    assert (score.pool, score.traffic_class, score.branch, score.scorer) == ("demo", "default", "served", "judge")
    assert (score.score, score.scorer_version, score.time) == (1.0, "v1", NOW)


def test_a_batch_refuses_one_by_one(world: ApiWorld) -> None:
    """An unknown request does not hold up the others; a repeated label counts once, a contradicting one is refused."""
    labels = [
        LABEL,
        LABEL | {"request_id": "nobody"},
        LABEL | {"branch": "fork", "score": 0.5},
        LABEL,
        LABEL | {"score": 0},
        LABEL | {"score": 0, "scorer_version": "v2"},
        LABEL | {"request_id": "r2", "pool": "elsewhere", "traffic_class": "x"},
        LABEL | {"request_id": "r3", "traffic_class": "code"},
    ]
    body = world.post("/v1/quality", {"labels": labels}, LABELLER).json()
    assert (body["accepted"], body["duplicates"]) == (3, 1)
    assert {(r["index"], r["request_id"]) for r in body["refused"]} == {(1, "nobody"), (4, "r1"), (6, "r2"), (7, "r3")}
    reasons = {r["index"]: r["reason"] for r in body["refused"]}
    assert "unknown request" in reasons[1] and "new scorer_version" in reasons[4] and "no pool" in reasons[6]
    assert [(s.branch, s.score, s.scorer_version) for s in world.sent] == [
        ("served", 1.0, "v1"),
        ("fork", 0.5, "v1"),
        ("served", 0.0, "v2"),
    ]


def test_the_same_labels_again_change_nothing(world: ApiWorld) -> None:
    """A judge whose answer got lost sends its batch again."""
    batch = {"labels": [LABEL | {"request_id": f"r{i}"} for i in range(50)]}
    assert world.post("/v1/quality", batch, LABELLER).json()["accepted"] == 50
    assert world.post("/v1/quality", batch, LABELLER).json() == {"accepted": 0, "duplicates": 50, "refused": []}
    assert len(world.sent) == 50


def test_labels_that_could_not_be_sent_are_taken_the_next_time(world: ApiWorld) -> None:
    """A stream that is away is a 503 that says nothing of its address, and nothing counts as had."""
    world.stream_down = True
    answer = world.post("/v1/quality", LABEL, LABELLER)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "secret" not in answer.text
    world.stream_down = False
    assert world.post("/v1/quality", LABEL, LABELLER).json()["accepted"] == 1


def test_a_label_that_says_where_it_belongs_needs_no_history(world: ApiWorld) -> None:
    world.history.broken = True
    assert world.post("/v1/quality", LABEL, LABELLER).status_code == 503
    full = LABEL | {"pool": "demo", "traffic_class": "default", "scorer": "tests", "time": NOW - 5}
    assert world.post("/v1/quality", full, LABELLER).json()["accepted"] == 1
    assert (world.sent[0].scorer, world.sent[0].time) == ("tests", NOW - 5)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"score": 1.2}, "score"),
        ({"score": -0.1}, "score"),
        ({"score": "1"}, "score"),
        ({"score": True}, "score"),
        ({"score": None}, "score"),
        ({"branch": "holdback"}, "branch"),
        ({"metric": ""}, "metric"),
        ({"request_id": "a b"}, "request_id"),
        ({"arm": "lenient"}, "arm"),
        ({"scorer_version": 3}, "scorer_version"),
        ({"time": -1}, "time"),
    ],
)
def test_an_impossible_label_is_refused_with_its_place(world: ApiWorld, change: dict[str, Any], where: str) -> None:
    """In a batch the place says which; nothing of such a batch is taken."""
    single = world.post("/v1/quality", LABEL | change, LABELLER)
    assert (single.status_code, single.json()["detail"][0]["loc"][-1]) == (422, where)
    batch = world.post("/v1/quality", {"labels": [LABEL, LABEL | change]}, LABELLER)
    assert batch.status_code == 422
    assert batch.json()["detail"][0]["loc"][-3:] == ["labels", 1, where]
    assert world.sent == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_score_that_is_no_number_is_refused(world: ApiWorld, number: str) -> None:
    """Such text is no JSON, but parsers take it; the answer must not repeat it."""
    text = json.dumps(LABEL).replace(": 1,", f": {number},")
    answer = world.ask("POST", "/v1/quality", LABELLER, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert world.sent == []


def test_a_batch_has_a_limit(world: ApiWorld) -> None:
    many = [LABEL | {"request_id": f"r{i}"} for i in range(1_001)]
    assert world.post("/v1/quality", {"labels": many}, LABELLER).status_code == 422
    assert world.post("/v1/quality", {"labels": []}, LABELLER).status_code == 422
    assert world.post("/v1/quality", {"labels": many[:1_000]}, LABELLER).json()["accepted"] == 1_000


def test_judges_hear_nothing_of_arms(world: ApiWorld) -> None:
    """Neither labels nor what is wanted says which branch was lenient, though the looked-up request knows."""
    world.wanted = (Wanted("r1", "default", ("fork", "served"), NOW - 60, NOW + 840),)
    answers: list[httpx.Response] = [
        world.post("/v1/quality", {"labels": [LABEL, LABEL | {"request_id": "nobody"}]}, LABELLER),
        world.post("/v1/quality", LABEL | {"arm": "holdback"}, LABELLER),
        world.get("/v1/quality/wanted"),
    ]
    for answer in answers:
        assert not any(arm in answer.text for arm in ("holdback", "lenient", "untouched"))


def test_wanted_says_what_and_what_for(world: ApiWorld) -> None:
    world.wanted = tuple(Wanted(f"r{i}", "default", ("served", "fork"), NOW - i, NOW + 840) for i in range(5))
    body = world.get("/v1/quality/wanted?pool=demo&class=default&limit=2").json()
    assert [w["request_id"] for w in body["wanted"]] == ["r0", "r1"]
    assert body["wanted"][0]["branches"] == ["served", "fork"]
    assert body["wanted"][0]["metric"] == "answer_correct"
    (need,) = body["needs"]
    assert need["labels_needed"] == 400
    assert "95% confidence" in need["certifies"]
    assert world.get("/v1/quality/wanted?pool=nope").status_code == 404
    assert world.get("/v1/quality/wanted?pool=demo&class=nope").status_code == 404


# -- orders ------------------------------------------------------------------------------------------------------------


def test_an_order_is_on_the_record(world: ApiWorld) -> None:
    """With the token's name, the reason and the loop's time; the newest first when read."""
    made = world.post(ACTIONS, ORDER | {"traffic_class": "default"}, OPERATOR)
    assert made.status_code == 201
    assert made.json() == {
        "id": 1,
        "pool": "demo",
        "traffic_class": "default",
        "action": "freeze",
        "amount": None,
        "who": "alice",
        "why": "a new drafter is rolled out",
        "time": NOW,
    }
    world.post(ACTIONS, {"action": "resume", "why": "it is rolled out"}, OPERATOR)
    assert [(row["id"], row["action"], row["traffic_class"]) for row in world.get(ACTIONS).json()] == [
        (2, "resume", "*"),
        (1, "freeze", "default"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"why": None},
        {"why": "  \n "},
        {"why": "x" * 501},
        {"action": "open"},
        {"who": "somebody else"},
        {"traffic_class": "a b"},
        {"amount": 1.0},
        {"action": "adjust_budget"},
        {"action": "reset_budget", "amount": 1.0},
    ],
)
def test_an_incomplete_order_is_refused(world: ApiWorld, change: dict[str, Any]) -> None:
    """A reason is required, and who ordered it is the token's name and nobody else's."""
    body = {k: v for k, v in (ORDER | change).items() if v is not None}
    assert world.post(ACTIONS, body, OPERATOR).status_code == 422
    assert world.history.log == []


def test_an_adjustment_says_how_much(world: ApiWorld) -> None:
    body = {"action": "adjust_budget", "amount": 2.5, "why": "a test run was charged"}
    assert world.post(ACTIONS, body, OPERATOR).json()["amount"] == 2.5


def test_an_order_for_nothing_there_is_refused(world: ApiWorld) -> None:
    assert world.post("/v1/pools/nope/actions", ORDER, OPERATOR).status_code == 404
    assert world.post(ACTIONS, ORDER | {"traffic_class": "chat"}, OPERATOR).status_code == 404


def test_while_the_history_is_away_the_leader_obeys_all_the_same(world: ApiWorld) -> None:
    """It writes the order down later; a controller that does not lead the pool has to refuse."""
    world.history.broken = True
    answer = world.post(ACTIONS, ORDER, OPERATOR)
    assert answer.status_code == 503
    assert "secret" not in answer.text
    world.leads = True
    answer = world.post(ACTIONS, ORDER, OPERATOR)
    assert (answer.status_code, answer.json()["id"]) == (201, 0)
    assert [(a.action, a.who, a.why) for a in world.obeyed] == [("freeze", "alice", ORDER["why"])]
