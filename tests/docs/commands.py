"""Commands in the documents: found, taken apart, and played in a shell.

A fence ```` ```console ```` holds commands behind ``$ `` and, below each, what it prints; ``…`` stands for anything.
All of a page's commands are played in one shell, in order. ```` ```console no-run ```` marks what serves for ever,
needs models of the reader's own or installs something: it is only parsed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "ops").rglob("*.md"))]
PORTS = ("8470", "8000", "6379")
TIMEOUT_S = 540


@dataclass(frozen=True)
class Command:
    """A command of a page, the line it stands on, what it should print, and whether it is played."""

    page: Path
    line: int
    text: str
    prints: tuple[str, ...]
    played: bool

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def console_commands(page: Path) -> list[Command]:
    """The commands in the console fences of a page."""
    found: list[Command] = []
    lines = page.read_text().splitlines()
    inside = played = False
    text: list[str] = []
    prints: list[str] = []
    start, end = 0, ""

    def finish() -> None:
        if text:
            found.append(Command(page, start, "\n".join(text), tuple(prints), played))
        text.clear()
        prints.clear()

    indent = 0
    for number, whole in enumerate(lines, 1):
        fence = whole.lstrip().startswith("```")
        indent = len(whole) - len(whole.lstrip()) if fence and not inside else indent
        line = whole[indent:] if not whole[:indent].strip() else whole
        if fence:
            finish()
            inside = not inside and line.split()[0] == "```console"
            played = "no-run" not in line
        elif inside and line.startswith("$ "):
            finish()
            text.append(line[2:])
            start = number
            here = re.search(r"<<'?(\w+)'?", line)
            end = here[1] if here else ""
        elif inside and text and (end or text[-1].endswith("\\")):
            text.append(line)
            end = "" if line == end else end
        elif inside and line:
            prints.append(line)
    finish()
    return found


def lenity_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Other lines of code that begin with `lenity`: indented ones, and those of fences without a prompt."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        start = number + 1
        if re.match(r"(    )?lenity [a-z]", line):
            while line.endswith("\\"):
                number += 1
                line = line[:-1] + lines[number].strip()
            yield start, line.strip()
        number += 1


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command in a line of shell, without redirections and what stands before it."""
    text = re.sub(r"<<'?(\w+)'?(.*?)\n.*?\n\1$", r"\2", text, flags=re.DOTALL | re.MULTILINE)
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for token in lexer:
        if token and set(token) <= set("|&;"):
            if words:
                yield words
            words = []
        elif token and set(token) <= set("<>&"):
            if words and words[-1] in ("1", "2"):
                words.pop()
            skip = True
        elif skip:
            skip = False
        elif token not in ("!", "sudo") and (words or not re.match(r"\w+=", token)):
            words.append(token)
    if words:
        yield words


def free_ports(count: int) -> list[str]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def play(commands: list[Command], directory: Path, variables: Mapping[str, str] | None = None) -> None:
    """Play commands in one shell in ``directory``; AssertionError says where, with what was printed instead.

    The well-known ports stand for free ones. What was started in the background is ended with the shell.
    """
    for name in ("decoder", "policies", "tests", "docs", "ops"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    script = ["exec 2>&1"]
    for i, command in enumerate(commands):
        text = re.sub(r"\b(8470|8000|6379)\b", lambda m: ports[m[1]], command.text)
        script += [f"printf '\\n@@begin {i}\\n'", text, f"printf '\\n@@end {i} %d\\n' $?"]
    (directory / "script").write_text("\n".join(script) + "\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LENITY_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "LENITY_URL": f"http://127.0.0.1:{ports['8470']}",
        "LENITY_CONTROLLER_PORT": ports["8470"],
        "LENITY_REDIS_URL": f"redis://127.0.0.1:{ports['6379']}/0",
    }
    bash = shutil.which("bash")
    assert bash is not None
    with (directory / "said").open("wb") as said:
        process = subprocess.Popen(
            [bash, "script"], cwd=directory, env=environment | dict(variables or {}), stdout=said,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(TIMEOUT_S)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
    output = (directory / "said").read_text(errors="replace")
    for i, command in enumerate(commands):
        match = re.search(rf"^@@begin {i}\n(.*?)\n@@end {i} (\d+)$", output, re.DOTALL | re.MULTILINE)
        assert match, f"{command.where}: not reached; the output ends:\n{output[-2000:]}"
        shown = f"{command.where}: $ {command.text}\n{match[1]}"
        assert match[2] == "0", f"exit code {match[2]} of {shown}"
        assert _prints(match[1], command.prints, ports), f"expected {command.prints} of {shown}"


def _prints(output: str, expected: tuple[str, ...], ports: Mapping[str, str]) -> bool:
    """Whether the lines come in this order; ``…`` stands for anything in one of them."""
    at = 0
    for line in expected:
        wanted = re.sub(r"\b(8470|8000|6379)\b", lambda m: ports[m[1]], line)
        pattern = ".*".join(re.escape(part) for part in wanted.split("…"))
        match = re.compile(rf"^{pattern}\s*$", re.MULTILINE).search(output, at)
        if match is None:
            return False
        at = match.end()
    return True
