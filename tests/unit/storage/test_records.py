"""Records survive the wire bit for bit, and nothing malformed comes through or raises anything but SampleError."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import SampleError
from storage.records import FLAT, CapRow, Fields, KnobRow, Lease, Record, TokenBlock, from_fields, to_fields
from tests.support_storage import NOW, a_block, a_fork, a_lease, a_request, a_score, touched

FLAT_RECORDS = [a_request(), touched("chat", "r2", "holdback"), a_fork(), a_score()]


def same(a: Record, b: Record) -> bool:
    """Equality that also compares arrays, with their types."""

    def equal(x: Any, y: Any) -> bool:
        return x.dtype == y.dtype and np.array_equal(x, y) if isinstance(x, np.ndarray) else bool(x == y)

    return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def with_head(record: Record, **changes: Any) -> Fields:
    """The entry of a record with some of its scalars replaced; `...` removes one."""
    entry = to_fields(record)
    head = json.loads(entry[b"head"]) | changes
    return entry | {b"head": json.dumps({k: v for k, v in head.items() if v is not ...}).encode()}


@pytest.mark.parametrize("record", FLAT_RECORDS, ids=lambda r: r.KIND)
def test_a_flat_record_comes_back_as_it_was(record: Record) -> None:
    """Every scalar is carried, None included."""
    assert from_fields(to_fields(record)) == record


@given(seq=st.integers(0, 1000), positions=st.integers(0, 70))
def test_a_block_comes_back_bit_for_bit(seq: int, positions: int) -> None:
    """Arrays keep their bits and types, an empty block included."""
    block = a_block(seq=seq, positions=positions)
    assert same(from_fields(to_fields(block)), block)


def test_a_block_of_512_positions_is_about_twenty_kilobytes() -> None:
    """What a stream entry costs: 40 bytes a position, and a little for the head and the rounds."""
    size = sum(len(k) + len(v) for k, v in to_fields(a_block(positions=512)).items())
    assert 512 * 40 <= size <= 512 * 40 + 2500


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (a_request(), {"request_id": ...}),
        (a_request(), {"request_id": None}),
        (a_request(), {"request_id": "a b"}),
        (a_request(), {"request_id": "x" * 129}),
        (a_request(), {"pool": 7}),
        (a_request(), {"pool": "chat\n"}),
        (a_request(), {"arm": "served"}),
        (a_request(), {"touches": -1}),
        (a_request(), {"touches": 1.5}),
        (a_request(), {"touches": True}),
        (a_request(), {"tokens": 1 << 53}),
        (a_request(), {"fork_drawn": 1}),
        (a_request(), {"theta": 1.01}),
        (a_request(), {"theta": -0.1}),
        (a_request(), {"theta": "0.5"}),
        (a_request(), {"holdback_prob": float("nan")}),
        (a_request(), {"total_s": float("inf")}),
        (a_request(), {"total_s": 10**400}),
        (a_request(), {"started": 1e300}),
        (a_request(), {"first_touch_at": 1e12}),
        (a_score(), {"score": 1.5}),
        (a_score(), {"score": None}),
        (a_score(), {"branch": "lenient"}),
        (a_score(), {"time": -1}),
        (a_fork(), {"done": None}),
        (a_block(), {"rho": 2}),
        (a_block(), {"seq": 0.5}),
        (a_block(), {"rule": ""}),
    ],
)
def test_a_wrong_scalar_is_refused_by_name(record: Record, changes: dict[str, Any]) -> None:
    """One field is broken in a good record; the error names it."""
    with pytest.raises(SampleError, match=next(iter(changes))):
        from_fields(with_head(record, **changes))


@pytest.mark.parametrize("name", [*TokenBlock.ROUND_COLUMNS, *TokenBlock.POSITION_COLUMNS])
def test_a_block_with_a_missing_or_short_column_is_refused(name: str) -> None:
    """A column that is absent, cut, or one row short never becomes a block."""
    entry = to_fields(a_block())
    for broken in (None, entry[name.encode()][:-1], b""):
        changed = {k: v for k, v in entry.items() if k != name.encode()}
        if broken is not None:
            changed[name.encode()] = broken
        with pytest.raises(SampleError, match="column"):
            from_fields(changed)


@pytest.mark.parametrize("name", ["target_prob", "draft_prob_raw", "tv", "theta", "round_draft_s", "round_overhead_s"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -0.5, 5e3])
def test_a_block_with_a_number_out_of_range_is_refused(name: str, value: float) -> None:
    """Probabilities lie in [0, 1] and seconds in [0, 3600]; what is not a number lies nowhere."""
    block = a_block()
    column = getattr(block, name).copy()
    column[-1] = value
    with pytest.raises(SampleError, match=name):
        from_fields(to_fields(replace(block, **{name: column})))


def test_a_position_outside_its_block_is_refused() -> None:
    """A drafted position belongs to a round of the block and is counted from one."""
    block = a_block()
    for change in ({"round": block.round + 1}, {"position": block.position - 1}):
        with pytest.raises(SampleError, match="round"):
            from_fields(to_fields(replace(block, **change)))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {b"kind": b"request"},
        {b"kind": b"nothing", b"head": b"{}"},
        {b"kind": b"\xff\xfe", b"head": b"{}"},
        {b"kind": b"score", b"head": b"\xff"},
        {b"kind": b"score", b"head": b"[]"},
        {b"kind": b"score", b"head": b"{"},
        {b"kind": b"score", b"head": b"[" * 200_000},
        {b"kind": b"score", b"head": b'{"score":' + b"9" * 5000 + b"}"},
    ],
)
def test_an_entry_of_no_known_shape_is_refused(entry: Fields) -> None:
    """Foreign, cut and hostile entries."""
    with pytest.raises(SampleError):
        from_fields(entry)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(kind=st.sampled_from(sorted(FLAT)), data=st.data())
def test_any_value_in_any_scalar_gives_a_record_or_a_sample_error(kind: str, data: st.DataObject) -> None:
    """No value of any type in any field raises anything else; what is accepted can be sent again unchanged."""
    record = next(r for r in FLAT_RECORDS if kind == r.KIND)
    name = data.draw(st.sampled_from([f.name for f in fields(record)]))
    try:
        parsed = from_fields(with_head(record, **{name: data.draw(JSON)}))
    except SampleError:
        return
    assert from_fields(to_fields(parsed)) == parsed


@given(name=st.sampled_from([*to_fields(a_block())]), value=st.binary(max_size=64))
def test_any_bytes_in_any_column_give_a_block_or_a_sample_error(name: bytes, value: bytes) -> None:
    """No bytes in any field of a block raise anything else."""
    try:
        from_fields(to_fields(a_block()) | {name: value})
    except SampleError:
        return


@given(st.dictionaries(st.binary(max_size=12), st.binary(max_size=40), max_size=4))
def test_any_entry_at_all_is_refused(entry: Fields) -> None:
    """Random fields are never a record, and never another error."""
    with pytest.raises(SampleError):
        from_fields(entry)


def test_a_lease_comes_back_bit_for_bit_and_its_text_is_canonical() -> None:
    """Equal leases give equal text, so a decision can be replayed and compared."""
    lease = a_lease()
    assert Lease.from_json(lease.to_json()) == lease
    assert Lease.from_json(lease.to_json()).to_json() == lease.to_json()
    assert replace(lease, label=0.5).to_json() != lease.to_json()


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "1"},
        {"epoch": 1.5},
        {"epoch": -1},
        {"epoch": True},
        {"seq": None},
        {"pool": ["chat"]},
        {"traffic_class": "a b"},
        {"rule": 3},
        {"ttl": 0},
        {"ttl": float("inf")},
        {"ttl": 10**400},
        {"issued": float("nan")},
        {"holdback": 1.5},
        {"fork": "1"},
        {"explore": -0.1},
        {"table": []},
        {"table": None},
        {"table": [7]},
        {"table": [{"batch": 0, "g": 1, "theta": 0, "rho": 0}]},
        {"table": [{"batch": 1, "g": -1, "theta": 0, "rho": 0}]},
        {"table": [{"batch": 1, "g": 2.5, "theta": 0, "rho": 0}]},
        {"table": [{"batch": 1, "g": 1, "theta": 1.5, "rho": 0}]},
        {"table": [{"batch": 1, "g": 1, "theta": 0, "rho": None}]},
        {"table": [{"batch": 1, "g": 1, "theta": 0, "rho": 0, "mu": 1}]},
        {"table": [{"batch": n, "g": 1, "theta": 0, "rho": 0} for n in (2, 1)]},
        {"table": [{"batch": 1, "g": 1, "theta": 0, "rho": 0}] * 2},
        {"caps": None},
        {"caps": [{"share": 2, "theta": 0, "rho": 0}]},
        {"unknown": 1},
        {"rule": ...},
    ],
)
def test_a_lease_with_one_broken_field_is_refused(changes: dict[str, Any]) -> None:
    """A worker never acts on a lease that no controller writes."""
    raw = json.loads(a_lease().to_json()) | changes
    with pytest.raises(SampleError, match="lease"):
        Lease.from_json(json.dumps({k: v for k, v in raw.items() if v is not ...}))


@given(st.binary(max_size=60) | JSON.map(json.dumps) | st.just("[" * 200_000))
def test_any_text_is_a_lease_or_a_sample_error(text: str | bytes) -> None:
    """Whatever stands in the lease's key."""
    with pytest.raises(SampleError):
        Lease.from_json(text)


def test_knobs_are_those_of_the_smallest_bucket_that_holds_the_batch() -> None:
    """Below, at and above each bucket; beyond the table the largest one holds."""
    small, large = KnobRow(1, 8, 0.5, 1.0), KnobRow(16, 3, 0.25, 1.0)
    lease = a_lease(table=(small, large), caps=(CapRow(0.1, 0.0, 0.0),), issued=NOW)
    assert [lease.knobs(rows) for rows in (1, 2, 16, 17)] == [small, large, large, large]


def test_a_lease_is_lossless_when_no_row_is_lenient() -> None:
    """A knob at zero or a mixing weight at zero is lossless."""
    assert a_lease(table=(KnobRow(1, 4, 0.0, 1.0), KnobRow(8, 4, 0.5, 0.0))).lossless
    assert not a_lease(table=(KnobRow(1, 4, 0.0, 1.0), KnobRow(8, 4, 0.5, 0.1))).lossless
