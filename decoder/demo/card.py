"""The pair's card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CARD = HERE / "card.json"
README = HERE / "README.md"


def facts() -> dict[str, Any]:
    return {}


def card_text(card: dict[str, Any]) -> str:
    return json.dumps(card, indent=1) + "\n"


def readme(card: dict[str, Any]) -> str:
    return ""
