"""Built-in scorers of served answers. A scorer reads the text of one branch and never the arm."""

from __future__ import annotations

import json
from collections.abc import Sequence

from decoder.text import Text
from decoder.worker import Scoring


def score_json(text: str) -> float:
    """1.0 if the text is one JSON document, else 0.0."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def json_scoring(text: Text, metric: str) -> Scoring:
    """Scores by `score_json` under the name of the policy's metric."""

    def score(token_ids: Sequence[int]) -> float:
        return score_json(text.decode(token_ids))

    return Scoring(metric, "json", "1", score)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
