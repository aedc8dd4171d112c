"""The frontier of quality against speed: every rule at several knobs over one set of tasks, in a log that can go on.

A *sweep* fixes pair, tasks, block length, temperature and random numbers; a *setting* is a rule or published form with
its knob. Each finished setting is one line of ``points.jsonl``, one entry per task, so a sweep that was stopped goes on
where it was, and tables and plot are made from the log at any time (`decoder.frontier_table`, `decoder.frontier_plot`).
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decoder.demo.pair import EOS, Pair, prompt_ids
from decoder.demo.problems import Domain
from decoder.demo.simulation import LOSSLESS, Setting, fresh_problems
from decoder.demo.tasks import Problem, demo_models_dir
from decoder.drafters import ModelDrafter
from decoder.frontier_run import Columns, run_point
from decoder.generate import Engine
from decoder.request import Knobs, Request, RoundTrace
from decoder.sampling import SamplingParams
from policies.published import PUBLISHED, all_forms, get_form

LOG = "points.jsonl"


@dataclass(frozen=True)
class Sweep:
    """What all settings of a sweep share. ``pair`` and ``tasks`` are checksums of the weights and of the tasks."""

    pair: str
    tasks: str
    n: int
    domain: str
    temperature: float
    g: int
    seed: int


def settings_of(rules: Sequence[str] | None = None, knobs: Sequence[float] | None = None) -> list[Setting]:
    """The lossless rule, then every rule and published form (or those named) at its own knobs (or those given).

    Unless named, a published form that is the same as its completion is left out. Raises ValueError for an unknown name
    or a knob outside [0, 1].
    """
    for theta in knobs or ():
        if not 0 <= theta <= 1:
            raise ValueError(f"a knob must lie in [0, 1], not {theta!r}")
    names = list(rules) if rules else [n for n in all_forms() if n not in PUBLISHED or not PUBLISHED[n].same]
    chosen = [(name, get_form(name)) for name in dict.fromkeys(names) if name != LOSSLESS.rule]
    return [LOSSLESS, *(Setting(name, float(t)) for name, form in chosen for t in (knobs or form.knobs))]


def load_tasks(path: Path | None, n: int, domain: Domain, seed: int) -> list[Problem]:
    """``n`` tasks: generated ones, or the first of a file with one ``{"prompt": ..., "answer": N}`` a line.

    Answers are scored by the number after ``####``. Raises ValueError for a file without n good lines.
    """
    if path is None:
        return fresh_problems(seed, n, domain)
    tasks = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            tasks.append(Problem(str(entry["prompt"]), "", int(entry["answer"]), domain))
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f'{path}:{number}: must be {{"prompt": "...", "answer": 12}} ({e})') from e
        if len(tasks) == n:
            return sorted(tasks, key=lambda task: len(task.prompt))
    raise ValueError(f"{path}: has {len(tasks)} tasks, not {n}")


def checksum_of_tasks(tasks: Sequence[Problem]) -> str:
    """16 hex digits that change with any prompt or answer."""
    return _checksum(f"{task.prompt}\0{task.answer}\0".encode() for task in tasks)


def checksum_of_pair(directory: Path | None = None) -> str:
    """16 hex digits that change with any weight of the pair in ``directory`` (None: the bundled one)."""
    root = directory or demo_models_dir()
    return _checksum((root / name / "model.safetensors").read_bytes() for name in ("target", "draft"))


def _checksum(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


class Log:
    """The finished settings of one sweep in a file of JSON lines; lines of other sweeps are left alone.

    A line that was being written when the program died is cut off. Raises ValueError for any other line that cannot be
    read.
    """

    def __init__(self, path: Path, sweep: Sweep) -> None:
        self.path, self.sweep = path, sweep
        self.done: dict[Setting, Columns] = {}
        self.cost_ratio: float | None = None
        self._load()

    def _load(self) -> None:
        if not self.path.is_file():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as f:
                f.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                if entry["sweep"] != asdict(self.sweep):
                    continue
                if "cost_ratio" in entry:
                    self.cost_ratio = float(entry["cost_ratio"])
                else:
                    self.done[Setting(*entry["setting"])] = Columns.from_json(entry["columns"])
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(f"{self.path}:{number}: not a line of a sweep; delete it or the file ({e!r})") from e

    def add(self, setting: Setting, columns: Columns) -> None:
        """Remember a finished setting, here and in the file."""
        self._append({"setting": list(setting), "columns": columns.to_json()})
        self.done[setting] = columns

    def add_cost_ratio(self, ratio: float) -> None:
        """Remember what a draft step costs in target passes."""
        self._append({"cost_ratio": round(ratio, 4)})
        self.cost_ratio = round(ratio, 4)

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps({"sweep": asdict(self.sweep), **entry}, separators=(",", ":"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as f:
            f.write(line + "\n")
            f.flush()
            os.fsync(f.fileno())


def run_sweep(
    log: Log,
    settings: Sequence[Setting],
    measure: Callable[[Setting], Columns],
    *,
    start: Callable[[Setting], None] = lambda _setting: None,
    done: Callable[[Setting], None] = lambda _setting: None,
) -> None:
    """Measure the settings that the log does not have; ``start`` and ``done`` are called for each, also for those.

    Raises RuntimeError if a request that was never touched differs from its lossless self: the pairing is broken then.
    """
    for setting in settings:
        start(setting)
        if setting not in log.done:
            columns = measure(setting)
            check_pairing(setting, columns, log.done.get(LOSSLESS, columns))
            log.add(setting, columns)
        done(setting)


def check_pairing(setting: Setting, columns: Columns, lossless: Columns) -> None:
    """Raises RuntimeError unless untouched requests have the text and the rounds of the lossless run."""
    same = columns.touches == 0
    if (columns.text[same] != lossless.text[same]).any() or (columns.rounds[same] != lossless.rounds[same]).any():
        raise RuntimeError(f"{setting}: an untouched request differs from its lossless self")


def measurer(pair: Pair, tasks: Sequence[Problem], sweep: Sweep) -> Callable[[Setting], Columns]:
    """How `run_sweep` measures a setting of this sweep."""

    def measure(setting: Setting) -> Columns:
        return run_point(pair, tasks, *setting, g=sweep.g, temperature=sweep.temperature, seed=sweep.seed)

    return measure


def measure_cost_ratio(pair: Pair, tasks: Sequence[Problem], g: int) -> float:
    """Seconds of one draft step over seconds of a target pass, as a worker spends them on these tasks (medians).

    Rounds that read a prompt are left out, and those that drafted fewer than ``g`` tokens.
    """
    rounds: list[RoundTrace] = []
    engine = Engine(pair.target, ModelDrafter(pair.draft), eos_ids=[EOS])
    for seed, task in enumerate(tasks):
        params = SamplingParams(max_tokens=64, seed=seed)
        request = Request(str(seed), prompt_ids(pair.tokenizer, task.prompt), params)
        engine.generate(request, lambda: Knobs.lossless(g), _Collector(rounds))
    full = [trace for trace in rounds if trace.width == g and not trace.prefill]
    if not full:
        raise ValueError("no whole rounds to take the cost from")
    return statistics.median(t.draft_s for t in full) / g / statistics.median(t.verify_s for t in full)


class _Collector:
    """An observer that keeps what it saw."""

    def __init__(self, rounds: list[RoundTrace]) -> None:
        self._rounds = rounds

    def on_round(self, trace: RoundTrace, /) -> None:
        self._rounds.append(trace)
