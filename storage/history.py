"""The history: what was observed and decided, in SQLite or PostgreSQL.

One thread writes (the loop), any number read. A tick is saved in one transaction together with the state it led to and
the stream position that state includes, and only while the writer's epoch is still the pool's newest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, Table, case, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from storage import operators, schema, summary, tables
from storage.changes import changed_decisions
from storage.convert import Alert, Point, clean, decision_dict, decision_of, decision_row, fields, point_row
from storage.database import Database
from storage.errors import LeaseRefused
from storage.records import Action, Decision, ForkRecord, OperatorAction, QualityScore, RequestRecord
from storage.rollups import STEPS, By, Kind, means, resolution, roll_up, select_points, select_sums, select_unrolled
from storage.rows import MINUTE, RollupRow, RoundRow, TokenRow
from storage.schema import SchemaStatus
from storage.summary import number
from storage.tables import as_utc

__all__ = ["Alert", "History", "Point", "SchemaStatus", "decision_of"]

MAX_ROWS = 10_000


class History:
    """Reads and writes of one database, `sqlite:///path` or `postgresql://...`; connects on first use.

    Every method raises StorageError when the database is unreachable or refuses; nothing is half written then. Times
    are given as Unix seconds or aware datetimes. Row counts of the readers are bounded by `limit` and 10,000.
    """

    def __init__(self, url: str):
        self.database = Database(url)

    # -- schema --------------------------------------------------------------------------------------------------------

    def upgrade(self) -> SchemaStatus:
        """Bring the schema up to date; returns where it stood. Raises SchemaTooNew. See `storage.schema.upgrade`."""
        return schema.upgrade(self.database)

    def schema_status(self) -> SchemaStatus:
        """Which revision the database has, and whether that is this program's."""
        return schema.schema_status(self.database)

    def check_schema(self) -> None:
        """Raise SchemaTooNew or StorageError unless the schema is this program's own."""
        schema.check_schema(self.database)

    def roll_up(self, now: float, *, pause: Callable[[], None] = lambda: None) -> int:
        """Sum what is finished into minutes, hours and days; a job for about every minute. See `storage.rollups`."""
        return roll_up(self.database, now, pause=pause)

    def transaction(self, what: str = "transaction") -> AbstractContextManager[Connection]:
        """A write transaction, for migrations and tools."""
        return self.database.writing(what)

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        self.database.close()

    # -- epochs --------------------------------------------------------------------------------------------------------

    def claim_epoch(self, pool: str, holder: str, now: float, *, at_least: int = 1) -> int:
        """A new fencing epoch for `pool`, greater than any before and not below `at_least` (for when the database was
        lost but leases of it are remembered). Writers of older epochs are refused from now on."""
        table, floor = tables.epochs, max(1, at_least)
        values = {"pool": pool, "epoch": floor, "holder": holder[:256], "claimed": now}
        with self.database.writing(f"claim the epoch of {pool}") as connection:
            insert = self._insert(table).values(values)
            epoch = case((table.c.epoch >= floor, table.c.epoch + 1), else_=floor)
            statement = insert.on_conflict_do_update(
                index_elements=["pool"], set_={"epoch": epoch, "holder": values["holder"], "claimed": now}
            )
            return int(connection.execute(statement.returning(table.c.epoch)).scalar_one())

    def current_epoch(self, pool: str) -> int | None:
        """The newest epoch of `pool`, None before the first claim."""
        with self.database.reading(f"read the epoch of {pool}") as connection:
            return connection.execute(select(tables.epochs.c.epoch).where(tables.epochs.c.pool == pool)).scalar()

    # -- one tick ------------------------------------------------------------------------------------------------------

    def save_tick(
        self,
        pool: str,
        epoch: int,
        now: float,
        *,
        decisions: Sequence[Decision] = (),
        requests: Sequence[RequestRecord] = (),
        forks: Sequence[ForkRecord] = (),
        scores: Sequence[QualityScore] = (),
        points: Sequence[Point] = (),
        alerts: Sequence[Alert] = (),
        slices: Sequence[Mapping[str, Any]] = (),
        rollups: Sequence[RollupRow] = (),
        snapshot: Mapping[str, Any] | str | None = None,
        last_id: str | None = None,
        superseded: bool = False,
    ) -> None:
        """Save everything of one tick, or nothing. Saving the same things again changes nothing.

        Args:
            now: when the records were received, in Unix seconds.
            slices: rows of the budget's ledger: traffic_class, start, evidence_epoch, level, rule, requests, touched,
                touches, forks, labelled, fork_loss, fork_touches. The newest counts of a slice replace those before.
            rollups: finished minutes.
            snapshot: the state after this tick, JSON-able or encoded by `storage.tables.to_json`; None keeps the one
                before.
            last_id: the newest stream entry that `snapshot` includes; None when nothing was read since the last one.
            superseded: the tick is of an older epoch and comes late. What was observed and decided is kept, decisions
                marked; what its successor counts again from the stream (points, rollups, slices, state) is not.

        Raises:
            LeaseRefused: the pool has a newer epoch; nothing was written, and this writer must stop.
            StorageError: the database is unreachable or refuses; nothing was written.
        """
        if snapshot is None and last_id is not None:
            raise ValueError("a stream position without the state that includes it would lose what lies between")
        rows: list[tuple[Table, list[dict[str, Any]]]] = [
            (tables.requests, [fields(r, received=now) for r in requests]),
            (tables.forks, [fields(f, received=now) for f in forks]),
            (tables.scores, [fields(s, received=now) for s in scores]),
            (tables.decisions, [decision_row(d) | {"superseded": superseded} for d in decisions]),
            (tables.alerts, [fields(a) for a in alerts]),
        ]
        if not superseded:
            rows += [
                (tables.points, [point_row(p) for p in points]),
                (tables.token_rollups, [fields(r, step=MINUTE) for r in rollups if isinstance(r, TokenRow)]),
                (tables.round_rollups, [fields(r, step=MINUTE) for r in rollups if isinstance(r, RoundRow)]),
            ]
        with self.database.writing(f"save a tick of {pool}") as connection:
            if not superseded:
                self._require_epoch(connection, pool, epoch)
            for table, values in rows:
                if values:
                    connection.execute(self._insert(table).on_conflict_do_nothing(), values)
            if slices and not superseded:
                self._save_slices(connection, [{**row, "pool": pool} for row in slices])
            if snapshot is not None and not superseded:
                self._save_snapshot(connection, pool, epoch, now, snapshot, last_id)

    def load_snapshot(self, pool: str) -> tuple[dict[str, Any], str] | None:
        """The newest saved state and the newest stream id it includes ("0-0" when it includes none)."""
        table = tables.snapshots
        with self.database.reading(f"load the state of {pool}") as connection:
            row = connection.execute(select(table.c.state, table.c.last_id).where(table.c.pool == pool)).first()
        return None if row is None else (row.state, row.last_id)

    # -- policy --------------------------------------------------------------------------------------------------------

    def add_policy_revision(
        self, pool: str, text: str, sha: str, source: str, now: float, accepted: bool, error: str | None
    ) -> int:
        """Record a policy document, accepted or refused with `error`; returns its revision number.

        What is in force already is the same revision again, whatever was refused since; so is the newest refusal. A
        restart makes no new one.
        """
        table = tables.policy_revisions
        row: dict[str, Any] = {"pool": pool, "text": clean(text), "sha": sha, "source": clean(source)}
        row |= {"accepted": accepted, "error": None if error is None else clean(error)}
        with self.database.writing(f"record a policy of {pool}") as connection:
            query = select(table).where(table.c.pool == pool)
            query = query.where(table.c.accepted) if accepted else query
            newest = connection.execute(query.order_by(table.c.revision.desc()).limit(1)).mappings().first()
            if newest is not None and all(newest[name] == value for name, value in row.items()):
                return int(newest["revision"])
            inserted = connection.execute(table.insert().values(**row, time=now).returning(table.c.revision))
            return int(inserted.scalar_one())

    def policy_revisions(self, pool: str, limit: int = 100) -> list[dict[str, Any]]:
        """Recorded policies, newest first: revision, pool, time (aware), sha, source, text, accepted, error."""
        table = tables.policy_revisions
        query = select(table).where(table.c.pool == pool).order_by(table.c.revision.desc())
        return [dict(row) for row in self._rows(query, limit)]

    def policies_in_force(self) -> list[dict[str, Any]]:
        """The newest accepted policy of every pool, as `policy_revisions` gives them, newest first."""
        table = tables.policy_revisions
        newest = select(func.max(table.c.revision)).where(table.c.accepted).group_by(table.c.pool)
        query = select(table).where(table.c.revision.in_(newest)).order_by(table.c.revision.desc())
        return [dict(row) for row in self._rows(query, MAX_ROWS)]

    # -- operators -----------------------------------------------------------------------------------------------------

    def add_operator_action(
        self,
        pool: str,
        traffic_class: str,
        action: Action,
        who: str,
        why: str,
        now: float,
        amount: float | None = None,
    ) -> int:
        """Order an action for a class, or for all of them (`ALL_CLASSES`); returns its number, which only grows.

        `amount`: loss units by which `adjust_budget` changes what counts as spent. Raises ValueError for an action that
        means nothing.
        """
        with self.database.writing(f"record an action for {pool}") as connection:
            return operators.add(connection, pool, traffic_class, action, clean(who), clean(why), now, amount)

    def operator_actions(self, pool: str, after: int = 0, limit: int = 100) -> list[OperatorAction]:
        """Actions of a pool with numbers above `after`, oldest first; every one of them is seen in this order."""
        return operators.actions(self._rows(operators.after(pool, after), limit))

    def operator_log(self, pool: str, limit: int = 100) -> list[OperatorAction]:
        """Actions of a pool, newest first."""
        return operators.actions(self._rows(operators.newest(pool), limit))

    # -- readers -------------------------------------------------------------------------------------------------------

    def points(
        self,
        pool: str,
        cls: str,
        since: float | datetime | None = None,
        limit: int = 1000,
        until: float | datetime | None = None,
        step: float | None = None,
    ) -> list[Point]:
        """The newest `limit` points of a class later than `since` and not later than `until`, oldest first.

        With a `step` in seconds, means over the longest of minutes, hours and days that is no longer than it, up to the
        newest tick; below a minute, and without one, the ticks themselves, which are kept for a shorter time.
        """
        kept = max((s for s in STEPS if step is not None and s <= step), default=None)
        rows = self._rows(select_points(pool, cls, kept, since, until), limit)
        if kept is None:
            return [Point(pool, cls, row["time"].timestamp(), row["values"]) for row in reversed(rows)]
        fresh = self._rows(select_unrolled(pool, cls, since, until), MAX_ROWS) if limit > 0 else []
        after = -math.inf if since is None else as_utc(since).timestamp()
        found = [Point(pool, cls, time, v) for time, v in means(rows, fresh, kept).items() if time > after]
        return found[max(0, len(found) - limit) :]

    def rollups(
        self,
        pool: str,
        cls: str,
        since: float | datetime,
        until: float | datetime,
        step: float | None = None,
        *,
        kind: Kind = "tokens",
        by: Sequence[By] = (),
        limit: int = 1000,
    ) -> list[dict[str, Any]]:
        """Sums of what was drafted (`kind` "tokens") or of rounds, with `since` <= time < `until`, oldest first.

        Args:
            step: seconds; the longest of minutes, hours and days that is no longer; None: about `limit` rows for all.
            by: "position" (of tokens) and "bucket" of the batch give a row for each value; without, all are summed.

        Returns:
            `time` (aware) and `step` of each stretch, the values of `by`, and the sums of `storage.rows`; the newest
            `limit` rows. Hours and days lack what came since the last `roll_up`.
        """
        if step is None:
            kept = resolution(as_utc(until).timestamp() - as_utc(since).timestamp(), limit)
        else:
            kept = max((s for s in STEPS if s <= step), default=MINUTE)
        rows = reversed(self._rows(select_sums(kind, pool, cls, since, until, kept, by), limit))
        return [{n: v if n == "time" else number(v) for n, v in row.items()} | {"step": kept} for row in rows]

    def decisions(
        self, pool: str, cls: str | None = None, since: float | datetime | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Decisions later than `since`, newest first: the fields of `Decision` (`time` aware, `lease` a plain object),
        epoch, seq, policy_revision and `unix_time`. `decision_of` gives the Decision back, bit for bit."""
        table = tables.decisions
        query = select(table).where(table.c.pool == pool, *(() if cls is None else (table.c.traffic_class == cls,)))
        rows = self._rows(_later(query, table.c.time, since).order_by(table.c.time.desc(), table.c.id.desc()), limit)
        return [decision_dict(row) for row in rows]

    def decision_changes(
        self, pool: str, cls: str | None, since: float | datetime, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Of the decisions later than `since` those whose state or reason differs from the one before, newest first."""
        return [decision_dict(row) for row in self._rows(changed_decisions(pool, cls, since), limit)]

    def alerts(
        self, pool: str, cls: str | None = None, since: float | datetime | None = None, limit: int = 100
    ) -> list[Alert]:
        """Alerts that began or ended later than `since`, newest first."""
        table = tables.alerts
        query = select(table).where(table.c.pool == pool, *(() if cls is None else (table.c.traffic_class == cls,)))
        rows = self._rows(_later(query, table.c.time, since).order_by(table.c.time.desc(), table.c.id.desc()), limit)
        names = ("pool", "traffic_class", "name", "firing", "detail")
        return [Alert(**{n: row[n] for n in names}, time=row["time"].timestamp()) for row in rows]

    def find_request(self, request_id: str, pool: str | None = None) -> dict[str, Any] | None:
        """The stored fields of a request (`RequestRecord` with aware times, and `received`), None when there is none.

        Without a pool, the request of that id that was received last.
        """
        c = tables.requests.c
        query = select(tables.requests).where(c.request_id == request_id, *(() if pool is None else (c.pool == pool,)))
        return max(map(dict, self._rows(query, 100)), key=lambda row: row["received"], default=None)

    def requests_between(
        self,
        pool: str,
        start: float | datetime,
        end: float | datetime,
        cls: str | None = None,
        by: summary.By = "received",
    ) -> dict[str, Any]:
        """Sums over requests with `start` <= time < `end`; see `storage.summary.requests_between`."""
        with self.database.reading(f"sum the requests of {pool}") as connection:
            return summary.requests_between(connection, pool, start, end, cls, by)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _insert(self, table: Table) -> Any:
        return sqlite.insert(table) if self.database.sqlite else postgresql.insert(table)

    def _rows(self, query: Select[Any], limit: int) -> Sequence[RowMapping]:
        if limit < 1:
            return []
        with self.database.reading("read the history") as connection:
            return connection.execute(query.limit(min(limit, MAX_ROWS))).mappings().all()

    @staticmethod
    def _require_epoch(connection: Connection, pool: str, epoch: int) -> None:
        """The row stays locked until the transaction ends, so that no newer epoch is claimed in between."""
        table = tables.epochs
        row = connection.execute(select(table).where(table.c.pool == pool).with_for_update()).mappings().first()
        if row is None or row["epoch"] != epoch:
            found = "no epoch was claimed" if row is None else f"epoch {row['epoch']} was claimed by {row['holder']}"
            raise LeaseRefused(f"tick of {pool} under epoch {epoch} refused: {found}")

    def _save_slices(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        table = tables.budget_slices
        insert = self._insert(table)
        changed = {c.name: insert.excluded[c.name] for c in table.c if not c.primary_key}
        connection.execute(insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed), rows)

    def _save_snapshot(
        self,
        connection: Connection,
        pool: str,
        epoch: int,
        now: float,
        state: Mapping[str, Any] | str,
        last_id: str | None,
    ) -> None:
        row: dict[str, Any] = {"epoch": epoch, "time": now, "state": state}
        insert = self._insert(tables.snapshots).values(pool=pool, last_id=last_id or "0-0", **row)
        update = row if last_id is None else row | {"last_id": last_id}
        table = tables.snapshots
        newer = or_(table.c.epoch < epoch, table.c.time <= as_utc(now))
        connection.execute(insert.on_conflict_do_update(index_elements=["pool"], set_=update, where=newer))


def _later(query: Select[Any], column: ColumnElement[datetime], since: float | datetime | None) -> Select[Any]:
    return query if since is None else query.where(column > as_utc(since))
