"""How the history grows, how fast it answers over a year, and how long its jobs hold the lock: ``--json``.

    python -m bench.history [--quick] [--database URL] --json

Growth: one pool with one class, ticking every second (every thirty with ``--quick``), for three simulated days with a
tick's points and a decision of real size, four requests a minute with forks and scores, minutes of 2 buckets by 16
positions, and the jobs every ten minutes. What a day adds once the ages of ticks and whole decisions are reached is
given for each table. Answers: a year of that pool as retention leaves it; each question of page and CLI, the slowest of
five. Jobs: the longest transaction of roll-up and retention, which is what a tick may have to wait for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Table, func, select

from storage import retention, tables
from storage.database import Database
from storage.history import History
from storage.retention import Ages
from storage.rows import DAY, HOUR, MINUTE

START = 1_800_000_000 // DAY * DAY
POOL = {"pool": "chat-7b", "traffic_class": "default"}
_SERIES = """g theta rho acceptance block_efficiency tokens_per_second requests_per_second touches_per_request
    quality_lenient quality_lossless speedup_plain speedup_lossless remaining spent spent_upper budget u_kappa
    tau_allowed tau_seen burn forks_matured"""
NAMES = _SERIES.split()
GOAL_MS = 200.0
Rows = list[dict[str, Any]]


class Made:
    """Rows of a pool as the loop writes them, from a seed."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        self._noise = self._rng.random(4096).tolist()
        self._n = 0

    def _values(self, names: list[str]) -> dict[str, float]:
        self._n = (self._n + len(names)) % 4000
        return dict(zip(names, self._noise[self._n : self._n + len(names)], strict=True))

    def point(self, at: float) -> dict[str, Any]:
        values = {name: float(f"{value:.7g}") for name, value in self._values(NAMES).items()}
        return POOL | {"time": at, "values": values}

    def decision(self, at: float, seq: int) -> dict[str, Any]:
        """About 3.4 kB, as decisions of the simulator are."""
        detail = {key: self._values([f"{key}_{n:02}" for n in range(23)]) for key in ("inputs", "estimates", "bounds")}
        detail |= {"unix_time": at, "counterfactual": self._values(["a", "b"])}  # type: ignore[dict-item]
        reason = ("budget_ok", "step_up", "waiting_for_labels")[seq // 40 % 3]
        row = POOL | {"time": at, "epoch": 1, "seq": seq, "policy_revision": 1, "state": "measured", "reason": reason}
        return row | {"explanation": "x" * 130, "lease": f'"{"x" * 728}"', "detail": detail}

    def request(self, at: float, n: int) -> dict[str, Any]:
        names = {
            "worker": "worker-1",
            "boot": "4f5c1e9a",
            "rule": "token_v3",
            "arm": "lenient",
            "strategy": "speculative",
        }
        counts = {"epoch": 1, "lease_seq": n, "touches": 2, "prompt_tokens": 200, "tokens": 150, "target_passes": 50}
        numbers = self._values(["theta", "rho", "holdback_prob", "fork_prob", "label_prob", "first_token_s", "total_s"])
        flags = {"fork_drawn": True, "label_drawn": True, "finish_reason": "stop", "draft_s": 0.0}
        times = {"received": at, "started": at - 3, "first_touch_at": at - 2}
        return POOL | {"request_id": f"req-{n:032x}"} | names | counts | numbers | flags | times

    def fork(self, at: float, n: int) -> dict[str, Any]:
        row = POOL | {"request_id": f"req-{n:032x}", "received": at, "worker": "worker-1", "boot": "4f5c1e9a"}
        return row | {"done": True, "touches": 2, "tokens": 150, "target_passes": 50} | self._values(["total_s"])

    def scores(self, at: float, n: int) -> Rows:
        row = POOL | {
            "request_id": f"req-{n:032x}",
            "metric": "answer_correct",
            "scorer": "exact",
            "scorer_version": "1",
        }
        return [row | {"branch": b, "time": at, "received": at} | self._values(["score"]) for b in ("served", "fork")]

    def tokens(self, at: float, step: int = MINUTE) -> Rows:
        counts = {"drafted": 900, "examined": 700, "accepted": 600, "touches": 9, "pinned": 0, "step": step, "time": at}
        rows = [POOL | counts | {"bucket": b, "position": p} for b in (4, 8) for p in range(1, 17)]
        return [row | self._values(["theta_sum", "tv_sum"]) | {"rolled": step > MINUTE} for row in rows]

    def rounds(self, at: float, step: int = MINUTE) -> Rows:
        counts = {"rounds": 100, "request_rounds": 500, "drafted": 8000, "emitted": 2500, "prefill_tokens": 400}
        rows = [POOL | counts | {"bucket": b, "step": step, "time": at, "rolled": step > MINUTE} for b in (4, 8)]
        return [row | self._values(["draft_s", "verify_s", "overhead_s"]) for row in rows]

    def stretch(self, at: float, step: int) -> dict[str, Any]:
        return POOL | {"step": step, "time": at, "count": step, "sums": self._values(NAMES), "fewer": None}


def insert(history: History, rows: dict[Table, Rows]) -> None:
    """All of it in one transaction."""
    with history.transaction("fill") as connection:
        for table, values in rows.items():
            if values:
                connection.execute(table.insert(), values)


class Watched(Database):
    """Remembers the longest write transaction, from the lock to the commit."""

    longest = 0.0

    def __init__(self, url: str):
        super().__init__(url)
        genuine = self.writing

        def writing(what: str) -> Any:
            return _timed(self, genuine(what))

        self.writing = writing  # type: ignore[method-assign]


class _timed:
    def __init__(self, database: Watched, inner: Any):
        self._database, self._inner = database, inner

    def __enter__(self) -> Any:
        connection = self._inner.__enter__()
        self._began = time.perf_counter()
        return connection

    def __exit__(self, *error: Any) -> Any:
        done = self._inner.__exit__(*error)
        self._database.longest = max(self._database.longest, time.perf_counter() - self._began)
        return done


def grow(history: History, days: int, tick: float, window: int) -> dict[str, Any]:
    """Days of a pool's life with its jobs; rows and megabytes that the last day added, and the longest transaction."""
    made, jobs = Made(), History(history.database.url.render_as_string(hide_password=False))
    jobs.database = watched = Watched(jobs.database.url.render_as_string(hide_password=False))
    used, rows = [], []
    seq = n = 0
    for day in range(days):
        for start in range(START + day * DAY, START + (day + 1) * DAY, window):
            ticks = np.arange(start, start + window, tick).tolist()
            asked = list(range(start, start + window, 15))
            minutes = range(start, start + window, MINUTE)
            insert(
                history,
                {
                    tables.points: [made.point(at) for at in ticks],
                    tables.decisions: [made.decision(at, seq + i) for i, at in enumerate(ticks)],
                    tables.requests: [made.request(at, n + i) for i, at in enumerate(asked)],
                    tables.forks: [made.fork(at, n + i) for i, at in enumerate(asked)],
                    tables.scores: [row for i, at in enumerate(asked) for row in made.scores(at, n + i)],
                    tables.token_rollups: [row for at in minutes for row in made.tokens(at)],
                    tables.round_rollups: [row for at in minutes for row in made.rounds(at)],
                },
            )
            seq, n = seq + len(ticks), n + len(asked)
            retention.run(jobs, Ages(), start + window, pause=lambda _: None)
        used.append(in_use(history))
        rows.append(count_rows(history))
    jobs.close()
    added = {name: rows[-1][name] - rows[-2][name] for name in rows[-1] if rows[-1][name] != rows[-2][name]}
    return {
        "mb_after_each_day": [round(b / 1e6, 1) for b in used],
        "mb_per_pool_day": round((used[-1] - used[-2]) / 1e6, 2),
        "rows_per_pool_day": added,
        "requests_per_day": DAY // 15,
        "longest_job_ms": round(1000 * watched.longest, 1),
    }


def in_use(history: History) -> int:
    """Bytes of the database that hold something."""
    with history.database.reading("measure") as connection:
        if not history.database.sqlite:
            return int(connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one())
        pages, free, size = (
            connection.exec_driver_sql(f"PRAGMA {p}").scalar_one()
            for p in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


def count_rows(history: History) -> dict[str, int]:
    """Rows of each table."""
    with history.database.reading("count") as connection:
        return {
            name: int(connection.execute(select(func.count()).select_from(table)).scalar_one())
            for name, table in tables.metadata.tables.items()
        }


def spans(until: int, age: int, step: int) -> Iterator[int]:
    """Starts of the stretches of `step` that an age leaves before `until`."""
    return iter(range(until - age, until, step))


def a_year(history: History, until: int, share: float) -> None:
    """What retention leaves of a year: days, hours and minutes of rollups, thinned decisions, ticks, requests."""
    made = Made(1)
    for step, age in ((MINUTE, 7 * DAY), (HOUR, 90 * DAY), (DAY, 365 * DAY)):
        starts = list(spans(until, int(age * share) // step * step, step))
        for first in range(0, len(starts), 500):
            some = starts[first : first + 500]
            insert(
                history,
                {
                    tables.point_rollups: [made.stretch(at, step) for at in some],
                    tables.token_rollups: [row | {"rolled": True} for at in some for row in made.tokens(at, step)],
                    tables.round_rollups: [row | {"rolled": True} for at in some for row in made.rounds(at, step)],
                },
            )
    thinned = [
        made.decision(at, i) | {"thinned": True} for i, at in enumerate(spans(until, int(90 * DAY * share), 150))
    ]
    whole = [made.decision(at, 10**6 + i) for i, at in enumerate(spans(until, int(6 * HOUR * share), 1))]
    for first in range(0, len(thinned), 2000):
        insert(history, {tables.decisions: thinned[first : first + 2000]})
    insert(history, {tables.decisions: whole})
    insert(history, {tables.points: [made.point(at) | {"rolled": True} for at in spans(until, int(DAY * share), 1)]})
    asked = list(spans(until, int(35 * DAY * share), 60))
    insert(history, {tables.requests: [made.request(at, 10**7 + i) for i, at in enumerate(asked)]})


def questions(history: History, until: int) -> dict[str, Callable[[], Any]]:
    """What page, API and CLI ask."""
    pool, cls = POOL["pool"], POOL["traffic_class"]
    year = until - 365 * DAY
    return {
        "points_hour": lambda: history.points(pool, cls, until - HOUR, 3600),
        "points_week": lambda: history.points(pool, cls, until - 7 * DAY, 1000, until, MINUTE),
        "points_quarter": lambda: history.points(pool, cls, until - 90 * DAY, 3000, until, HOUR),
        "points_year": lambda: history.points(pool, cls, year, 1000, until, DAY),
        "tokens_year": lambda: history.rollups(pool, cls, year, until),
        "tokens_year_by_position": lambda: history.rollups(pool, cls, year, until, DAY, by=("position",), limit=10_000),
        "tokens_month_of_hours": lambda: history.rollups(pool, cls, until - 30 * DAY, until, HOUR),
        "rounds_year": lambda: history.rollups(pool, cls, year, until, kind="rounds", by=("bucket",)),
        "decisions": lambda: history.decisions(pool, limit=100),
        "decision_changes": lambda: history.decision_changes(pool, cls, year, 100),
        "alerts": lambda: history.alerts(pool),
        "request": lambda: history.find_request(f"req-{10**7 + 77:032x}"),
        "requests_day": lambda: history.requests_between(pool, until - DAY, until),
    }


def answers(history: History, until: int) -> dict[str, float]:
    """Milliseconds of each question, the slowest of five after a first one."""
    found = {}
    for name, ask in questions(history, until).items():
        ask()
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            ask()
            taken.append(time.perf_counter() - began)
        found[name] = round(1000 * max(taken), 1)
    return found


def measure(url: str, *, days: int, tick: float, window: int, share: float) -> dict[str, Any]:
    """Growth in an empty database, then the questions over a year before what grew."""
    history = History(url)
    history.upgrade()
    grown = grow(history, days, tick, window)
    a_year(history, START, share)
    took = answers(history, START)
    history.close()
    return {
        "database": "sqlite" if history.database.sqlite else "postgresql",
        "tick_s": tick,
        **grown,
        "year_share": share,
        "answers_ms": took,
        "slowest_ms": max(took.values()),
        "goal_ms": GOAL_MS,
    }


def main() -> None:
    """Print the figures, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tick every half minute, and a twentieth of the year")
    parser.add_argument("--database", help="an empty database to use instead of a SQLite file that is removed")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    size: dict[str, Any] = (
        {"days": 3, "tick": 30.0, "window": 7200, "share": 0.05}
        if args.quick
        else {"days": 3, "tick": 1.0, "window": 600, "share": 1.0}
    )
    with tempfile.TemporaryDirectory() as directory:
        found = measure(args.database or f"sqlite:///{Path(directory) / 'history.db'}", **size)
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
