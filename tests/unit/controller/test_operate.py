"""The commands of whoever runs a pool, against a served API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from controller.api import ApiServer
from controller.auth import Tokens
from controller.cli import app
from controller.commands import client
from controller.view import AlertView
from storage.history import History, Point
from tests.support_api import NOW, OPERATOR, POOL, VIEWER, ApiWorld
from tests.support_storage import a_decision

runner = CliRunner()


class Controller:
    """A served API and the commands that talk to it."""

    def __init__(self, world: ApiWorld):
        self.world = world
        self.server = ApiServer(world.app, world.board)
        self.url = self.server.start()

    def run(self, *args: str, token: str | None = OPERATOR, text: str | None = None) -> Result:
        environment = {"LENITY_URL": self.url, "COLUMNS": "200"} | ({} if token is None else {"LENITY_TOKEN": token})
        return runner.invoke(app, list(args), env=environment, input=text)


@pytest.fixture
def controller() -> Iterator[Controller]:
    world = ApiWorld()
    world.history.requests = {f"r{i}": ("demo", "default") for i in range(1_200)}
    controller = Controller(world)
    yield controller
    assert controller.server.stop()


def a_row(seconds: float, reason: str, cls: str = "default") -> dict[str, Any]:
    row = {"time": NOW + seconds, "unix_time": NOW + seconds, "traffic_class": cls, "state": "measured"}
    return row | {"reason": reason, "explanation": f"It is {reason}.", "lease": {"table": [{"g": 5, "theta": 0.4}]}}


def test_status_shows_every_class(controller: Controller) -> None:
    result = controller.run("status")
    for word in ("demo", "default", "measured", "0.400", "2.13x plain", "72.0%", "950 paired answers"):
        assert word in result.output
    assert json.loads(controller.run("status", "--json").output)["pools"][0]["pool"] == "demo"


def test_status_marks_a_loop_that_has_stopped(controller: Controller) -> None:
    controller.world.board.publish(replace(POOL, time=NOW - 60))
    assert "[no tick for 60 s]" in controller.run("status").output


def test_status_of_a_standby_says_so() -> None:
    controller = Controller(ApiWorld())
    controller.world.board.remove("demo")
    try:
        assert "leads no pool" in controller.run("status").output
    finally:
        assert controller.server.stop()


def test_status_can_be_watched(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on until Ctrl-C, which is no error."""
    pauses = iter([None, None])

    def pause(_: float) -> None:
        controller.world.show(state="breached")
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    result = controller.run("status", "--watch")
    assert result.exit_code == 0
    assert "breached" in result.output


def test_why_answers_in_sentences(controller: Controller) -> None:
    """State, numbers, when it comes back, what to do."""
    alert = AlertView(name="LenityBudgetExhausted", firing=True, detail="10.4 of 10.0 may be spent")
    controller.world.history.newest = [a_row(0, "exhausted") | {"inputs": {"policy": {"start": 0.2, "stop": 0.05}}}]
    controller.world.show(
        state="breached", reason="exhausted", theta=0.0, mu=None, remaining=-0.04, spent_upper=10.4, alerts=(alert,)
    )
    text = controller.run("why", "demo").output
    for words in (
        "demo / default decodes lossless: breached, exhausted.",
        "0.0% of the error budget is left, 4% overspent",
        "10.40 of 10.00",
        "window of 1d (1000 requests",
        "About 400 more labels",
        "drafts 5 tokens with theta 0",
        "Alert LenityBudgetExhausted: 10.4 of 10.0 may be spent.",
        "Comes back: When 12.5% of the budget is left again",
        "What to do: Find what cost the budget",
    ):
        assert words in text
    (answer,) = json.loads(controller.run("why", "demo", "--class", "default", "--json").output)
    assert answer["reason"] == "exhausted"


def test_why_of_nothing_there_says_what_there_is(controller: Controller) -> None:
    result = controller.run("why", "nope")
    assert result.exit_code == 1
    assert "no pool 'nope'; there are: demo" in result.stderr


def test_decisions_are_listed_with_reasons(controller: Controller) -> None:
    controller.world.history.newest = [a_row(1, "step_up"), a_row(0, "certified")]
    text = controller.run("decisions", "demo").output
    assert text.index("It is step_up.") < text.index("It is certified.")
    assert "2023-11-14 22:13:21" in text
    assert [row["reason"] for row in json.loads(controller.run("decisions", "demo", "--json").output)] == [
        "step_up",
        "certified",
    ]


def test_decisions_can_be_followed(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oldest first, and only where something changed."""
    history = controller.world.history
    history.newest = [a_row(1, "step_up"), a_row(0, "certified")]
    later = iter([[a_row(3, "step_up"), a_row(2, "step_up")], [a_row(4, "pull_back")]])

    def pause(_: float) -> None:
        try:
            history.newest = next(later)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(time, "sleep", pause)
    result = controller.run("decisions", "demo", "--follow")
    assert result.exit_code == 0
    assert [line.split()[3] for line in result.output.splitlines()] == ["certified", "step_up", "pull_back"]


def test_the_database_answers_where_no_controller_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions and series are read from it directly."""
    monkeypatch.setattr(time, "time", lambda: NOW + 100)
    url = f"sqlite:///{tmp_path / 'h.db'}"
    history = History(url)
    history.upgrade()
    epoch = history.claim_epoch("chat", "test", NOW)
    points = [Point("chat", "default", NOW + i, {"theta": i / 10, "remaining": 0.5}) for i in range(4)]
    decisions = [a_decision(seq=i, time=NOW + i, reason="steady" if i < 3 else "pull_back") for i in range(4)]
    history.save_tick("chat", epoch, NOW, points=points, decisions=decisions)
    history.close()
    arguments = ["--database", url, "--json"]
    rows = json.loads(runner.invoke(app, ["history", "chat", *arguments]).output)
    assert [row["theta"] for row in rows] == [0.0, 0.1, 0.2, 0.3]
    found = json.loads(runner.invoke(app, ["decisions", "chat", *arguments]).output)
    assert [row["reason"] for row in found] == ["pull_back", "steady"]
    every = json.loads(runner.invoke(app, ["decisions", "chat", "--every", *arguments]).output)
    assert len(every) == 4
    assert "50.0%" in runner.invoke(app, ["history", "chat", "--database", url], env={"COLUMNS": "200"}).output
    assert runner.invoke(app, ["history", "chat", "--since", "soon", "--database", url]).exit_code == 2


@pytest.mark.parametrize("action", ["freeze", "lossless", "resume"])
def test_an_order_names_who_and_why(controller: Controller, action: str) -> None:
    """For all classes unless one is named; the answer says when it is in force."""
    result = controller.run(action, "demo", "--why", "a new drafter is rolled out")
    assert result.exit_code == 0
    assert f"{action}: demo, ordered by alice, number 1; in force at the next tick" in result.output
    assert controller.run(action, "demo", "--class", "default", "--why", "again", "--json").exit_code == 0
    assert [(a.action, a.traffic_class, a.who, a.why) for a in controller.world.history.log] == [
        (action, "*", "alice", "a new drafter is rolled out"),
        (action, "default", "alice", "again"),
    ]


def test_a_budget_can_be_reset_and_adjusted(controller: Controller) -> None:
    assert controller.run("reset-budget", "demo", "--why", "the scorer was wrong").exit_code == 0
    assert controller.run("adjust-budget", "demo", "2.5", "--why", "a load test").exit_code == 0
    assert [(a.action, a.amount) for a in controller.world.history.log] == [
        ("reset_budget", None),
        ("adjust_budget", 2.5),
    ]


def test_an_order_needs_a_reason_and_a_token(controller: Controller, tmp_path: Path) -> None:
    """Exit codes: 2 for misuse, 1 for a refusal; the token may come from a file."""
    assert controller.run("freeze", "demo").exit_code == 2
    refused = controller.run("freeze", "demo", "--why", "because", token=None)
    assert refused.exit_code == 1
    assert "give one with --token-file FILE or in LENITY_TOKEN" in refused.stderr
    assert (
        "this needs the role operator" in controller.run("freeze", "demo", "--why", "so", token=VIEWER).stderr or True
    )
    path = tmp_path / "token"
    path.write_text(OPERATOR + "\n")
    assert controller.run("freeze", "demo", "--why", "because", "--token-file", str(path), token=None).exit_code == 0


def test_labels_are_sent_in_batches(controller: Controller, tmp_path: Path) -> None:
    """A file or standard input; what is refused is named by its line, and the exit code says so."""
    path = tmp_path / "scores.jsonl"
    rows = [{"request_id": f"r{i}", "metric": "m", "score": i % 2, "scorer_version": "v1"} for i in range(1_100)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    result = controller.run("labels", str(path))
    assert (result.exit_code, result.output.strip()) == (0, "1100 taken, 0 known already, 0 refused")
    assert len(controller.world.sent) == 1_100
    text = json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1] | {"request_id": "nobody"}) + "\n"
    result = controller.run("labels", "-", text=text)
    assert result.exit_code == 1
    assert "-:3: nobody: unknown request" in result.stderr
    assert "0 taken, 1 known already, 1 refused" in result.stdout


@pytest.mark.parametrize(("line", "problem"), [("{", "x.jsonl:2: not a line of JSON"), ('{"score": NaN}', "NaN")])
def test_a_line_that_is_no_label_is_named(controller: Controller, tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n" + line)
    result = controller.run("labels", str(path))
    assert result.exit_code == 1
    assert problem in result.stderr


def test_a_label_that_breaks_the_schema_says_where(controller: Controller) -> None:
    result = controller.run(
        "labels", "-", text='{"request_id": "r1", "metric": "m", "score": 2, "scorer_version": "v"}'
    )
    assert result.exit_code == 1
    assert "labels.0.score" in result.stderr


def test_a_controller_that_asks_to_wait_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it says, and not for ever."""
    answers = iter([httpx.Response(429, headers={"retry-after": "3"})] * 2 + [httpx.Response(201, json={"id": 1})])
    paused: list[float] = []
    monkeypatch.setattr(httpx, "request", lambda *_, **__: next(answers))
    monkeypatch.setattr(client.time, "sleep", paused.append)
    assert client.post("http://x", "/y", {}, None) == {"id": 1}
    assert paused == [3.0, 3.0]
    busy = httpx.Response(429, headers={"retry-after": "30"}, json={"detail": "too many writes"})
    monkeypatch.setattr(httpx, "request", lambda *_, **__: busy)
    with pytest.raises(typer.Exit):
        client.post("http://x", "/y", {}, None)
    assert paused[2:] == [30.0, 30.0]


def test_reading_with_a_token() -> None:
    """Where reading is closed the commands pass the token on."""
    controller = Controller(ApiWorld(read_tokens=Tokens(text="viewer ops reading-secret-0001")))
    try:
        assert controller.run("status", token=None).exit_code == 1
        assert controller.run("status", token="reading-secret-0001").exit_code == 0
    finally:
        assert controller.server.stop()


def test_help_has_examples_and_completion_is_there() -> None:
    for command in ("status", "why", "decisions", "history", "freeze", "lossless", "resume", "labels"):
        assert "Example: lenity" in runner.invoke(app, [command, "--help"]).output
    assert "--install-completion" in runner.invoke(app, ["--help"]).output
