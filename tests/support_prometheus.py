"""Series for promtool's rule tests, and one call of it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Series = Mapping[str, Sequence[float | None]]


def run_rule_test(rules: Path, interval: str, series: Series, expected: Mapping[str, Mapping[str, int]]) -> None:
    """Evaluate ``rules`` every ``interval`` over ``series`` (one value per interval, None for a missing one).

    ``expected`` says at which times (as Prometheus writes durations) a query has which value; 0 means no sample.
    """
    checks: list[dict[str, Any]] = []
    for at, queries in expected.items():
        for query, value in queries.items():
            samples = [{"labels": "{}", "value": value}] if value else []
            checks.append({"expr": query, "eval_time": at, "exp_samples": samples})
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": interval,
        "tests": [
            {
                "interval": interval,
                "input_series": [{"series": name, "values": notation(values)} for name, values in series.items()],
                "promql_expr_test": checks,
            }
        ],
    }
    path = rules.with_suffix(".test.yml")
    path.write_text(json.dumps(document))
    result = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def notation(values: Sequence[float | None]) -> str:
    """Values as promtool writes them; runs of even steps are joined, so that files stay small."""
    parts: list[str] = []
    i = 0
    while i < len(values):
        first = values[i]
        if first is None:
            parts.append("_")
            i += 1
            continue
        j, step = i + 1, None
        while j < len(values):
            before, after = values[j - 1], values[j]
            if before is None or after is None or (step is not None and after - before != step):
                break
            step = after - before
            j += 1
        parts.append(f"{first:g}" if step is None else f"{first:g}{step:+g}x{j - i - 1}")
        i = j
    return " ".join(parts)


def firing(alert: str) -> str:
    """A query for how many of an alert fire."""
    return f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'


def metric_names(query: str) -> set[str]:
    """The names of metrics that a query reads, as far as they are Lenity's or recorded from them."""
    return set(re.findall(r"\b(?:\w+:)?lenity_\w+(?::\w+)?", query))
