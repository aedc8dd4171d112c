"""Tables in the documents that come from the code. `python -m tests.docs.tables` writes them anew; a test compares."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Any

from policies.settings import flag_name, variables
from tests.support_cli import commands, options

CONFIGURATION = Path(__file__).parents[2] / "docs" / "configuration.md"
PREFIXES = {"controller": "LENITY_CONTROLLER", "worker": "LENITY_WORKER"}


def option_table(command: str) -> list[str]:
    """The lines of the table of a command's options."""
    lines = ["| flag | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for param in options(commands()[command]):
        flag = f"`--{flag_name(param)}`" + (", repeatable" if param.multiple else "")
        default = "required" if param.required else _shown(param.default)
        text = " ".join((param.help or "").split()).rstrip(".").replace("|", "\\|")
        lines.append(f"| {flag} | `{variables(param, PREFIXES[command])[0]}` | {default} | {text} |")
    return lines


def _shown(default: Any) -> str:
    value = default.value if isinstance(default, Enum) else default
    if value in (None, ""):
        return ""
    return f"`{value:g}`" if isinstance(value, int | float) and not isinstance(value, bool) else f"`{value}`"


def with_tables(text: str) -> str:
    """``text`` with what stands between its marks replaced by what the code says."""
    for command in PREFIXES:
        begin, end = f"<!-- options of {command} -->\n", f"<!-- end of {command} -->\n"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        if not tail:
            raise ValueError(f"docs/configuration.md lacks the marks {begin.strip()} … {end.strip()}")
        text = head + begin + "\n" + "\n".join(option_table(command)) + "\n\n" + end + tail
    return text


if __name__ == "__main__":
    before = CONFIGURATION.read_text()
    CONFIGURATION.write_text(with_tables(before))
    sys.stdout.write("unchanged\n" if before == CONFIGURATION.read_text() else "docs/configuration.md written\n")
