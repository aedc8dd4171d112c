"""Where the loop's ticks wait while the database is away.

    spool = Spool(path, max_bytes)     one per pool; opening finds what a crash left
    spool.append(tick)                 `tick`: the keyword arguments of `History.save_tick`
    spool.replay(history.save_tick)    in order, each once; the file is empty afterwards
    len(spool), spool.size, spool.dropped, spool.broken

Records are appended to one file, each with its length and checksum, and are on disk when `append` returns. The state
(`snapshot` and `last_id`) is large and only the newest matters: it lies in a file of its own beside the records and is
given to `save` after the last tick. A crash between the two leaves the state of the tick before, which is right: the
stream brings again what that state does not include. A crash while replaying replays again, which changes nothing
because `History.save_tick` is idempotent.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from storage.errors import LeaseRefused, RecordRefused, StorageError
from storage.history import Alert, Point
from storage.records import Decision, ForkRecord, Lease, QualityScore, RequestRecord
from storage.rows import RoundRow, TokenRow
from storage.tables import plain_number

_MAGIC = b"lenity spool 1\n"
_HEAD = struct.Struct("<II")  # length and CRC-32 of the payload that follows
_STATE = ("snapshot", "last_id")
_KINDS = {c.__name__: c for c in (Alert, Decision, ForkRecord, Point, QualityScore, RequestRecord, RoundRow, TokenRow)}


class Spool:
    """Ticks in a file of at most `max_bytes`, state included. One process uses it; raises StorageError for disk errors.

    A full spool takes no more ticks but still the newest state: those ticks' observations are in the state, their rows
    are lost and counted in `dropped`.
    """

    def __init__(self, path: Path, max_bytes: int = 256 << 20):
        self.path, self.max_bytes = path, max_bytes
        self.state_path = path.with_name(path.name + ".state")
        self.dropped = 0
        self.broken = 0
        self._ticks = self._end = 0
        try:
            self._open()
        except OSError as e:
            raise StorageError(f"spool {self.path}: {e.strerror}") from e

    def __len__(self) -> int:
        """How many ticks wait."""
        return self._ticks

    @property
    def size(self) -> int:
        """How much of the disk the waiting ticks and their state take."""
        return self._end + self._state_bytes()

    def append(self, tick: Mapping[str, Any]) -> bool:
        """Keep one tick; False when the spool is full and only its state was kept."""
        payload = zlib.compress(_encode({name: value for name, value in tick.items() if name not in _STATE}), 1)
        record = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        state = {name: tick.get(name) for name in _STATE}
        of = {name: tick[name] for name in ("pool", "epoch", "now")}
        body = None if state["snapshot"] is None else _encode(of | state)
        state_bytes = self._state_bytes() if body is None else len(body)
        fits = max(self._end, len(_MAGIC)) + len(record) + state_bytes <= self.max_bytes
        try:
            if fits:
                self._write(record)
            else:
                self.dropped += 1
            if body is not None:
                self._write_state(body)
        except OSError as e:
            raise StorageError(f"spool {self.path}: {e.strerror}") from e
        return fits

    def replay(self, save: Callable[..., None]) -> int:
        """Give every waiting tick to `save` in order, then forget them; returns how many there were.

        `save` is called like `History.save_tick`. A tick that it refuses with LeaseRefused, because a newer epoch was
        claimed since, is given again with `superseded=True`; its state is left out. One that the database will never
        take is set aside beside the spool and counted in `broken`. Any other error leaves the spool as it was. After a
        restart, replay before an epoch is claimed, so that nothing is superseded by its own successor.
        """
        for payload, _ in self._frames() if self._ticks else ():
            tick = _decode(zlib.decompress(payload))
            try:
                _save(save, tick)
            except RecordRefused:
                self._keep_broken(payload)
        state = self._read_state()
        if state is not None:
            with contextlib.suppress(LeaseRefused):
                save(**state)
        count = self._ticks
        self.clear()
        return count

    def clear(self) -> None:
        """Forget every tick."""
        try:
            self.path.unlink(missing_ok=True)
            self.state_path.unlink(missing_ok=True)
            _sync_directory(self.path.parent)
        except OSError as e:
            raise StorageError(f"spool {self.path}: {e.strerror}") from e
        self._ticks = self._end = 0

    # -- the file ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        size = self.path.stat().st_size
        for _, end in self._frames():
            self._ticks, self._end = self._ticks + 1, end
        if self._end < size:  # a record that a crash cut off, or damage
            self._set_aside(size)

    def _frames(self) -> Iterator[tuple[bytes, int]]:
        """Payloads of the file up to the first that is not whole, each with where it ends."""
        with self.path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return
            end = len(_MAGIC)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, checksum = _HEAD.unpack(head)
                payload = file.read(length) if length <= self.max_bytes else b""
                if len(payload) != length or zlib.crc32(payload) != checksum:
                    return
                end += _HEAD.size + length
                yield payload, end

    def _set_aside(self, size: int) -> None:
        """Cut off what cannot be read; it is kept beside the file for whoever wants to look at it."""
        with self.path.open("r+b") as file:
            file.seek(self._end)
            rest = file.read(min(size - self._end, 1 << 20))
            self._keep_broken(rest)
            file.truncate(self._end)
            os.fsync(file.fileno())

    def _keep_broken(self, rest: bytes) -> None:
        self.broken += 1
        self.path.with_name(self.path.name + ".broken").write_bytes(rest)

    def _write(self, record: bytes) -> None:
        with self.path.open("ab") as file:
            if self._end == 0:
                file.truncate(0)
                file.write(_MAGIC)
                self._end = len(_MAGIC)
            else:
                file.truncate(self._end)  # what an append that failed may have left
            try:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(self._end)
                raise
        if self._ticks == 0:
            _sync_directory(self.path.parent)
        self._end += len(record)
        self._ticks += 1

    def _write_state(self, body: bytes) -> None:
        """Replace the state as a whole."""
        new = self.state_path.with_name(self.state_path.name + ".new")
        with new.open("wb") as file:
            file.write(_HEAD.pack(len(body), zlib.crc32(body)) + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.state_path)
        _sync_directory(self.path.parent)

    def _read_state(self) -> dict[str, Any] | None:
        """The newest state; None when there is none or it is damaged, so that the database's own is kept."""
        try:
            raw = self.state_path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StorageError(f"spool {self.state_path}: {e.strerror}") from e
        body = raw[_HEAD.size :]
        if len(raw) < _HEAD.size or _HEAD.unpack(raw[: _HEAD.size]) != (len(body), zlib.crc32(body)):
            self.broken += 1
            return None
        state: dict[str, Any] = json.loads(body)
        return state

    def _state_bytes(self) -> int:
        return self.state_path.stat().st_size if self.state_path.exists() else 0


def _save(save: Callable[..., None], tick: dict[str, Any]) -> None:
    try:
        save(**tick)
    except LeaseRefused:
        save(**tick, superseded=True)


def _encode(tick: Mapping[str, Any]) -> bytes:
    return json.dumps(tick, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """Records by the name of their kind; leases as they stand on the stream server; NumPy as plain numbers."""
    if isinstance(value, Decision):
        row = {name: getattr(value, name) for name in Decision.__dataclass_fields__}
        return {"kind": "Decision", **row, "lease": value.lease.to_json()}
    if type(value).__name__ in _KINDS:
        return {"kind": type(value).__name__, **asdict(value)}
    return plain_number(value)


def _decode(text: bytes) -> dict[str, Any]:
    tick: dict[str, Any] = json.loads(text)
    return {name: [_record(row) for row in v] if isinstance(v, list) else v for name, v in tick.items()}


def _record(row: Any) -> Any:
    if not isinstance(row, dict) or "kind" not in row:
        return row
    values = {name: value for name, value in row.items() if name != "kind"}
    if row["kind"] == "Decision":
        values["lease"] = Lease.from_json(values["lease"])
    return _KINDS[row["kind"]](**values)


def _sync_directory(directory: Path) -> None:
    """Make a new, renamed or removed name in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
