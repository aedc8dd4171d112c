"""Entries that were delivered and never acknowledged: whoever had them, they are handled once, or set aside."""

from __future__ import annotations

import pytest
import redis

from controller.ingest import Deduplicator, drain
from storage.pending import Pending
from storage.records import TokenBlock, from_fields
from storage.stream import StreamReader, StreamWriter, dead_key, telemetry_key
from tests.support_storage import a_block


@pytest.fixture
def writer(client: redis.Redis, pool: str) -> StreamWriter:
    return StreamWriter(client, pool)


def seqs(entries: list[tuple[str, dict[bytes, bytes]]]) -> list[int]:
    found = [from_fields(fields) for _, fields in entries]
    return [block.seq for block in found if isinstance(block, TokenBlock)]


def send(writer: StreamWriter, pool: str, *numbers: int) -> None:
    writer.append([a_block(pool, seq=n) for n in numbers])


def test_a_reader_of_another_name_takes_over_what_the_last_one_held(
    client: redis.Redis, writer: StreamWriter, pool: str
) -> None:
    """A host named by its process id comes back with another: nothing waits for a name that never returns."""
    send(writer, pool, 0, 1, 2)
    first = StreamReader(client, pool, consumer="host-17")
    first.ack([first.read()[0][0]])
    send(writer, pool, 3)
    second = StreamReader(client, pool, consumer="host-42")
    taken = second.read()
    assert seqs(taken) + seqs(second.read()) == [1, 2, 3]
    assert second.read() == []
    second.ack([entry_id for entry_id, _ in taken])
    names = [c["name"] for c in client.xinfo_consumers(telemetry_key(pool), "controller")]  # type: ignore[union-attr]
    assert b"host-17" not in names, "names do not pile up"
    assert client.xpending(telemetry_key(pool), "controller")["pending"] == 1  # type: ignore[index]


def test_what_was_taken_over_and_not_saved_comes_again(client: redis.Redis, writer: StreamWriter, pool: str) -> None:
    """Also when the position that was saved meanwhile is beyond it."""
    send(writer, pool, 0, 1)
    StreamReader(client, pool, consumer="host-17").read()
    send(writer, pool, 2)
    second = StreamReader(client, pool)
    assert seqs(second.read()) == [0, 1]
    position = second.read()[-1][0]
    third = StreamReader(client, pool)
    third.resume_from(position)
    seen = third.read()
    assert seqs(seen) == [0, 1]
    third.ack([entry_id for entry_id, _ in seen])
    assert third.read() == []


def test_a_consumer_that_is_at_work_is_left_alone_until_it_has_been_idle(
    client: redis.Redis, writer: StreamWriter, pool: str
) -> None:
    """At its start a reader takes everything over, since it leads now; after that only from the dead."""
    reader = StreamReader(client, pool, reclaim_s=0.0)
    patient = Pending(client, telemetry_key(pool), "controller", "controller", 5)
    assert reader.read() == []
    send(writer, pool, 0)
    client.xreadgroup("controller", "other", {telemetry_key(pool): ">"}, count=1)
    patient.take_over(3600.0)
    assert patient.late(10).entries == []
    assert seqs(reader.read()) == [0], "idle for no time is enough for a reader that does not wait"


def test_the_entry_that_ends_every_reader_is_set_aside_and_the_others_flow(
    client: redis.Redis, writer: StreamWriter, pool: str
) -> None:
    """Each life reads, handles in order, and dies at entry 250; what it handled before is saved batch by batch."""
    send(writer, pool, *range(400))
    seen, lives, handled = Deduplicator(), 0, list[int]()
    state = seen.to_state()
    while True:
        lives += 1
        assert lives <= 10
        reader, alive = StreamReader(client, pool, max_deliveries=5), True
        while alive:
            batch = drain(reader, seen, pool)
            if not batch.ids:
                break
            numbers = [r.seq for r in batch.records if isinstance(r, TokenBlock)]
            if 250 in numbers:
                alive = False
                seen = Deduplicator.from_state(state)
            else:
                handled += numbers
                reader.ack(batch.ids)
            state = seen.to_state()
        if alive:
            break
    assert handled == [n for n in range(400) if n != 250]
    assert lives == 6, "delivered five times, set aside in the sixth life"
    [(_, kept)] = client.xrange(dead_key(pool))  # type: ignore[misc]
    assert b"never acknowledged" in kept[b"_reason"]
    assert client.xpending(telemetry_key(pool), "controller")["pending"] == 0  # type: ignore[index]


def test_no_entry_is_passed_over_for_being_delivered_more_often(
    client: redis.Redis, writer: StreamWriter, pool: str
) -> None:
    """Two readers at work for a moment (a leader that does not know that it is none) mix the numbers of deliveries."""
    send(writer, pool, *range(6))
    entries = StreamReader(client, pool).read()
    for i in (2, 2, 4):
        client.xclaim(telemetry_key(pool), "controller", "controller", 0, [entries[i][0]])
    reader, found = StreamReader(client, pool), list[int]()
    while more := reader.read():
        found += seqs(more)
    assert found == list(range(6))


def test_an_entry_of_the_snapshot_is_never_set_aside(client: redis.Redis, writer: StreamWriter, pool: str) -> None:
    """It was handled and saved, and only the acknowledgement was lost, as often as it may."""
    send(writer, pool, 0)
    position = StreamReader(client, pool).read()[0][0]
    for _ in range(8):
        assert seqs(StreamReader(client, pool).read()) in ([0], [])
    send(writer, pool, 1)
    client.delete(dead_key(pool))
    client.xgroup_destroy(telemetry_key(pool), "controller")
    client.xgroup_create(telemetry_key(pool), "controller", id="0")
    for _ in range(8):
        client.xreadgroup("controller", "controller", {telemetry_key(pool): ">"}, count=1)
        client.xclaim(telemetry_key(pool), "controller", "controller", 0, [position])
    reader = StreamReader(client, pool)
    reader.resume_from(position)
    assert seqs(reader.read()) == [1]
    assert not client.exists(dead_key(pool))


def test_taking_over_survives_a_flush(client: redis.Redis, writer: StreamWriter, pool: str) -> None:
    """The stream and its group vanish between two reclaims."""
    reader = StreamReader(client, pool, reclaim_s=0.0)
    send(writer, pool, 0)
    assert seqs(reader.read()) == [0]
    client.delete(telemetry_key(pool))
    assert reader.read() == []
    send(writer, pool, 1)
    assert seqs(reader.read()) == [1]


def test_everything_up_to_a_position_is_acknowledged(client: redis.Redis, writer: StreamWriter, pool: str) -> None:
    """After an outage of the database in which more was read than anybody remembers one by one."""
    send(writer, pool, *range(5))
    reader = StreamReader(client, pool)
    entries = reader.read()
    reader.ack_up_to(entries[3][0])
    assert client.xpending(telemetry_key(pool), "controller")["pending"] == 1  # type: ignore[index]
    reader.ack_up_to(entries[3][0])
