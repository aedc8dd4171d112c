"""The status page in a real browser, over a board that the test publishes on."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from prometheus_client import CollectorRegistry

from controller.api import ApiServer, create_app
from controller.auth import Tokens
from controller.view import AlertView, Board, ClassView, PoolView

pytestmark = pytest.mark.peer("chromium")

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
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
    acceptance=0.875,
    predicted_speedup_plain=2.13,
    predicted_speedup_lossless=1.19,
    spent_upper=2.8,
    budget=10.0,
    remaining=0.72,
    alerts=(AlertView(name="burn 1h/5m", firing=False, detail="Burn 0.2 of 14.4 allowed."),),
)


@dataclass(frozen=True)
class Row:
    time: float
    values: dict[str, float | None]


SECRET = "operator-secret-0001"


@dataclass
class World:
    """A controller without a loop: what the test publishes is what the page sees."""

    board: Board = field(default_factory=Board)
    rows: list[Row] = field(default_factory=list)
    fired: list[dict[str, object]] = field(default_factory=list)
    revisions: list[dict[str, object]] = field(default_factory=list)
    decided: list[dict[str, object]] = field(default_factory=list)
    ordered: list[dict[str, object]] = field(default_factory=list)
    lag: float = 0.0
    interval_s: float = 60.0  # long, so that a slow machine is not taken for a stopped loop
    read_tokens: Tokens | None = None
    server: ApiServer | None = None
    url: str = ""

    def serve(self, port: int = 0) -> None:
        app = create_app(
            self.board,
            self,
            ready=lambda: (True, []),
            clock=lambda: time.time() + self.lag,
            registry=CollectorRegistry(),
            tokens=Tokens(text=f"operator alice {SECRET}; viewer guest viewer-secret-000001"),
            read_tokens=self.read_tokens,
        )
        self.server = ApiServer(app, self.board, port=port)
        self.url = self.server.start()

    def stop(self) -> None:
        assert self.server is not None
        assert self.server.stop()

    def publish(self, *classes: ClassView, pool: str = "demo", **changes: object) -> None:
        now = time.time() + self.lag
        self.rows += [Row(now, {"theta": c.theta, "remaining": c.remaining, "g": float(c.g)}) for c in classes[:1]]
        view = PoolView(
            pool=pool,
            policy_revision=1,
            policy_source="policy.yaml",
            policy_rejected=None,
            epoch=3,
            leader=True,
            time=now,
            tick_seconds=0.02,
            interval_s=self.interval_s,
            last_telemetry_age_s=0.4,
            stream_lag=0,
            dead_letters=0,
            classes=classes,
        )
        self.board.publish(replace(view, **changes))  # type: ignore[arg-type]

    def points(self, pool: str, cls: str, since: float, limit: int, *_: object) -> list[Row]:
        return [row for row in self.rows if row.time > since][-limit:]

    def decisions(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[object]:
        return []

    def decision_changes(self, pool: str, cls: str | None, since: float, limit: int) -> list[dict[str, object]]:
        return self.decided[::-1]

    def alerts(self, pool: str, cls: str | None, since: float | None, limit: int) -> list[dict[str, object]]:
        return self.fired

    def policy_revisions(self, pool: str, limit: int) -> list[dict[str, object]]:
        return self.revisions

    def find_request(self, request_id: str, pool: str | None = None) -> None:
        return None

    def operator_log(self, pool: str, limit: int) -> list[dict[str, object]]:
        return self.ordered[::-1]

    def add_operator_action(
        self, pool: str, traffic_class: str, action: str, who: str, why: str, now: float, amount: float | None = None
    ) -> int:
        row = {"pool": pool, "traffic_class": traffic_class, "action": action, "who": who, "why": why, "time": now}
        self.ordered.append(row | {"id": len(self.ordered) + 1, "amount": amount})
        return len(self.ordered)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.serve()
    yield world
    world.stop()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console complained about; CSP violations and failed loads are among it."""
    return []


@pytest.fixture
def page(browser: Browser, complaints: list[str]) -> Iterator[Page]:
    def heard(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            complaints.append(message.text)

    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(10_000)
    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()


def test_the_page_shows_what_the_controller_says(world: World, page: Page, complaints: list[str]) -> None:
    """State in plain words, knobs, speed, budget and alerts; everything is served locally and nothing complains."""
    world.publish(CLASS)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(world.url)
    expect(page.locator("#mode")).to_have_text("Lenient")
    expect(page.locator("#state")).to_have_text("Measured")
    expect(page.locator("#explanation")).to_have_text(CLASS.explanation)
    expect(page.locator("#budget-left")).to_have_text("72.0%")
    detail = page.locator("#detail")
    for words in ("2.13×", "1.19×", "87.5%", "5 tokens", "token_v3", "2.80 of 10.0", "None firing", "burn 1h/5m"):
        expect(detail).to_contain_text(words)
    expect(page.get_by_role("progressbar", name="Error budget left")).to_have_attribute("aria-valuenow", "72")
    expect(page.get_by_role("img", name=re.compile("Leniency θ, newest: θ 0.40"))).to_be_visible()
    expect(page.locator("#glance")).to_be_hidden()
    expect(page.locator("#link-text")).to_have_text("Live")
    assert all(url.startswith(world.url) for url in asked)
    assert complaints == []


def test_the_page_follows_without_a_reload(world: World, page: Page, complaints: list[str]) -> None:
    """A pull-back appears in the words, in the knobs, in the curves and for a screen reader."""
    world.publish(CLASS)
    page.goto(world.url)
    expect(page.locator("#mode")).to_have_text("Lenient")
    page.evaluate("window.same = true")
    firing = AlertView(name="burn 1h/5m", firing=True, detail="Burn 16.2 exceeds 14.4.")
    world.publish(
        replace(
            CLASS,
            state="breached",
            explanation="The budget is spent.",
            theta=0.0,
            mu=None,
            remaining=-0.13,
            alerts=(firing,),
        )
    )
    expect(page.locator("#mode")).to_have_text("Lossless")
    expect(page.locator("#state")).to_have_text("Budget breached")
    expect(page.locator("#budget-left")).to_have_text("−13.0%")
    expect(page.locator("#detail")).to_contain_text("∞")
    expect(page.locator("#detail")).to_contain_text("burn 1h/5m: firing")
    expect(page.get_by_role("img", name=re.compile("Error budget left, newest: left −13.0%"))).to_be_visible()
    expect(page.locator("#announce")).to_have_text("Budget breached, lossless. Firing: burn 1h/5m.")
    assert page.evaluate("window.same") is True
    assert complaints == []


def test_a_dead_controller_is_said_and_so_is_its_return(world: World, page: Page) -> None:
    """What is shown is marked as old, with what the workers do; after a restart the page goes on by itself."""
    world.publish(CLASS)
    page.goto(world.url)
    expect(page.locator("#link-text")).to_have_text("Live")
    world.stop()
    notice = page.get_by_role("alert")
    expect(notice).to_contain_text(re.compile(r"Controller not answering since \d\d:\d\d:\d\d\."))
    expect(notice).to_contain_text("turn lossless when their lease of 10 s ends")
    expect(page.locator("body")).to_have_attribute("data-stale", "yes")
    expect(page.locator("#link-text")).to_have_text("Not answering")

    world.board = Board()
    world.serve(port=int(world.url.rsplit(":", 1)[1]))
    world.publish(replace(CLASS, explanation="Back again."))
    expect(page.locator("#explanation")).to_have_text("Back again.")
    expect(page.locator("body")).to_have_attribute("data-stale", "no")
    expect(notice).to_have_count(0)


def test_a_dead_loop_behind_a_living_server_is_said(world: World, page: Page, complaints: list[str]) -> None:
    """The controller answers, but has not ticked for ten minutes: the page must not look healthy."""
    world.publish(CLASS)
    world.lag = 600.0
    page.goto(world.url)
    expect(page.get_by_role("alert")).to_contain_text("The control loop has stopped: last tick at")
    expect(page.locator("body")).to_have_attribute("data-stale", "yes")
    world.publish(CLASS)
    expect(page.get_by_role("alert")).to_have_count(0)
    assert complaints == []


def test_a_refused_policy_and_a_degraded_part_are_shown(world: World, page: Page) -> None:
    world.publish(
        CLASS, policy_rejected="policy.yaml:7: objective.max_lossy: unknown key", degraded=("The database is down.",)
    )
    page.goto(world.url)
    notices = page.locator("#notices")
    expect(notices).to_contain_text("revision 1 stays active. policy.yaml:7: objective.max_lossy: unknown key")
    expect(notices).to_contain_text("Degraded (pool demo). The database is down.")
    world.publish(CLASS)
    expect(notices).to_be_empty()


def test_what_happened_is_told_newest_first(world: World, page: Page, complaints: list[str]) -> None:
    """Alerts and policy revisions come from the history, and again when the views show that there is more."""
    accepted = {"revision": 1, "time": 1000.0, "accepted": True, "source": "policy.yaml", "error": None}
    world.revisions = [accepted]
    world.publish(CLASS)
    page.goto(world.url)
    events = page.locator("#events li")
    expect(events).to_have_count(1)
    expect(events.first).to_contain_text("Policy revision 1 took effect. From policy.yaml.")
    alert = {"time": 2000.0, "traffic_class": "default", "name": "burn 1h/5m", "firing": True, "detail": "Burn 16."}
    refused = {"revision": 2, "time": 3000.0, "accepted": False, "source": "policy.yaml", "error": "policy.yaml:7: no"}
    world.fired, world.revisions = [alert], [refused, accepted]
    firing = AlertView(name="burn 1h/5m", firing=True, detail="Burn 16.")
    world.publish(replace(CLASS, alerts=(firing,)), policy_rejected="policy.yaml:7: no")
    expect(events).to_have_count(3)
    expect(events.nth(0)).to_contain_text("Policy edit refused (revision 2). policy.yaml:7: no")
    expect(events.nth(1)).to_contain_text("Alert: burn 1h/5m (default). Burn 16.")
    assert complaints == []


def test_decisions_and_orders_are_told_in_sentences(world: World, page: Page, complaints: list[str]) -> None:
    """Each says what it was, for which class, and why; an order names who gave it."""
    world.decided = [
        {
            "time": 1000.0 + i,
            "traffic_class": "default",
            "reason": reason,
            "explanation": f"Because of {reason}.",
            "lease": {"table": [{"g": 5, "theta": 0.4}]},
        }
        for i, reason in enumerate(("certified", "step_up", "fast_burn"))
    ]
    world.add_operator_action("demo", "*", "freeze", "alice", "a new drafter", 1002.5)
    world.publish(CLASS)
    page.goto(world.url)
    events = page.locator("#events li")
    expect(events).to_have_count(3)
    expect(events.nth(0)).to_contain_text("alice ordered a freeze (all classes). “a new drafter”")
    expect(events.nth(1)).to_contain_text("Fast burn: lossless (default). Because of fast_burn. g 5, θ 0.40.")
    expect(events.nth(2)).to_contain_text("One step wider (default). Because of step_up.")
    expect(events.nth(2)).to_contain_text("One of 2 changes since")
    assert complaints == []


def test_the_policy_in_force_and_the_refused_one_are_shown(world: World, page: Page, complaints: list[str]) -> None:
    """The document, what it changed, and what the refused edit asked for."""
    texts = {3: "max_loss: 2\n", 2: "max_loss: 0.02\n", 1: "max_loss: 0.01\n"}
    world.revisions = [
        {"revision": n, "time": 1000.0 * n, "accepted": n < 3, "source": "p.yaml", "error": "too much", "text": text}
        for n, text in texts.items()
    ]
    world.publish(CLASS)
    page.goto(world.url)
    policy = page.locator("#policy")
    expect(policy).to_contain_text("Refused: revision 3")
    expect(policy).to_contain_text("In force: revision 2")
    policy.get_by_text("What it changed").click()
    expect(policy.locator(".plus").last).to_have_text("+max_loss: 0.02\n")
    assert complaints == []


def test_a_freeze_is_ordered_and_ended_under_a_token(world: World, page: Page) -> None:
    """A wrong token and a low role are refused in the dialog; the right one is asked for once."""
    world.publish(CLASS)
    page.goto(world.url)
    expect(page.get_by_role("button", name="Resume")).to_be_hidden()
    page.get_by_role("button", name="Freeze").click()
    dialog = page.get_by_role("dialog", name="Freeze: demo")
    dialog.get_by_label("Why").fill("a new drafter is rolled out")
    for wrong, words in (("wrong-wrong-wrong-wrong", "not known"), ("viewer-secret-000001", "needs the role operator")):
        dialog.get_by_label("Token").fill(wrong)
        dialog.get_by_role("button", name="Freeze").click()
        expect(dialog.get_by_role("alert")).to_contain_text(words)
    assert world.ordered == []
    dialog.get_by_label("Token").fill(SECRET)
    dialog.get_by_role("button", name="Freeze").click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#announce")).to_have_text("Freeze ordered by alice; in force at the next tick.")
    expect(page.locator("#events li").first).to_contain_text("alice ordered a freeze (all classes).")
    frozen = replace(CLASS, override="freeze", override_who="alice", override_why="a new drafter is rolled out")
    world.publish(frozen)
    expect(page.locator("#override")).to_have_text("Frozen. By alice: “a new drafter is rolled out”")
    page.get_by_role("button", name="Resume").click()
    dialog = page.get_by_role("dialog", name="Resume: demo")
    expect(dialog.get_by_label("Token")).to_be_hidden()
    dialog.get_by_label("only default").check()
    dialog.get_by_label("Why").fill("rolled out")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    assert [(o["action"], o["traffic_class"], o["who"], o["why"]) for o in world.ordered] == [
        ("freeze", "*", "alice", "a new drafter is rolled out"),
        ("resume", "default", "alice", "rolled out"),
    ]
    assert SECRET not in page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")


def test_a_token_is_kept_for_the_tab_only_if_asked(world: World, page: Page) -> None:
    world.publish(CLASS)
    page.goto(world.url)
    page.get_by_role("button", name="Force lossless").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Why").fill("wrong sums reported")
    dialog.get_by_label("Token").fill(SECRET)
    dialog.get_by_label("keep it for this tab").check()
    dialog.get_by_role("button", name="Force lossless").click()
    expect(dialog).to_be_hidden()
    page.reload()
    page.get_by_role("button", name="Freeze").click()
    expect(page.get_by_role("dialog").get_by_label("Token")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert [o["action"] for o in world.ordered] == ["lossless"]


def test_where_reading_needs_a_token_the_page_asks_for_it(page: Page) -> None:
    """And then shows and follows everything."""
    world = World(read_tokens=Tokens(text="viewer wall wall-screen-secret-01"))
    world.serve()
    try:
        world.publish(CLASS)
        page.goto(world.url)
        expect(page.locator("#placeholder")).to_contain_text("asks who reads")
        page.locator("#unlock").get_by_label("Token").fill("wall-screen-secret-01")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#mode")).to_have_text("Lenient")
        expect(page.locator("#link-text")).to_have_text("Live")
        world.publish(replace(CLASS, explanation="Followed with a token."))
        expect(page.locator("#explanation")).to_have_text("Followed with a token.")
    finally:
        world.stop()


def test_the_frontier_shows_where_the_knobs_stand(world: World, page: Page, complaints: list[str]) -> None:
    frontier = tuple((i / 100, 1.8 + i / 50) for i in range(12))
    world.publish(
        replace(CLASS, frontier=frontier, frontier_at=(0.03, 1.86), frontier_allowed=0.04, positions=(0.9, 0.8, 0.75))
    )
    page.goto(world.url)
    words = "Frontier, at 0.030 touches per token and 1.86× plain; 0.040 are allowed"
    expect(page.get_by_role("img", name=words)).to_be_visible()
    expect(page.get_by_role("img", name="Acceptance by position, 1: 90%, 2: 80%, 3: 75%")).to_be_visible()
    world.publish(replace(CLASS, g=0, frontier=()))
    expect(page.get_by_role("img", name="Frontier: Not measured yet")).to_be_visible()
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_anyone_out(world: World, browser: Browser, scheme: str) -> None:
    """axe finds nothing serious or critical: on the page with every state, in the dialog, and while it is stale."""
    firing = AlertView(name="LenityBudgetBurn", firing=True, detail="Burn 16.2 exceeds 14.4.")
    frozen = {"override": "freeze", "override_who": "alice", "override_why": "a new drafter"}
    states = ("measured", "certified", "insufficient data", "uncertified", "breached", "no traffic", "disabled")
    classes = [replace(CLASS, traffic_class=s.replace(" ", "-"), state=s, burn={"1h": 2.0}) for s in states]
    world.revisions = [{"revision": 1, "time": 1e9, "accepted": True, "source": "p", "error": None, "text": "a: 1"}]
    world.fired = [{"time": 1e9, "traffic_class": "x", "name": "burn", "firing": True, "detail": "Burn 16."}]
    world.publish(replace(CLASS, alerts=(firing,), **frozen), *classes, policy_rejected="p.yaml:7: no")  # type: ignore[arg-type]
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    try:
        page.goto(world.url)
        expect(page.locator("#events li")).to_have_count(2)
        page.get_by_text("Document").click()
        assert serious(page) == []
        page.get_by_role("button", name="Force lossless").click()
        assert serious(page) == []
        page.keyboard.press("Escape")
        page.evaluate("document.body.dataset.stale = 'yes'")
        assert serious(page) == []
    finally:
        page.close()


def serious(page: Page) -> list[str]:
    """What axe holds against the page as it is, with the places."""
    found = Axe().run(page).response["violations"]
    return [
        f"{v['id']}: {[node['target'] for node in v['nodes']]}" for v in found if v["impact"] in ("serious", "critical")
    ]


def test_nothing_there_yet_is_not_an_error(world: World, page: Page, complaints: list[str]) -> None:
    """Before the first tick the page says so, and fills itself when it comes."""
    page.goto(world.url)
    expect(page.locator("#placeholder")).to_contain_text("its loop has not ticked yet")
    world.publish()
    expect(page.locator("#placeholder")).to_contain_text("No traffic yet")
    world.publish(CLASS)
    expect(page.locator("#mode")).to_have_text("Lenient")
    expect(page.locator("#placeholder")).to_be_hidden()
    assert complaints == []


def test_several_classes_are_a_table_that_the_keyboard_can_use(world: World, page: Page) -> None:
    """Each row leads to its class; the address keeps the choice over a reload."""
    world.publish(
        CLASS, replace(CLASS, traffic_class="code", state="disabled", explanation="Off by policy.", theta=0.0)
    )
    world.publish(replace(CLASS, explanation="Another pool."), pool="chat-7b")
    page.goto(world.url)
    expect(page.locator("#glance-rows tr")).to_have_count(3)
    link = page.get_by_role("link", name="demo / code")
    link.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#explanation")).to_have_text("Off by policy.")
    expect(link).to_have_attribute("aria-current", "true")
    page.reload()
    expect(page.locator("#detail-title")).to_have_text("demo / code")


def test_words_from_outside_stay_words(world: World, page: Page, complaints: list[str]) -> None:
    """Markup in names, explanations or errors is shown as text."""
    markup = '<img src="/x" onerror="window.hacked = true"><b>bold</b>'
    world.publish(replace(CLASS, explanation=markup, rule=markup), policy_rejected=markup)
    page.goto(world.url)
    expect(page.locator("#explanation")).to_have_text(markup)
    expect(page.locator("#notices")).to_contain_text(markup)
    assert page.evaluate("window.hacked") is None
    assert complaints == []


def test_polling_takes_over_where_no_stream_can_be_had(page: Page) -> None:
    """With every place on the board taken the page still follows, a little later."""
    world = World(board=Board(max_subscriptions=0))
    world.serve()
    try:
        world.publish(CLASS)
        page.goto(world.url)
        expect(page.locator("#link-text")).to_contain_text("Polling")
        world.publish(replace(CLASS, explanation="Followed by polling."))
        expect(page.locator("#explanation")).to_have_text("Followed by polling.")
    finally:
        world.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_sideways_scrolling(world: World, browser: Browser, scheme: str) -> None:
    """At 360 pixels nothing sticks out, and the colours follow the system."""
    world.publish(replace(CLASS, rule="token_v3"), policy_rejected="policy.yaml:7: " + "objective." * 30)
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)  # type: ignore[arg-type]
    try:
        page.goto(world.url)
        expect(page.locator("#mode")).to_have_text("Lenient")
        expect(page.locator(".chart")).to_have_count(14)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(n) for n in re.findall(r"\d+", background)[:3]) / (3 * 255)
        assert (brightness > 0.5) == (scheme == "light")
    finally:
        page.close()


def test_a_thousand_points_and_more_stay_smooth(world: World, page: Page) -> None:
    """An hour of ticks is drawn in well under a frame budget of a slow machine (a tenth of a second a chart)."""
    world.publish(CLASS)
    now = time.time()
    world.rows = [Row(now - 3600 + i, {"theta": i % 7 / 7, "remaining": 1 - i / 3600, "g": 4.0}) for i in range(3600)]
    page.goto(world.url)
    page.get_by_text("1 h", exact=True).click()
    expect(page.get_by_role("img", name=re.compile("Error budget left, newest: left 0.0%"))).to_be_visible()
    drawn = page.evaluate(
        """async () => {
          const {Charts} = await import('/static/charts.js');
          const box = document.createElement('div');
          document.body.append(box);
          const charts = new Charts(box);
          const times = Array.from({length: 3600}, (_, i) => i);
          const start = performance.now();
          const columns = {theta: times.map((t) => t % 7 / 7), remaining: times.map((t) => 1 - t / 3600)};
          charts.show(times, columns, 3600, 3600);
          await new Promise((done) => requestAnimationFrame(done));
          return performance.now() - start;
        }"""
    )
    assert drawn < 900
