"""What the demo shows while it runs: phases with their outcome, the pool's live numbers, and what just happened."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

MARKS = {"waiting": "·", "running": "▶", "done": "✓", "failed": "✗"}


@dataclass
class Phase:
    """One phase of the demo: what it is to show, when it ran (Unix seconds), and what was seen."""

    key: str
    title: str
    state: str = "waiting"
    started: float = 0.0
    ended: float = 0.0
    seen: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when what the phase is about has been seen."""
        return self.state == "done"


class Screen:
    """A live table on a terminal; plain lines, one per event, elsewhere. A context manager."""

    def __init__(self, phases: list[Phase], url: str, console: Console | None = None):
        self._console = console or Console()
        self._phases, self._url = phases, url
        self._pool: dict[str, Any] | None = None
        self._events: list[str] = []
        self._started = time.monotonic()
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """Tell what just happened, in plain words."""
        line = f"[{time.monotonic() - self._started:5.1f} s] {text}"
        self._events = [*self._events[-5:], line]
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, pool: dict[str, Any] | None) -> None:
        """Take the newest view of the pool."""
        self._pool = pool

    def _render(self) -> Group:
        phases = Table(box=None, padding=(0, 1), show_header=False)
        for p in self._phases:
            style = {"done": "green", "failed": "bold red", "running": "bold"}.get(p.state, "dim")
            phases.add_row(
                Text(MARKS[p.state], style), Text(f"({p.key}) {p.title}", style), Text("; ".join(p.seen[-1:]), "dim")
            )
        return Group(
            Panel(phases, title="lenity demo", subtitle=self._url, title_align="left", subtitle_align="left"),
            Panel(self._numbers(), title="pool demo", title_align="left"),
            Text("\n".join(self._events)),
        )

    def _numbers(self) -> Table | Text:
        if self._pool is None:
            return Text("no controller is running: the worker decodes losslessly", "yellow")
        c = self._pool["classes"][0]
        table = Table.grid(padding=(0, 2))
        cells = [
            ("state", f"{c['state']} ({c['reason']})"),
            ("knobs", f"g = {c['g']}, theta = {c['theta']:.3f}, rho = {c['rho']:.2f}"),
            ("acceptance", number(c["acceptance"], "{:.3f}")),
            ("speed", number(c["tokens_per_second"], "{:.0f} tokens/s")),
            (
                "touches per request",
                f"{number(c['touches_per_request_seen'], '{:.2f}')} seen, "
                f"{c['touches_per_request_allowed']:.2f} allowed",
            ),
            ("loss per touch", f"at most {c['u_kappa']:.3f} ({c['forks_matured']} paired answers)"),
            (
                "quality",
                f"lenient {number(c['quality_lenient'], '{:.3f}')}, lossless {number(c['quality_lossless'], '{:.3f}')}",
            ),
            ("budget left", f"{max(c['remaining'], 0):.0%}"),
            ("alerts", ", ".join(a["name"] for a in c["alerts"] if a["firing"]) or "none"),
            (
                "policy",
                f"revision {self._pool['policy_revision']}"
                + (f", edit refused: {self._pool['policy_rejected']}" if self._pool["policy_rejected"] else ""),
            ),
            ("why", c["explanation"]),
        ]
        for name, value in cells:
            table.add_row(Text(name, "dim"), Text(value))
        return table


def number(value: float | None, form: str) -> str:
    """A formatted number, or a dash while it is unknown."""
    return "-" if value is None else form.format(value)
