"""The worker's composition root: what is built of what, how it starts and ends. Imports torch only when called."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import structlog
import typer

from storage.stream import LeaseStore, StreamWriter

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    import redis
    from prometheus_client import CollectorRegistry

    from decoder.generate import Engine
    from decoder.knobs import LeaseReader
    from decoder.strategies import Models
    from decoder.telemetry import TelemetrySender
    from decoder.worker import WorkerMetrics

log = structlog.get_logger(__name__)


class Scorer(StrEnum):
    """What scores served answers, both branches of a fork. ``json``: whether the text is a JSON document."""

    none = "none"
    json = "json"


@dataclass(frozen=True)
class HttpOptions:
    """How a worker serves over HTTP; ``grace`` in seconds. ``judge_token`` opens the branches of forked requests."""

    address: tuple[str, int]
    model: str
    max_rows: int
    queue: int
    grace: float
    classes: tuple[str, ...]
    scorer: Scorer
    metric: str
    judge_token: str | None = None


@dataclass(frozen=True)
class Parts:
    """What every worker is made of."""

    models: Models
    tokenizer: Any
    bundled: bool
    reader: LeaseReader
    sender: TelemetrySender
    pool: str
    worker: str
    boot: str
    stop: threading.Event


def assemble(
    client: redis.Redis,
    engine: Engine,
    tokenizer: Any,
    bundled: bool,
    *,
    pool: str,
    worker: str,
    stop: threading.Event,
) -> Parts:
    """The parts of a worker that decodes with ``engine`` and ends when ``stop`` is set."""
    from decoder.knobs import LeaseReader
    from decoder.strategies import Models, usable
    from decoder.telemetry import TelemetrySender

    models = Models.of(engine)
    boot = uuid.uuid4().hex[:16]
    _say_if_away(client)
    reader = LeaseReader(LeaseStore(client), pool, able=usable(models))
    sender = TelemetrySender(StreamWriter(client, pool), pool, worker, boot)
    return Parts(models, tokenizer, bundled, reader, sender, pool, worker, boot, stop)


def serve_traffic(
    parts: Parts, client: redis.Redis, seed: int, max_requests: int | None, metrics_port: int | None
) -> int:
    """Decode made-up requests until told to stop; returns the exit code."""
    from decoder.demo.traffic import ProblemSource
    from decoder.worker import Worker

    source = ProblemSource(parts.tokenizer, parts.pool, client, seed=f"{seed}/{parts.worker}")
    running = Worker(
        parts.models,
        source,
        parts.sender,
        parts.reader,
        pool=parts.pool,
        worker=parts.worker,
        boot=parts.boot,
        max_requests=max_requests,
        stop=parts.stop,
    )
    with _reporting(parts, running.metrics, metrics_port) as account:
        log.info("worker: serving", pool=parts.pool, worker=parts.worker, boot=parts.boot)
        served = running.run()
    log.info("worker: stopped", served=served, **account)
    return 0


def serve_http(parts: Parts, http: HttpOptions, metrics_port: int | None) -> int:
    """Serve HTTP until told to stop, then drain; returns the exit code, 1 if decoding broke down."""
    from decoder.batch import Batch
    from decoder.branches import BranchStore
    from decoder.demo.pair import BOS
    from decoder.forks import ForkRun
    from decoder.lane import Lane
    from decoder.protocol import Planner
    from decoder.scorers import json_scoring
    from decoder.server import Frontend, HttpServer, Judging, create_app
    from decoder.serving import Serving
    from decoder.strategies import fork_steps
    from decoder.text import Text
    from decoder.worker import Reporter, WorkerMetrics

    metrics = WorkerMetrics(parts.sender, parts.reader)
    reporter = Reporter(parts.sender, metrics, pool=parts.pool, worker=parts.worker, boot=parts.boot)
    text = Text(parts.tokenizer, bos=BOS if parts.bundled else None)
    engine = parts.models.engine
    branches = BranchStore(time.monotonic) if http.judge_token is not None else None
    serving = Serving(
        Batch(engine, max_rows=http.max_rows),
        Lane(parts.models),
        lambda completion: ForkRun(fork_steps(parts.models, completion)),
        parts.reader,
        reporter,
        parts.sender,
        queue_size=http.queue,
        branches=branches,
    )
    planner = Planner(
        text, model=http.model, context=engine.context, classes=http.classes, refusal=parts.reader.refusal
    )
    scoring = json_scoring(text, http.metric) if http.scorer is Scorer.json else None
    judging = Judging(branches, http.judge_token) if branches is not None and http.judge_token is not None else None
    frontend = Frontend(serving, planner, parts.reader, metrics, pool=parts.pool, scoring=scoring, judging=judging)
    try:
        server = HttpServer(create_app(frontend), *http.address)
    except OSError as e:
        raise typer.BadParameter(f"{http.address} cannot be used: {e}", param_hint="--serve") from e
    broke: list[BaseException] = []

    def decode() -> None:
        try:
            serving.run()
        except BaseException as e:
            broke.append(e)
            log.exception("worker: decoding broke down")
        finally:
            parts.stop.set()

    thread = threading.Thread(target=decode, name="decode", daemon=True)
    for name in http.classes:
        parts.reader.knobs(name)  # polled from now on
    with _reporting(parts, metrics, metrics_port) as account:
        thread.start()
        server.start()
        host, port = server.address
        log.info("worker: listening", host=host, port=port, model=http.model, pool=parts.pool, boot=parts.boot)
        parts.stop.wait()
        finished = serving.drain(http.grace)
        server.close()
    log.info("worker: stopped", finished=finished, **account)
    return 1 if broke else 0


@contextmanager
def _reporting(parts: Parts, metrics: WorkerMetrics, metrics_port: int | None) -> Iterator[dict[str, Any]]:
    """Leases are polled, telemetry goes out and metrics can be read inside; what is left is flushed at the end.

    The account of that is filled in then.
    """
    account: dict[str, Any] = {}
    server = _serve_metrics(metrics_port, metrics.registry) if metrics_port else None
    parts.reader.poll_once()  # so that the first request already knows its lease
    parts.reader.start()
    try:
        yield account
    finally:
        parts.reader.close()
        account["flushed"] = parts.sender.close()
        account["dropped_positions"] = parts.sender.dropped_positions
        account["dropped_records"] = parts.sender.dropped_records
        account["lossless_fallbacks"] = parts.reader.fallbacks
        if server is not None:
            server[0].shutdown()
            server[0].server_close()


def _say_if_away(client: redis.Redis) -> None:
    from redis.exceptions import RedisError

    try:
        client.ping()
    except (RedisError, OSError) as e:
        log.warning("worker: the stream server is away; serving losslessly, telemetry is kept as it fits", error=str(e))


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; from here on they do nothing else."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    return stop


def _serve_metrics(port: int, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread]:
    from prometheus_client import start_http_server

    try:
        return start_http_server(port, registry=registry)
    except OSError as e:
        raise typer.BadParameter(f"port {port} cannot be used: {e}", param_hint="--metrics-port") from e
