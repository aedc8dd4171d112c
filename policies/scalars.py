"""Durations, shares and numbers as people write them in a policy, and back.

A duration needs a unit (``28d``, ``1h30m``, ``250ms``), because a bare ``90`` could be seconds or minutes. A share is a
number or a percentage (``0.02``, ``2%``). A number may be quoted or in any of the notations ``5``, ``0.1``, ``1e-3``,
``1E5``; YAML 1.1 alone would read the last two as text. Everything finite, or `PydanticCustomError` with what to write.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

_NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,4})?\Z")
_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile("".join(rf"(?:([0-9]{{1,9}}(?:\.[0-9]{{1,6}})?){unit})?" for unit in _UNITS) + r"\Z")
_MAX_TEXT = 64


def looks_numeric(text: str) -> bool:
    """Whether ``text`` is a decimal number in one of the accepted notations."""
    return len(text) <= _MAX_TEXT and _NUMBER.match(text) is not None


def shown(value: Any) -> str:
    """``value`` for an error message: short, printable, as it would be written in YAML where that is plain."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def parse_number(value: Any) -> float:
    """A finite number from a number or its text."""
    if isinstance(value, str) and looks_numeric(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fault("must be a number such as 0.1 or 1e-3", value)
    if (isinstance(value, int) and abs(value) > 1 << 53) or not math.isfinite(value):
        raise _fault("must be a finite number of ordinary size", value)
    return float(value)


def parse_count(value: Any) -> int:
    """A whole number from a number or its text; ``1e3`` is 1000, ``2.5`` is refused."""
    number = parse_number(value)
    if not number.is_integer() or abs(number) > 1 << 53:
        raise _fault("must be a whole number", value)
    return int(number)


def parse_share(value: Any) -> float:
    """A share of one from a number (``0.02``) or a percentage (``2%``)."""
    if isinstance(value, str) and value.endswith("%") and looks_numeric(value[:-1]):
        # Through a decimal point shift in text, so that 2% is the same float as 0.02.
        return parse_number(f"{value[:-1]}e-2") if "e" not in value.lower() else parse_number(value[:-1]) / 100
    return parse_number(value)


def parse_duration(value: Any) -> float:
    """Seconds from text with units, largest first, each at most once: ``28d``, ``15m``, ``1h30m``, ``0.5s``."""
    bare = looks_numeric(value) if isinstance(value, str) else type(value) in (int, float)
    if bare:
        text = str(value)[:_MAX_TEXT]
        raise PydanticCustomError("unit", "needs a unit: write {text}s for seconds, or m, h, d", {"text": text})
    match = _DURATION.match(value) if isinstance(value, str) and 0 < len(value) <= _MAX_TEXT else None
    if match is None:
        raise _fault("must be a duration such as 28d, 15m, 90s or 1h30m", value)
    seconds = math.fsum(float(n) * unit for n, unit in zip(match.groups(), _UNITS.values(), strict=True) if n)
    return round(seconds, 9)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back as ``seconds`` (to a microsecond): ``1h30m``, ``0.5s``."""
    if seconds <= 0:
        return "0s"
    parts, rest = [], seconds
    for unit in ("d", "h", "m"):
        count, rest = divmod(rest, _UNITS[unit])
        if count:
            parts.append(f"{int(count)}{unit}")
    if rest or not parts:
        text = f"{rest:.6f}".rstrip("0").rstrip(".")
        if text != "0" or not parts:
            parts.append(f"{text}s")
    return "".join(parts)


def _fault(expected: str, value: Any) -> PydanticCustomError:
    return PydanticCustomError("scalar", "{expected}, not {shown}", {"expected": expected, "shown": shown(value)})


Number = Annotated[float, BeforeValidator(parse_number)]
Count = Annotated[int, BeforeValidator(parse_count)]
Share = Annotated[float, BeforeValidator(parse_share)]
Duration = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(format_duration, return_type=str, when_used="json")
]
