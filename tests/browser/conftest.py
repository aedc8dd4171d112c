"""A browser, a page that listens to its console, and a controller without a loop."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.support_page import ARGUMENTS, World

expect.set_options(timeout=30_000)  # a bound for what never comes; a busy machine may take its time


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
    page.set_default_timeout(30_000)
    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
