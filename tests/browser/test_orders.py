"""Orders and tokens on the status page, and whether everyone can use it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from controller.auth import Tokens
from controller.view import AlertView
from tests.support_page import CLASS, SECRET, World

pytestmark = pytest.mark.peer("chromium")


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
