"""The status page in a real browser, over a board that the test publishes on."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page, expect

from controller.view import AlertView, Board
from controller.why import ADVICE
from storage.records import KnobRow, Trial
from tests.support_page import CLASS, Row, World
from tests.support_storage import a_lease

pytestmark = pytest.mark.peer("chromium")


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


def test_a_hold_a_trial_and_the_batches_are_shown(world: World, page: Page, complaints: list[str]) -> None:
    """Until when it holds at least, which rule is tried, and the block length by batch size."""
    table = (KnobRow(1, 5, 0.0, 1.0), KnobRow(8, 3, 0.0, 1.0))
    trial = Trial(0.05, "speculative", "forgive", (KnobRow(8, 4, 0.1, 1.0),))
    held = time.time() + 600
    burning = replace(CLASS, state="breached", reason="fast_burn", held_until=held)
    world.publish(replace(burning, lease=a_lease("demo", table=table, trial=trial)))
    page.goto(world.url)
    expect(page.locator("#explanation")).to_have_text(CLASS.explanation)
    expect(page.locator("#returns")).to_have_text(re.compile(r"Not before \d\d:\d\d:\d\d UTC, in \d+m"))
    expect(page.locator("#advice")).to_have_text(ADVICE["fast_burn"])
    for words in ("forgive, 5%", "1: 5, 8: 3"):
        expect(page.locator("#detail")).to_contain_text(words)
    world.publish(replace(CLASS, reason="frozen"))
    expect(page.locator("#returns")).to_have_text("Only when an operator resumes it.")
    world.publish(replace(CLASS, reason="steady"))
    expect(page.locator(".guide")).to_be_hidden()
    assert complaints == []


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


def test_a_long_record_is_drawn_once_and_no_finer_than_it_is_seen(world: World, page: Page) -> None:
    """An hour of ticks: a chart draws once per update, and a few points per column of pixels, not all it has."""
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
          box.style.width = '400px';
          document.body.append(box);
          const charts = new Charts(box);
          const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          await frame();
          const plot = charts.charts[0].plot;
          let draws = 0;
          (plot.hooks.draw ??= []).push(() => draws++);
          let points = 0;
          const lineTo = Path2D.prototype.lineTo;
          Path2D.prototype.lineTo = function (...at) { points++; return lineTo.apply(this, at); };
          const ticks = (n) => Array.from({length: n}, (_, i) => i * 36000 / n);
          const counts = [];
          for (const n of [1000, 36000]) {
            const times = ticks(n);
            points = 0;
            charts.show(times, {remaining: times.map((t) => Math.sin(t))}, 36000, 36000);
            await frame();
            counts.push(points);
          }
          Path2D.prototype.lineTo = lineTo;
          return {draws, counts, width: plot.bbox.width};
        }"""
    )
    assert drawn["draws"] == 2
    few, many = drawn["counts"]
    assert few > 0
    assert many < 20 * drawn["width"], "36,000 points on a few hundred pixels"
