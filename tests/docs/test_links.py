"""Links between pages and to files lead somewhere, and every page can be reached from the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import PAGES, ROOT


def links(page: Path) -> list[str]:
    """What a page links to within the repository, fences left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [t for t in re.findall(r"\]\(\s*([^)\s]+)\s*\)", text) if "://" not in t]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made for Markdown on the web."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file or directory that is there, and to a heading that is there."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_every_page_is_reached_from_the_index() -> None:
    """By links, from docs/README.md; and the index from the README."""
    index = ROOT / "docs" / "README.md"
    assert index in {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    found, waiting = set(), [index]
    while waiting:
        page = waiting.pop()
        if page not in found and page.suffix == ".md" and page.is_file():
            found.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link[0] != "#"]
    missing = {p.relative_to(ROOT) for p in PAGES if (ROOT / "docs") in p.parents} - {
        p.relative_to(ROOT) for p in found if ROOT in p.parents
    }
    assert not {m for m in missing if m.parts[1] != "decisions"}
