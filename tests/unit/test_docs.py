"""What the documents say about the code is so: files exist, links lead somewhere, quoted numbers come out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from controller.bounds import mixture_radius
from controller.speedup import block_efficiency, mixed_acceptance, speedup, vertical_cascade_tokens
from policies.load import parse_policy

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
MATHEMATICS = (ROOT / "docs" / "mathematics.md").read_text()


@pytest.mark.parametrize("path", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_links_in_a_document_exist(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"`((?:policies|storage|decoder|controller|bench|tests)/[\w/]+\.(?:py|yaml))`", text)
    links = [t.split("#")[0] for t in re.findall(r"\]\(([^)]+)\)", text) if "://" not in t]
    missing = [n for n in named if not (ROOT / n).exists()]
    missing += [link for link in links if link and not (path.parent / link).exists()]
    assert missing == []


def test_policies_in_the_reference_are_good() -> None:
    text = (ROOT / "docs" / "policy.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    whole = next(b for b in blocks if b.startswith("version"))
    parse_policy(whole)
    for part in blocks:
        if not part.startswith("version"):
            parse_policy(whole + part)


def test_numbers_of_the_errata_table_come_out() -> None:
    a = mixed_acceptance(0.25, 0.08)
    numbers = [a, speedup(a, 5, 0.05), block_efficiency(0.93, 5), vertical_cascade_tokens(0.8, 0.6, 4, 3)]
    stated = re.findall(r"\*\*(\.?\d+\.?\d*)\*\*", MATHEMATICS[MATHEMATICS.index("## 7. Errata") :])
    assert [f"{x:.2f}".removeprefix("0") for x in numbers] == stated


def test_the_premise_of_theorem_1_fails_as_stated() -> None:
    gaps = [
        min((g * 0.05 + 1) / block_efficiency(1 - delta, g) - 0.05 - delta for g in range(500))
        for delta in np.linspace(0.02, 0.3, 57)
    ]
    assert min(gaps) == pytest.approx(0.036, abs=5e-4)


def test_the_example_against_averaging_over_examined_tokens_comes_out() -> None:
    """Half of the rounds easy (A0 = A = 1), half hard (A0 = .2, A = .9); decoded losslessly, predicted for A."""
    share, a0, a = np.array([0.5, 0.5]), np.array([1.0, 0.2]), np.array([1.0, 0.9])
    examined = float((share * a0 * a).sum() / (share * a0).sum())
    assert (round(examined, 3), round(float((share * a).sum()) * examined, 3)) == (0.983, 0.934)
    assert round(float((share * a**2).sum()), 3) == 0.905


def test_the_stated_bounds_after_1000_and_10000_forks_come_out() -> None:
    """Deterministic: V is near the variance of z plus nothing, .07 - .03^2 a fork; the bound is mean + radius / n."""
    for n, stated in ((1_000, 0.06), (10_000, 0.04)):
        assert 0.03 + mixture_radius(n * (0.07 - 0.03**2), 0.05) / n == pytest.approx(stated, abs=0.005)
