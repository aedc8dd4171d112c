"""What the telemetry stream and the lease store promise, on every server they run on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from storage.embedded import EmbeddedServer
from storage.errors import LeaseRefused, SampleError, StorageError
from storage.records import Record, from_fields
from storage.stream import (
    LeaseStore,
    StreamReader,
    StreamWriter,
    connect,
    dead_key,
    fence_key,
    lease_key,
    telemetry_key,
)
from tests.support import wait_until
from tests.support_storage import a_block, a_fork, a_lease, a_request, a_score


@pytest.fixture
def writer(client: redis.Redis, pool: str) -> StreamWriter:
    return StreamWriter(client, pool)


@pytest.fixture
def reader(client: redis.Redis, pool: str) -> StreamReader:
    return StreamReader(client, pool)


def seqs(entries: list[tuple[str, dict[bytes, bytes]]]) -> list[int]:
    """The block numbers in entries of blocks."""
    return [from_fields(fields).seq for _, fields in entries]  # type: ignore[union-attr]


def blocks(pool: str, *numbers: int) -> list[Record]:
    return [a_block(pool, seq=n) for n in numbers]


# -- delivery ----------------------------------------------------------------------------------------------------------


def test_records_arrive_in_order_and_as_they_were(writer: StreamWriter, reader: StreamReader, pool: str) -> None:
    """Every kind of record, in one append."""
    records: list[Record] = [a_request(pool), a_fork(pool), a_score(pool), a_block(pool)]
    assert writer.append(records) == 4
    received = [from_fields(fields) for _, fields in reader.read()]
    assert received[:3] == records[:3]
    assert [type(r) for r in received] == [type(r) for r in records]
    assert reader.read() == []


def test_an_append_of_nothing_is_nothing(writer: StreamWriter) -> None:
    """No round trip, no entry."""
    assert writer.append([]) == 0


def test_a_record_that_cannot_be_written_sends_nothing(writer: StreamWriter, reader: StreamReader, pool: str) -> None:
    """A number that is not finite is refused at the worker, before the good records beside it are sent."""
    with pytest.raises(SampleError, match="cannot be written"):
        writer.append([a_request(pool), a_request(pool, "r2", total_s=float("nan"))])
    assert reader.read() == []


def test_a_read_is_bounded_and_the_rest_waits(writer: StreamWriter, reader: StreamReader, pool: str) -> None:
    """`max_entries` at a time, nothing twice, and `lag` says what waits."""
    writer.append(blocks(pool, *range(5)))
    assert reader.lag() == 5
    assert seqs(reader.read(max_entries=2)) == [0, 1]
    assert reader.lag() == 3
    assert seqs(reader.read(max_entries=10)) == [2, 3, 4]
    assert reader.lag() == 0


def test_what_was_not_acknowledged_comes_again_after_a_restart(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """First the own pending entries, then new ones; what was acknowledged does not come again."""
    writer.append(blocks(pool, 0, 1, 2))
    entries = reader.read()
    reader.ack([entries[0][0]])
    writer.append(blocks(pool, 3))
    successor = StreamReader(client, pool)
    assert seqs(successor.read(max_entries=1)) == [1]
    assert seqs(successor.read()) + seqs(successor.read()) == [2, 3]
    assert successor.read() == []


def test_what_the_snapshot_includes_is_acknowledged_unseen(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """A crash between saving and acknowledging counts nothing twice."""
    writer.append(blocks(pool, 0, 1, 2))
    entries = reader.read()
    successor = StreamReader(client, pool)
    successor.resume_from(entries[1][0])
    assert seqs(successor.read()) == [2]
    assert client.xpending(telemetry_key(pool), "controller")["pending"] == 1  # type: ignore[index]


def test_a_group_that_is_behind_the_snapshot_skips_what_it_includes(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """The group was lost and starts at zero: entries of the snapshot pass by, the rest is read."""
    writer.append(blocks(pool, 0, 1, 2))
    entries = reader.read()
    client.xgroup_destroy(telemetry_key(pool), "controller")
    client.xgroup_create(telemetry_key(pool), "controller", id="0")
    successor = StreamReader(client, pool)
    successor.resume_from(entries[1][0])
    assert seqs(successor.read(max_entries=1)) == [2]


@pytest.mark.parametrize("bad", ["", "now", "1-2-3", "-1"])
def test_a_position_that_is_no_stream_id_is_misuse(reader: StreamReader, bad: str) -> None:
    """A position comes from `read`, never from elsewhere."""
    with pytest.raises(ValueError, match="stream id"):
        reader.resume_from(bad)


def test_a_lost_reply_is_found_among_the_pending(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """The server delivered to a connection that was gone, at once or much later: the entries come next, in order."""

    def take_unseen(count: int) -> None:
        client.xreadgroup("controller", "controller", {telemetry_key(pool): ">"}, count=count)

    writer.append(blocks(pool, 0))
    assert seqs(reader.read()) == [0]
    writer.append(blocks(pool, 1, 2, 3))
    take_unseen(2)
    assert seqs(reader.read(max_entries=1)) == [1]
    assert seqs(reader.read()) == [2, 3]
    writer.append(blocks(pool, 4))
    assert seqs(reader.read()) == [4]
    writer.append(blocks(pool, 5))
    take_unseen(1)
    writer.append(blocks(pool, 6))
    assert seqs(reader.read()) + seqs(reader.read()) == [5, 6]
    assert reader.read() == []
    assert reader.lost == 0


def test_a_server_that_hung_loses_nothing(tmp_path: object) -> None:
    """Calls give up in bounded time; when it goes on, each entry is read once and in order."""
    with EmbeddedServer(str(tmp_path)) as server:
        assert server.pid is not None
        client, patient = connect(server.url), connect(server.url)
        client.connection_pool.connection_kwargs["socket_timeout"] = 0.05
        writer, reader = StreamWriter(patient, "p"), StreamReader(client, "p")
        writer.append(blocks("p", 0, 1))
        received = seqs(reader.read(max_entries=1))
        client.connection_pool.disconnect()
        os.kill(server.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(StorageError):
                reader.read(max_entries=1)
        os.kill(server.pid, signal.SIGCONT)
        patient.ping()
        writer.append(blocks("p", 2, 3))
        client.connection_pool.connection_kwargs["socket_timeout"] = 2.0
        while more := seqs(reader.read(max_entries=1)):
            received += more
        assert received == [0, 1, 2, 3]
        client.close()
        patient.close()


# -- loss --------------------------------------------------------------------------------------------------------------


def test_a_destroyed_group_is_made_again_and_skips_nothing(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """After the last id seen: neither the old entries again nor a gap."""
    writer.append(blocks(pool, 0, 1))
    reader.read()
    client.xgroup_destroy(telemetry_key(pool), "controller")
    writer.append(blocks(pool, 2))
    assert seqs(reader.read()) == [2]


def test_after_the_stream_is_wiped_everything_new_is_read(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """FLUSHALL while running, with and without new entries before the next read."""
    writer.append(blocks(pool, 0))
    reader.read()
    client.delete(telemetry_key(pool))
    assert reader.read() == []
    writer.append(blocks(pool, 1))
    assert seqs(reader.read()) == [1]
    client.delete(telemetry_key(pool))
    writer.append(blocks(pool, 2))
    assert seqs(reader.read()) == [2]
    assert reader.lost == 0


def test_a_new_stream_with_smaller_ids_is_read_from_its_start(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """A server whose clock is behind replaces the old one: the position of the old stream means nothing there."""
    writer.append(blocks(pool, 0))
    last = reader.read()[0][0]
    client.delete(telemetry_key(pool))
    client.xadd(telemetry_key(pool), {b"kind": b"x"}, id="5-1")
    assert [entry_id for entry_id, _ in reader.read()] == ["5-1"]
    successor = StreamReader(client, pool, group="other")
    successor.resume_from(last)
    assert [entry_id for entry_id, _ in successor.read()] == ["5-1"]


def test_entries_trimmed_unread_are_counted(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """Only those that were not read; trimming what was read is no loss."""
    writer.append(blocks(pool, 0, 1))
    reader.read()
    client.xtrim(telemetry_key(pool), maxlen=0, approximate=False)
    writer.append(blocks(pool, 2, 3, 4))
    client.xtrim(telemetry_key(pool), maxlen=1, approximate=False)
    assert seqs(reader.read()) == [4]
    assert reader.lost == 2
    writer.append(blocks(pool, 5))
    reader.read()
    assert reader.lost == 2


def test_pending_entries_that_were_trimmed_are_counted_and_let_go(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """After a restart they cannot come again; they must not come as empty entries either."""
    writer.append(blocks(pool, 0, 1, 2))
    reader.read()
    client.xtrim(telemetry_key(pool), maxlen=1, approximate=False)
    successor = StreamReader(client, pool)
    assert seqs(successor.read()) == [2]
    assert successor.lost == 2
    assert client.xpending(telemetry_key(pool), "controller")["pending"] == 1  # type: ignore[index]


def test_the_stream_is_capped_by_entries_and_by_bytes(client: redis.Redis, pool: str) -> None:
    """Approximately: whole nodes of the server's tree are dropped, never a live one."""
    record = a_block(pool, positions=512)
    size = sum(len(k) + len(v) for k, v in record.to_fields().items())
    for limited in (
        StreamWriter(client, pool, maxlen=10),
        StreamWriter(client, pool, max_bytes=10 * size),
    ):
        client.delete(telemetry_key(pool))
        for _ in range(10):
            limited.append([record] * 5)
        assert 9 <= client.xlen(telemetry_key(pool)) <= 12


def test_old_entries_go_when_every_group_is_done_with_them(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """What a group has not read, or not acknowledged, stays; without an age limit nothing younger goes."""
    big = [a_block(pool, seq=n, positions=512) for n in range(4)]  # each is a node of its own, so trimming is exact
    writer.append(big)
    ids = [entry_id for entry_id, _ in reader.read()]
    reader.ack(ids)
    assert client.xlen(telemetry_key(pool)) == 4
    eager = StreamReader(client, pool, keep_s=0.0)
    second = StreamReader(client, pool, group="second")
    second.read()
    eager.ack(ids)
    assert client.xlen(telemetry_key(pool)) == 4
    second.ack(ids[:2])
    StreamReader(client, pool, keep_s=0.0).ack(ids)
    assert [entry_id.decode() for entry_id, _ in client.xrange(telemetry_key(pool))] == ids[2:]  # type: ignore[union-attr]


# -- setting aside -----------------------------------------------------------------------------------------------------


def test_a_bad_entry_is_set_aside_with_its_reason(
    client: redis.Redis, writer: StreamWriter, reader: StreamReader, pool: str
) -> None:
    """It is kept for a person to look at, is no longer pending, and the good ones around it flow."""
    writer.append([a_score(pool)])
    client.xadd(telemetry_key(pool), {b"kind": b"score", b"head": b"{" * 100_000})
    writer.append([a_fork(pool)])
    good = []
    for entry_id, fields in reader.read():
        try:
            good.append(from_fields(fields))
        except SampleError as e:
            bad_id = entry_id
            reader.dead_letter(entry_id, fields, str(e))
    assert good == [a_score(pool), a_fork(pool)]
    [(_, kept)] = client.xrange(dead_key(pool))  # type: ignore[misc]
    assert kept[b"_id"].decode() == bad_id
    assert b"JSON" in kept[b"_reason"]
    assert len(kept[b"head"]) == 32_768
    assert client.xpending(telemetry_key(pool), "controller")["pending"] == 2  # type: ignore[index]


def test_the_dead_letter_stream_is_capped(client: redis.Redis, reader: StreamReader, pool: str) -> None:
    """A worker that sends only rubbish fills nothing."""
    for _ in range(1300):
        reader.dead_letter("1-1", {}, "rubbish")
    assert 1000 <= client.xlen(dead_key(pool)) <= 1100


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_is_read_as_written_with_the_time_left(client: redis.Redis, pool: str) -> None:
    """Bit for bit, with a ttl that the store has begun to count down."""
    store, lease = LeaseStore(client), a_lease(pool)
    store.write(lease)
    found = store.read(pool, "default")
    assert found is not None
    assert found[0] == lease
    assert 0 < found[1] <= 5.0
    assert 0 < client.pttl(lease_key(pool, "default")) <= 5000
    assert client.ttl(fence_key(pool, "default")) > 29 * 86400


def test_there_is_no_lease_before_the_first_and_after_the_last(client: redis.Redis, pool: str) -> None:
    """A lease ends by itself."""
    store = LeaseStore(client)
    assert store.read(pool, "default") is None
    assert store.fence(pool, "default") is None
    store.write(a_lease(pool, ttl=0.02))
    assert wait_until(lambda: store.read(pool, "default") is None)
    assert store.fence(pool, "default") == (1, 1)


@pytest.mark.parametrize(("epoch", "seq"), [(1, 9), (2, 4), (2, 5), (0, 100)])
def test_a_lease_that_is_not_newer_is_refused(client: redis.Redis, pool: str, epoch: int, seq: int) -> None:
    """Order is (epoch, seq): an older controller's higher seq does not help it. The current lease stays."""
    store, current = LeaseStore(client), a_lease(pool, epoch=2, seq=5)
    store.write(current)
    with pytest.raises(LeaseRefused, match=r"\(2, 5\)"):
        store.write(a_lease(pool, epoch=epoch, seq=seq, fork=0.25))
    assert store.read(pool, "default") is not None
    assert store.read(pool, "default")[0] == current  # type: ignore[index]


@pytest.mark.parametrize(("epoch", "seq"), [(2, 6), (3, 1)])
def test_a_newer_lease_replaces_the_current_one(client: redis.Redis, pool: str, epoch: int, seq: int) -> None:
    """The next of this controller, or the first of its successor."""
    store = LeaseStore(client)
    store.write(a_lease(pool, epoch=2, seq=5))
    store.write(a_lease(pool, epoch=epoch, seq=seq))
    assert store.read(pool, "default")[0] == a_lease(pool, epoch=epoch, seq=seq)  # type: ignore[index]


def test_an_old_lease_is_refused_after_the_newer_one_has_ended(client: redis.Redis, pool: str) -> None:
    """The fence outlives the lease: a paused controller that wakes up late cannot lease."""
    store = LeaseStore(client)
    store.write(a_lease(pool, epoch=2, seq=1, ttl=0.01))
    wait_until(lambda: not client.exists(lease_key(pool, "default")))
    for old in (a_lease(pool, epoch=1, seq=7), a_lease(pool, epoch=2, seq=1, ttl=0.01)):
        with pytest.raises(LeaseRefused):
            store.write(old)


def test_the_same_lease_again_is_no_error_and_does_not_last_longer(client: redis.Redis, pool: str) -> None:
    """A write whose reply was lost is tried again; its ttl still counts from the first."""
    store, lease = LeaseStore(client), a_lease(pool)
    store.write(lease)
    client.pexpire(lease_key(pool, "default"), 1000)
    store.write(lease)
    assert client.pttl(lease_key(pool, "default")) <= 1000
    with pytest.raises(LeaseRefused):
        store.write(replace(lease, fork=0.5))


def test_classes_have_leases_of_their_own(client: redis.Redis, pool: str) -> None:
    """A lease of one class says nothing about another."""
    store = LeaseStore(client)
    store.write(a_lease(pool, traffic_class="code", seq=9))
    store.write(a_lease(pool, traffic_class="chat", seq=1))
    assert store.read(pool, "default") is None
    assert store.read(pool, "code")[0].seq == 9  # type: ignore[index]


@pytest.mark.parametrize("change", [{"ttl": -1}, {"epoch": "x"}, {"pool": "elsewhere"}])
def test_a_lease_that_cannot_be_trusted_is_an_error(client: redis.Redis, pool: str, change: dict[str, object]) -> None:
    """Whoever put it there: the worker is told, and treats it as none."""
    text = json.dumps(json.loads(a_lease(pool).to_json()) | change)
    client.set(lease_key(pool, "default"), text, px=5000)
    with pytest.raises(SampleError, match="lease"):
        LeaseStore(client).read(pool, "default")


def test_a_lease_without_an_end_is_none(client: redis.Redis, pool: str) -> None:
    """No program of ours writes one; obeying it would leave a worker lenient for ever."""
    client.set(lease_key(pool, "default"), a_lease(pool).to_json())
    assert LeaseStore(client).read(pool, "default") is None
    client.delete(lease_key(pool, "default"))


# -- the server is away ------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[redis.Redis], object]] = {
    "append": lambda c: StreamWriter(c, "p").append([a_request("p")]),
    "read": lambda c: StreamReader(c, "p").read(),
    "ack": lambda c: StreamReader(c, "p").ack(["1-1"]),
    "dead letter": lambda c: StreamReader(c, "p").dead_letter("1-1", {}, "bad"),
    "lag": lambda c: StreamReader(c, "p").lag(),
    "resume": lambda c: StreamReader(c, "p").resume_from("1-1"),
    "write lease": lambda c: LeaseStore(c).write(a_lease("p")),
    "read lease": lambda c: LeaseStore(c).read("p", "default"),
    "fence": lambda c: LeaseStore(c).fence("p", "default"),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_says_storage_error_when_the_server_is_away(name: str, tmp_path: object) -> None:
    """And nothing else, and at once."""
    with pytest.raises(StorageError):
        CALLS[name](connect(f"unix://{tmp_path}/nobody.sock"))


@pytest.mark.parametrize("name", CALLS)
def test_every_call_says_storage_error_when_a_key_holds_something_else(
    name: str, client: redis.Redis, pool: str
) -> None:
    """A key of the wrong type is an error to report, not one to die of."""
    keys = [telemetry_key("p"), dead_key("p"), lease_key("p", "default"), fence_key("p", "default")]
    for key in keys:
        client.rpush(key, "x")
    try:
        if name != "ack":  # acknowledging in a group that is not there acknowledges nothing
            with pytest.raises(StorageError):
                CALLS[name](client)
    finally:
        client.delete(*keys)


def test_reader_and_writer_go_on_after_the_server_was_restarted_empty(tmp_path: object) -> None:
    """Errors while it is away; afterwards the same objects work, with no help and nothing skipped."""
    server = EmbeddedServer(str(tmp_path))
    with server:
        client = connect(server.url)
        writer, reader, store = StreamWriter(client, "p"), StreamReader(client, "p"), LeaseStore(client)
        writer.append(blocks("p", 0))
        assert seqs(reader.read()) == [0]
    with pytest.raises(StorageError):
        reader.read()
    with pytest.raises(StorageError):
        writer.append(blocks("p", 1))
    with server:
        writer.append(blocks("p", 2))
        assert seqs(reader.read()) == [2]
        store.write(a_lease("p"))
        assert store.read("p", "default") is not None
        client.close()


@pytest.mark.parametrize("url", ["http://localhost", "redis://user:secret@host:port/0", "nonsense"])
def test_a_url_that_cannot_be_used_is_named_without_its_password(url: str) -> None:
    """An operator's mistake, told without telling the secret."""
    with pytest.raises(StorageError, match="URL") as caught:
        connect(url)
    assert "secret" not in str(caught.value)
