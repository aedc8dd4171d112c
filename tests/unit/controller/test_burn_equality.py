"""The controller's own burn alert fires when Prometheus fires the generated rule, within one evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from controller.burn import BurnMeter
from controller.evidence import Evidence
from policies.alerts import rules_yaml
from policies.load import parse_policy
from tests.support_prometheus import firing, run_rule_test

MINUTE = 60.0
POLICY = parse_policy(
    "version: lenity/v1\npool: p\nobjective: {metric: m, max_loss: 0.02, window: 7d}\nevidence: {min_labels: 100}\n"
    "alerts: {page: [{long: 1h, short: 5m, budget: 4%}, {long: 20m, short: 2m, budget: 3%}]}\n"
)
# Minutes, requests a minute, touched share, loss per touch: quiet, a regression that is pulled back, a silence, a slow
# burn that stays below, and a sharp one in little traffic.
PHASES = (
    (70, 100, 0.3, 0.02),
    (25, 100, 0.5, 0.6),
    (60, 100, 0.0, 0.0),
    (30, 0, 0.0, 0.0),
    (60, 200, 0.2, 0.1),
    (40, 20, 0.9, 0.9),
    (20, 20, 0.0, 0.0),
)


@dataclass
class Fed:
    """What the meter was fed and said, minute by minute; the counters as Prometheus would scrape them."""

    series: dict[str, list[float | None]]
    pages: list[bool]


def feed(seed: int, scale: float = 1.0) -> Fed:
    """Play the phases through a meter; ``scale`` falsifies the lower bounds that are exported."""
    rng, policy = np.random.default_rng(seed), POLICY.for_class("default")
    meter, labels = BurnMeter(policy, 0.0), 0
    own = 'pool="p", class="default", instance="a"'
    names = [f'lenity_requests_total{{{own}, arm="{arm}"}}' for arm in ("untouched", "lenient")]
    names += [f"lenity_lenient_touches_total{{{own}}}", f"lenity_evidence_forks{{{own}}}"]
    lower = {w: f'lenity_loss_per_touch_lower{{{own}, window="{w}"}}' for w in ("1h", "20m")}
    fed = Fed({name: [] for name in (*names, *lower.values())}, [])
    totals = np.zeros(3)
    now = 0.0
    for minutes, rate, share, loss in PHASES:
        for _ in range(minutes):
            now += MINUTE
            touched = rng.binomial(rate, share)
            touches = touched + rng.poisson(0.5 * touched)
            if rate:
                meter.add_requests(now, rate, int(touched), int(touches))
            lost = float(rng.binomial(touched, min(1.0, loss)))
            if touched:
                e = Evidence(int(touched), lost, lost, int(touches), int(touched), 1.0, 1, 0, now, now)
                meter.add_fork(e, now)
                labels += int(touched)
            meter.advance(now)
            burn = meter.read(now, policy, labels=labels, min_forks=10)
            totals += (rate - touched, touched, touches)
            for name, value in zip(names, (*totals, labels), strict=True):
                fed.series[name].append(float(value))
            for window, name in lower.items():
                fed.series[name].append(scale * burn.lower[window])
            fed.pages.append(burn.page is not None)
    return fed


def settled(pages: Sequence[bool]) -> dict[str, dict[str, int]]:
    """What Prometheus must say at each minute that is not beside a change of the meter's mind."""
    alert = f"({firing('LenityBudgetBurn')}) > bool 0"
    same = [i for i in range(2, len(pages) - 1) if pages[i - 1] == pages[i] == pages[i + 1]]
    return {f"{i}m": {alert: int(pages[i])} for i in same}


@pytest.mark.peer("promtool")
@pytest.mark.parametrize("seed", [1])
def test_prometheus_and_the_meter_fire_together(seed: int, tmp_path: Path) -> None:
    fed = feed(seed)
    changes = sum(a != b for a, b in zip(fed.pages, fed.pages[1:], strict=False))
    assert changes >= 4, "it fires for the regression and for the sharp burn, and ends both times"
    assert 15 < sum(fed.pages) < len(fed.pages) / 2
    path = tmp_path / "rules.yml"
    path.write_text(rules_yaml([POLICY]))
    expected = settled(fed.pages)
    assert len(expected) > 0.9 * len(fed.pages)
    run_rule_test(path, "1m", fed.series, expected)


@pytest.mark.peer("promtool")
def test_another_bound_would_be_noticed(tmp_path: Path) -> None:
    """The negative control: with a third of the lower bound Prometheus fires later or not at all."""
    fed = feed(1, scale=1 / 3)
    path = tmp_path / "rules.yml"
    path.write_text(rules_yaml([POLICY]))
    with pytest.raises(AssertionError, match="exp:"):
        run_rule_test(path, "1m", fed.series, settled(fed.pages))
