"""Exported files hold the rows, whatever the format and the database."""

from __future__ import annotations

import csv
import io
import json
import sys
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage import export as exporting
from storage.errors import StorageError
from storage.export import TABLES, export
from storage.history import Alert, History, Point
from storage.tables import metadata
from tests.support_storage import NOW, a_decision, a_fork, a_round_row, a_score, a_slice, a_token_row, touched


@pytest.fixture
def filled(history: History) -> History:
    """Two pools with one of everything, a second apart."""
    for pool, at in (("chat", NOW), ("code", NOW + 1)):
        history.save_tick(
            pool,
            history.claim_epoch(pool, "x", NOW),
            at,
            requests=[touched(pool, "r1", confidence=0.5), touched(pool, "r2", first_touch_at=None)],
            forks=[a_fork(pool)],
            scores=[a_score(pool, score=1 / 3)],
            decisions=[a_decision(pool, explanation='says "no",\nthen yes', time=at)],
            points=[Point(pool, "default", at, {"theta": 0.5})],
            alerts=[Alert(pool, "default", at, "LenityFastBurn", True, "burns")],
            slices=[a_slice()],
            rollups=[a_token_row(pool), a_round_row(pool)],
        )
        history.add_policy_revision(pool, "a: 1\n", "sha", "p.yaml", at, accepted=True, error=None)
        history.add_operator_action(pool, "*", "freeze", "ada", "why not", at)
    history.roll_up(NOW + 3600)
    return history


def as_csv(history: History, name: str, **how: object) -> list[dict[str, str]]:
    out = io.BytesIO()
    export(history, name, out, **how)  # type: ignore[arg-type]
    return list(csv.DictReader(io.StringIO(out.getvalue().decode(), newline="")))


def test_every_table_that_holds_history_can_be_exported(filled: History, tmp_path: Path) -> None:
    """All but what is only about the present; both formats hold the same rows."""
    import pyarrow.parquet

    assert {table.name for table, _ in TABLES.values()} == set(metadata.tables) - {"epochs", "snapshots"}
    for name in TABLES:
        rows = as_csv(filled, name)
        out = tmp_path / f"{name}.parquet"
        assert export(filled, name, out, "parquet") == len(rows) >= 2
        table = pyarrow.parquet.read_table(out)
        assert table.column_names == list(rows[0])
        assert {row["pool"] for row in rows} == {"chat", "code"} == set(table["pool"].to_pylist())


def test_values_come_out_exactly(filled: History, tmp_path: Path) -> None:
    """Numbers bit for bit, times to the microsecond in UTC, flags, unknown values, quotes and line ends."""
    import pyarrow.parquet

    first, second = as_csv(filled, "requests", pool="chat")
    assert (first["received"], first["label_drawn"], first["confidence"]) == (
        "2027-01-15T08:00:00.250000Z",
        "true",
        "0.5",
    )
    assert (second["first_touch_at"], second["confidence"]) == ("", "")
    assert float(as_csv(filled, "scores", pool="code")[0]["score"]) == 1 / 3
    [decision] = as_csv(filled, "decisions", pool="chat")
    assert decision["explanation"] == 'says "no",\nthen yes'
    assert json.loads(decision["detail"])["inputs"] == {"labels": 12, "u_kappa": 1 / 3}
    export(filled, "requests", tmp_path / "r.parquet", "parquet", pool="chat")
    rows = pyarrow.parquet.read_table(tmp_path / "r.parquet").to_pylist()
    assert rows[0]["received"] == datetime.fromtimestamp(NOW, UTC)
    assert (rows[0]["touches"], rows[0]["label_drawn"], rows[1]["first_touch_at"]) == (2, True, None)


def test_rows_can_be_narrowed(filled: History) -> None:
    """By pool and by time; the end of a stretch belongs to the next one."""
    assert {r["pool"] for r in as_csv(filled, "alerts", pool="code")} == {"code"}
    assert {r["pool"] for r in as_csv(filled, "alerts", until=NOW + 1)} == {"chat"}
    assert {r["pool"] for r in as_csv(filled, "alerts", since=NOW + 1)} == {"code"}
    assert as_csv(filled, "alerts", since=NOW + 2) == []


def test_a_file_appears_when_it_is_whole(filled: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before stays when an export fails half way, and nothing else is left."""
    out = tmp_path / "new" / "requests.csv"
    export(filled, "requests", out)
    before = out.read_bytes()
    monkeypatch.setattr(exporting, "CHUNK_ROWS", 1)
    told: list[int] = []

    def fail(count: int) -> None:
        told.append(count)
        if count == 2:
            raise StorageError("away")

    with pytest.raises(StorageError, match="away"):
        export(filled, "requests", out, progress=fail)
    assert told == [1, 2]
    assert out.read_bytes() == before
    assert [p.name for p in out.parent.iterdir()] == ["requests.csv"]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        export(filled, "requests", tmp_path / "file" / "x.csv")


def test_memory_does_not_grow_with_the_history(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of points, a hundred at a time: the most that is held is far less than all of them (control)."""
    rows = [{"pool": "chat", "traffic_class": "default", "time": NOW + n, "values": {"a": n / 7}} for n in range(4000)]
    with history.transaction() as connection:
        connection.execute(metadata.tables["points"].insert(), rows)

    class Nowhere(io.RawIOBase):
        def write(self, data: object) -> int:
            return len(data)  # type: ignore[arg-type]

    def most(chunk: int) -> int:
        monkeypatch.setattr(exporting, "CHUNK_ROWS", chunk)
        export(history, "points", Nowhere())  # type: ignore[arg-type]
        tracemalloc.start()
        assert export(history, "points", Nowhere()) == 4000  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert most(100) < most(4000) / 3


def test_parquet_without_pyarrow_says_how_to_get_it(
    filled: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StorageError, match=r"lenity\[parquet\]"):
        export(filled, "requests", tmp_path / "r.parquet", "parquet")
    assert list(tmp_path.glob("r.*")) == []
