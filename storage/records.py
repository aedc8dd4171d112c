"""Frozen wire types, and how they become stream entries and come back.

A stream entry is a flat mapping of bytes. Field ``kind`` names the record, ``head`` holds its scalars as JSON, and the
columns of a `TokenBlock` are raw little-endian arrays under their own names. Everything that comes back is checked; a
malformed, non-finite or out-of-range entry raises `SampleError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from storage.errors import SampleError

Fields = dict[bytes, bytes]
Arm = Literal["untouched", "lenient", "holdback"]
Branch = Literal["served", "fork"]

# Bits of TokenBlock.flags. PINNED: leniency is not allowed here whatever the lease says (structured span, cap).
EXAMINED, ACCEPTED, TOUCH, PINNED = 1, 2, 4, 8

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\Z")
_MAX_ROWS = 1 << 20
_MAX_NUMBER = 1e11  # as Unix seconds the year 5138: every scalar can be a time, and sums stay finite


@dataclass(frozen=True)
class TokenBlock:
    """Telemetry of a run of draft-verify rounds of one traffic class under one lease.

    Per round (arrays of shape [rounds]): rows in the batch, width drafted, tokens emitted over all rows, prompt tokens
    that its passes had to read first (0 for all but first rounds), and seconds spent drafting, verifying and in
    between. Per drafted position (shape [n]): the request's row within this block,
    the round's index within this block, the position in its block from 1, the scalars of DESIGN 2.4, the knob
    ``theta`` applied there (0 on structured spans, in holdback, under a cap or an expired lease) and flag bits
    EXAMINED, ACCEPTED, TOUCH, PINNED. Duplicates share (worker, boot, seq).
    """

    pool: str
    traffic_class: str
    worker: str
    boot: str
    seq: int
    epoch: int
    lease_seq: int
    rule: str
    rho: float
    round_rows: npt.NDArray[np.uint16]
    round_width: npt.NDArray[np.uint16]
    round_emitted: npt.NDArray[np.uint32]
    round_prefill: npt.NDArray[np.uint32]
    round_draft_s: npt.NDArray[np.float32]
    round_verify_s: npt.NDArray[np.float32]
    round_overhead_s: npt.NDArray[np.float32]
    request: npt.NDArray[np.uint16]
    round: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint8]
    target_prob: npt.NDArray[np.float32]
    draft_prob: npt.NDArray[np.float32]
    target_prob_raw: npt.NDArray[np.float32]
    draft_prob_raw: npt.NDArray[np.float32]
    target_max_raw: npt.NDArray[np.float32]
    draft_max_raw: npt.NDArray[np.float32]
    tv: npt.NDArray[np.float32]
    theta: npt.NDArray[np.float32]
    flags: npt.NDArray[np.uint8]

    HEAD: ClassVar = ("pool", "traffic_class", "worker", "boot", "seq", "epoch", "lease_seq", "rule", "rho")
    ROUND_COLUMNS: ClassVar = {
        "round_rows": "<u2",
        "round_width": "<u2",
        "round_emitted": "<u4",
        "round_prefill": "<u4",
        "round_draft_s": "<f4",
        "round_verify_s": "<f4",
        "round_overhead_s": "<f4",
    }
    POSITION_COLUMNS: ClassVar = {
        "request": "<u2",
        "round": "<u4",
        "position": "|u1",
        "target_prob": "<f4",
        "draft_prob": "<f4",
        "target_prob_raw": "<f4",
        "draft_prob_raw": "<f4",
        "target_max_raw": "<f4",
        "draft_max_raw": "<f4",
        "tv": "<f4",
        "theta": "<f4",
        "flags": "|u1",
    }

    def to_fields(self) -> Fields:
        """The stream entry of this block."""
        entry = _head_fields("block", {name: getattr(self, name) for name in self.HEAD})
        for name, dtype in (self.ROUND_COLUMNS | self.POSITION_COLUMNS).items():
            entry[name.encode()] = np.ascontiguousarray(getattr(self, name), dtype=dtype).tobytes()
        return entry

    @classmethod
    def from_fields(cls, entry: Mapping[bytes, bytes]) -> TokenBlock:
        """Parse and check one entry; raises SampleError that says which column is wrong."""
        head = _parse_head(entry, "block")
        values = _typed(cls, {name: head.get(name) for name in cls.HEAD})
        columns = {n: _column(entry, n, d) for n, d in (cls.ROUND_COLUMNS | cls.POSITION_COLUMNS).items()}
        for group in (cls.ROUND_COLUMNS, cls.POSITION_COLUMNS):
            sizes = {name: columns[name].size for name in group}
            if len(set(sizes.values())) > 1:
                raise SampleError(f"block: columns differ in length: {sizes}")
        _check_unit("rho", np.asarray(values["rho"]))
        # One look at all of them; the columns one by one only to name the bad one.
        if not _in_range(entry, POSITION_PROBABILITIES, 1 + 1e-6):
            for name in POSITION_PROBABILITIES:
                _check_unit(name, columns[name])
        if not _in_range(entry, ROUND_SECONDS, 3600):
            for name in ROUND_SECONDS:
                if not _in_range(entry, (name,), 3600):
                    raise SampleError(f"block: {name} must be seconds in [0, 3600]")
        rounds = columns["round_rows"].size
        if columns["round"].size and (int(columns["round"].max()) >= rounds or int(columns["position"].min()) < 1):
            raise SampleError("block: a drafted position names a round that is not in the block, or position 0")
        return cls(**(values | columns))


ROUND_SECONDS = ("round_draft_s", "round_verify_s", "round_overhead_s")
POSITION_PROBABILITIES = (
    "target_prob",
    "draft_prob",
    "target_prob_raw",
    "draft_prob_raw",
    "target_max_raw",
    "draft_max_raw",
    "tv",
    "theta",
)


@dataclass(frozen=True)
class RequestRecord:
    """One served request, sent when it has finished. Seconds are durations on the worker's monotonic clock; ``started``
    and ``first_touch_at`` are Unix seconds on the worker's clock, used only to order evidence.

    ``touches`` counts the lenient branch's touches on the served path; a request served by holdback counts its first
    touch there, and the fork record carries what the lenient branch went on to do. Coins are drawn at the first touch
    with the recorded probabilities; before any touch they are False. ``confidence`` in [0, 1] is that of a whole draft
    answer, None for strategies that make none, and ``draft_s`` the seconds that the answer took to draft.
    """

    request_id: str
    pool: str
    traffic_class: str
    worker: str
    boot: str
    epoch: int
    lease_seq: int
    rule: str
    theta: float
    rho: float
    arm: Arm
    holdback_prob: float
    fork_prob: float
    label_prob: float
    fork_drawn: bool
    label_drawn: bool
    touches: int
    first_touch_at: float | None
    started: float
    prompt_tokens: int
    tokens: int
    target_passes: int
    first_token_s: float
    total_s: float
    finish_reason: str
    strategy: str = "speculative"
    confidence: float | None = None
    draft_s: float = 0.0
    KIND: ClassVar = "request"
    UNIT: ClassVar = ("theta", "rho", "holdback_prob", "fork_prob", "label_prob", "confidence")
    CHOICES: ClassVar = {"arm": ("untouched", "lenient", "holdback")}


@dataclass(frozen=True)
class ForkRecord:
    """The branch that was not served, generated from the fork at the first touch; ``done`` is False when it never ran
    (deadline, shutdown), which takes the worst case. ``touches`` are those of the lenient branch, wherever it was run.
    """

    request_id: str
    pool: str
    traffic_class: str
    worker: str
    boot: str
    done: bool
    touches: int
    tokens: int
    target_passes: int
    total_s: float
    KIND: ClassVar = "fork"


@dataclass(frozen=True)
class QualityScore:
    """A score in [0, 1] of one branch of a request. Judges see ``served`` and ``fork``, never the arm."""

    request_id: str
    pool: str
    traffic_class: str
    branch: Branch
    metric: str
    score: float
    scorer: str
    scorer_version: str
    time: float
    KIND: ClassVar = "score"
    UNIT: ClassVar = ("score",)
    CHOICES: ClassVar = {"branch": ("served", "fork")}


MAX_DEPTH = 64.0


@dataclass(frozen=True)
class KnobRow:
    """Knobs for batches of up to ``batch`` rows: block length g >= 0, knob theta and mixing weight rho in [0, 1].

    ``depth`` in [0, MAX_DEPTH]: rho holds at the first ``floor(depth)`` positions of a block, its fraction times rho at
    the next one, and the positions after that are lossless (docs/decisions/0001).
    """

    batch: int
    g: int
    theta: float
    rho: float
    depth: float = MAX_DEPTH


@dataclass(frozen=True)
class CapRow:
    """Knob limit for callers that ask for at most ``share`` of the loss budget, in [0, 1]; depth as in `KnobRow`."""

    share: float
    theta: float
    rho: float
    depth: float = MAX_DEPTH


@dataclass(frozen=True)
class Trial:
    """What a ``share`` in [0, 1] of the requests gets instead: another strategy or accept rule that is being tried.

    A request takes it by a coin of its own, drawn before its first token; its record names what it got.
    """

    share: float
    strategy: str
    rule: str
    table: tuple[KnobRow, ...]


@dataclass(frozen=True)
class Lease:
    """The knobs a worker may use, for ``ttl`` seconds from when it asked. Ordered by (epoch, seq).

    ``strategy`` is what requests get that do not ask for one. ``strategies`` and ``rules`` are the policy's lists: a
    caller may ask for one of them, and is lossless under a rule that the lease has no knobs for. ``structured`` says
    whether structured spans may be lenient ("lossless" or "lenient"), ``label_deadline`` for how many seconds after a
    touch its fork and labels are worth anything.
    """

    pool: str
    traffic_class: str
    epoch: int
    seq: int
    policy_revision: int
    issued: float
    ttl: float
    rule: str
    table: tuple[KnobRow, ...]
    caps: tuple[CapRow, ...] = ()
    holdback: float = 0.0
    fork: float = 0.0
    label: float = 0.0
    explore: float = 0.0
    strategy: str = "speculative"
    strategies: tuple[str, ...] = ("speculative", "plain")
    rules: tuple[str, ...] = ()
    structured: str = "lossless"
    label_deadline: float = 900.0
    trial: Trial | None = None

    @property
    def lossless(self) -> bool:
        """True when no row of the table allows leniency; a trial counts."""
        rows = self.table if self.trial is None or self.trial.share == 0 else (*self.table, *self.trial.table)
        return all(row.theta == 0 or row.rho == 0 or row.depth == 0 for row in rows)

    def knobs(self, rows: int) -> KnobRow:
        """The row for a batch of ``rows``: the smallest bucket that holds it, the largest one beyond the table."""
        for row in self.table:
            if rows <= row.batch:
                return row
        return self.table[-1]

    def to_json(self) -> str:
        """Canonical JSON: equal leases give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Lease:
        """Parse and check; raises SampleError."""
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict):
                raise TypeError("not an object")
            table = tuple(KnobRow(**row) for row in raw.pop("table"))
            caps = tuple(CapRow(**row) for row in raw.pop("caps", ()))
            names: dict[str, Any] = {key: tuple(raw.pop(key)) for key in ("strategies", "rules") if key in raw}
            trial = raw.pop("trial", None)
            if trial is not None:
                trial = Trial(**trial | {"table": tuple(KnobRow(**row) for row in trial["table"])})
            lease = cls(table=table, caps=caps, trial=trial, **names, **raw)
            _check_lease(lease)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise SampleError(f"lease: {e!s:.300}") from e
        return lease


@dataclass(frozen=True)
class Decision:
    """A lease with everything that led to it, so that it can be explained and replayed."""

    pool: str
    traffic_class: str
    time: float
    lease: Lease
    state: str
    reason: str
    explanation: str
    inputs: dict[str, Any] = field(default_factory=dict)
    estimates: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, Any] = field(default_factory=dict)
    counterfactual: dict[str, Any] = field(default_factory=dict)


Action = Literal["freeze", "lossless", "resume", "reset_budget", "adjust_budget"]
ALL_CLASSES = "*"


@dataclass(frozen=True)
class OperatorAction:
    """What an operator ordered for a class of a pool, or for every class (``traffic_class`` is `ALL_CLASSES`).

    ``amount`` are the loss units of an adjusted budget, None otherwise; ``time`` is in Unix seconds. Actions of a pool
    are in force in the order of ``id``.
    """

    id: int
    pool: str
    traffic_class: str
    action: Action
    amount: float | None
    who: str
    why: str
    time: float


ACTIONS: tuple[Action, ...] = ("freeze", "lossless", "resume", "reset_budget", "adjust_budget")

Record = TokenBlock | RequestRecord | ForkRecord | QualityScore
Flat = RequestRecord | ForkRecord | QualityScore
FLAT: dict[str, type[Flat]] = {cls.KIND: cls for cls in (RequestRecord, ForkRecord, QualityScore)}


def to_fields(record: Record) -> Fields:
    """The stream entry of any record."""
    if isinstance(record, TokenBlock):
        return record.to_fields()
    return _head_fields(record.KIND, asdict(record))


def from_fields(entry: Mapping[bytes, bytes]) -> Record:
    """The record of a stream entry; raises SampleError for anything that is not one."""
    kind = entry.get(b"kind", b"?").decode("ascii", "replace")
    if kind == "block":
        return TokenBlock.from_fields(entry)
    if kind in FLAT:
        return _flat(FLAT[kind], entry)
    raise SampleError(f"entry: unknown kind {kind[:40]!r}")


def _flat(cls: type[Flat], entry: Mapping[bytes, bytes]) -> Flat:
    head = _parse_head(entry, cls.KIND)
    values = _typed(cls, head)
    for name in getattr(cls, "UNIT", ()):
        if values[name] is not None:
            _check_unit(name, np.asarray(values[name]))
    for name, choices in getattr(cls, "CHOICES", {}).items():
        if values[name] not in choices:
            raise SampleError(f"{cls.KIND}: {name} is {values[name]!r}, expected one of {choices}")
    return cls(**values)


def _check_lease(lease: Lease) -> None:
    """Raise ValueError for a lease of the right shape whose values no controller writes."""
    rows = lease.table if lease.trial is None else (*lease.table, *lease.trial.table)
    counts = [lease.epoch, lease.seq, lease.policy_revision, *(n for r in rows for n in (r.batch, r.g))]
    if not all(type(n) is int and 0 <= n < 1 << 53 for n in counts):
        raise ValueError("epoch, seq, policy_revision, batch and g must be counts")
    units = [lease.holdback, lease.fork, lease.label, lease.explore]
    units += [v for r in rows for v in (r.theta, r.rho)] + ([] if lease.trial is None else [lease.trial.share])
    units += [v for c in lease.caps for v in (c.share, c.theta, c.rho)]
    if not all(type(v) in (int, float) and 0 <= v <= 1 for v in units):
        raise ValueError("a knob, share or probability is not in [0, 1]")
    depths = [r.depth for r in rows] + [c.depth for c in lease.caps]
    if not all(type(v) in (int, float) and 0 <= v <= MAX_DEPTH for v in depths):
        raise ValueError(f"a depth is not in [0, {MAX_DEPTH:g}]")
    seconds = (lease.issued, lease.ttl, lease.label_deadline)
    if not all(type(v) in (int, float) and 0 <= v <= _MAX_NUMBER for v in seconds) or lease.ttl == 0:
        raise ValueError("issued, ttl or label_deadline is not a number of seconds, or ttl is not positive")
    names = [lease.pool, lease.traffic_class, lease.rule, lease.strategy, *lease.strategies, *lease.rules]
    for name in (*names, *(() if lease.trial is None else (lease.trial.strategy, lease.trial.rule))):
        if not isinstance(name, str) or not _NAME.match(name):
            raise ValueError(f"{name!r:.60} is not a short name")
    if lease.structured not in ("lossless", "lenient"):
        raise ValueError(f"structured is {lease.structured!r:.60}, expected lossless or lenient")
    for table in (lease.table, *(() if lease.trial is None else (lease.trial.table,))):
        batches = [r.batch for r in table]
        if not batches or batches[0] < 1 or batches != sorted(set(batches)):
            raise ValueError("a knob table is empty, or not sorted by distinct batch sizes >= 1")


def _head_fields(kind: str, head: Mapping[str, Any]) -> Fields:
    return {b"kind": kind.encode(), b"head": json.dumps(head, separators=(",", ":"), allow_nan=False).encode()}


def _parse_head(entry: Mapping[bytes, bytes], kind: str) -> dict[str, Any]:
    try:
        head = json.loads(entry[b"head"])
    except (KeyError, ValueError, RecursionError) as e:
        raise SampleError(f"{kind}: head is missing or not JSON") from e
    if not isinstance(head, dict):
        raise SampleError(f"{kind}: head is not an object")
    return head


def _typed(cls: type[Any], head: Mapping[str, Any]) -> dict[str, Any]:
    """Check the scalars of ``head`` against the annotations of ``cls``: names, counts, finite numbers, flags."""
    values: dict[str, Any] = {}
    for f in fields(cls):
        annotation = str(f.type)
        if annotation.startswith("npt."):
            continue
        if f.name not in head and f.default is not MISSING:  # an older worker does not know the field
            values[f.name] = f.default
            continue
        if f.name not in head or (head[f.name] is None and "None" not in annotation):
            raise SampleError(f"{cls.__name__}: {f.name} is missing")
        value = head[f.name]
        if value is None:
            pass
        elif annotation == "bool":
            if not isinstance(value, bool):
                raise SampleError(f"{cls.__name__}: {f.name} must be true or false, not {value!r}")
        elif annotation == "int":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
                raise SampleError(f"{cls.__name__}: {f.name} must be a count, not {value!r:.60}")
        elif annotation.startswith("float"):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NUMBER:
                raise SampleError(f"{cls.__name__}: {f.name} must be a number in [0, 1e11], not {value!r:.60}")
            value = float(value)
        elif not isinstance(value, str) or not _NAME.match(value):
            raise SampleError(f"{cls.__name__}: {f.name} must be a short name, not {value!r:.60}")
        values[f.name] = value
    return values


def _column(entry: Mapping[bytes, bytes], name: str, dtype: str) -> npt.NDArray[Any]:
    raw = entry.get(name.encode())
    if raw is None:
        raise SampleError(f"block: column {name} is missing")
    size = np.dtype(dtype).itemsize
    if len(raw) % size or len(raw) // size > _MAX_ROWS:
        raise SampleError(f"block: column {name} has {len(raw)} bytes, not a small multiple of {size}")
    return np.frombuffer(raw, dtype=dtype)


def _in_range(entry: Mapping[bytes, bytes], names: tuple[str, ...], most: float) -> bool:
    """Whether all numbers in these columns of singles are in [0, ``most``]; they are numbers then."""
    values = np.frombuffer(b"".join([entry[name.encode()] for name in names]), dtype="<f4")
    return values.size == 0 or bool(values.min() >= 0 and values.max() <= most)


def _check_unit(name: str, values: npt.NDArray[Any]) -> None:
    if not np.all(np.isfinite(values)) or np.any(values < 0) or np.any(values > 1 + 1e-6):
        raise SampleError(f"{name} must lie in [0, 1]")
