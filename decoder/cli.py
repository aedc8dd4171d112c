"""The command line of the decoding side: ``lenity worker`` and ``lenity frontier``, also ``python -m decoder.cli``.

This module is the worker's composition root. torch is imported inside the command, so that ``--help`` is quick.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import sys
import threading
import uuid
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from storage.errors import StorageError
from storage.stream import LeaseStore, StreamWriter, connect

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    import redis
    from prometheus_client import CollectorRegistry

    import decoder.drafters
    from decoder.generate import Engine

log = structlog.get_logger(__name__)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Lenity: the decoding side."
)


class Drafter(StrEnum):
    """What proposes tokens."""

    model = "model"
    ngram = "ngram"


class Domain(StrEnum):
    """Kinds of generated problems."""

    easy = "easy"
    hard = "hard"


class Traffic(StrEnum):
    """Where requests come from."""

    demo = "demo"


@app.callback()
def _commands() -> None:
    """Commands have names even if there is only one."""


@app.command()
def worker(
    redis_url: Annotated[str, typer.Option(help="Stream server: redis://, rediss:// or unix:///path.sock")],
    pool: Annotated[str, typer.Option(help="Pool whose leases are obeyed")] = "demo",
    worker_id: Annotated[str, typer.Option(help="Name in telemetry; by default the host's name")] = "",
    target: Annotated[Path | None, typer.Option(help="Target model directory; by default the bundled one")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model directory; by default the bundled one")] = None,
    drafter: Annotated[Drafter, typer.Option(help="What proposes tokens")] = Drafter.model,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for the models")] = 1,
    traffic: Annotated[Traffic, typer.Option(help="Where requests come from")] = Traffic.demo,
    seed: Annotated[int, typer.Option(help="Seed of the traffic; each worker id draws its own")] = 0,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many requests")] = None,
    metrics_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics here")] = None,
) -> None:
    """Decode requests under the pool's leases, and report telemetry; lossless whenever there is no lease.

    SIGTERM and SIGINT finish the request in hand, flush the telemetry and exit with 0.
    """
    log_to_stderr()
    worker_id = worker_id or re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname()) or "worker"
    for option, value in (("--pool", pool), ("--worker-id", worker_id)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", value):
            raise typer.BadParameter(f"{value!r} is not a short name (letters, digits, . _ : -)", param_hint=option)
    from policies.errors import ModelError

    try:
        client = connect(redis_url, name=f"lenity-worker-{worker_id}")
        raise typer.Exit(
            _serve(client, pool, worker_id, target, draft, drafter, threads, seed, max_requests, metrics_port)
        )
    except (ModelError, StorageError) as e:
        typer.echo(f"lenity worker: {e}", err=True)
        raise typer.Exit(2) from e


@app.command()
def frontier(
    out: Annotated[Path, typer.Option(help="Where the log, tables and plot go; a rerun goes on from there")] = Path(
        "run/frontier"
    ),
    tasks: Annotated[int, typer.Option(min=2, help="Tasks a point")] = 300,
    block: Annotated[int, typer.Option(min=1, max=64, help="Draft tokens a round")] = 5,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy")] = 1.0,
    domain: Annotated[Domain, typer.Option(help="Kind of generated problems")] = Domain.easy,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems and of decoding")] = 271828,
    rule: Annotated[list[str] | None, typer.Option(help="Rule or published form; repeat. By default all")] = None,
    knob: Annotated[list[float] | None, typer.Option(help="Knob theta; repeat. By default each rule's own")] = None,
    cost_ratio: Annotated[
        float | None, typer.Option(min=0.0, help="Draft step over target pass; by default measured once")
    ] = None,
    pair: Annotated[Path | None, typer.Option(help="Directory with target/ and draft/; by default the bundled")] = None,
    problems: Annotated[
        Path | None, typer.Option(help='File of {"prompt", "answer"} lines instead of problems')
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for the models")] = 1,
) -> None:
    """Sweep rules over their knobs and write quality against target passes: CSV, JSON, a plot and tables.

    Every point is paired with lossless decoding on the same random numbers. Ctrl-C stops and keeps what is finished.
    """
    from decoder.frontier_report import run_frontier
    from policies.errors import ModelError

    try:
        code = run_frontier(
            out,
            n=tasks,
            g=block,
            temperature=temperature,
            domain=domain.value,
            seed=seed,
            rules=rule or (),
            knobs=knob or (),
            cost_ratio=cost_ratio,
            pair_directory=pair,
            tasks_file=problems,
            threads=threads,
        )
    except (ModelError, ValueError, OSError) as e:
        typer.echo(f"lenity frontier: {e}", err=True)
        raise typer.Exit(2) from e
    raise typer.Exit(code)


def _serve(
    client: redis.Redis,
    pool: str,
    worker_id: str,
    target: Path | None,
    draft: Path | None,
    drafter: Drafter,
    threads: int,
    seed: int,
    max_requests: int | None,
    metrics_port: int | None,
) -> int:
    """Wire everything, run until told to stop, take it apart again; returns the exit code."""
    import torch

    from decoder.demo.traffic import ProblemSource
    from decoder.knobs import LeaseReader
    from decoder.telemetry import TelemetrySender
    from decoder.worker import Worker

    stop = _stop_on_signals()
    torch.set_num_threads(threads)
    engine, proposer, tokenizer = load_engine(target, draft, drafter)
    boot = uuid.uuid4().hex[:16]
    _say_if_away(client)
    source = ProblemSource(tokenizer, pool, client, seed=f"{seed}/{worker_id}")
    reader = LeaseReader(LeaseStore(client), pool, deterministic_drafter=proposer.deterministic)
    sender = TelemetrySender(StreamWriter(client, pool), pool, worker_id, boot)
    running = Worker(
        engine, source, sender, reader, pool=pool, worker=worker_id, boot=boot, max_requests=max_requests, stop=stop
    )
    server = _serve_metrics(metrics_port, running.metrics.registry) if metrics_port else None
    reader.poll_once()  # so that the first request already knows its lease
    reader.start()
    log.info("worker: serving", pool=pool, worker=worker_id, boot=boot, drafter=drafter.value, threads=threads)
    try:
        served = running.run()
    finally:
        reader.close()
        flushed = sender.close()
        if server is not None:
            server[0].shutdown()
            server[0].server_close()
    log.info(
        "worker: stopped",
        served=served,
        flushed=flushed,
        dropped_positions=sender.dropped_positions,
        dropped_records=sender.dropped_records,
        lossless_fallbacks=reader.fallbacks,
    )
    return 0


def load_engine(
    target: Path | None = None, draft: Path | None = None, drafter: Drafter = Drafter.model
) -> tuple[Engine, decoder.drafters.Drafter, Any]:
    """The engine, its drafter and the tokenizer, from model directories (None: the bundled ones); raises ModelError."""
    from decoder.demo.pair import EOS, load_model, load_tokenizer
    from decoder.demo.tasks import demo_models_dir
    from decoder.drafters import ModelDrafter, NgramDrafter
    from decoder.generate import Engine

    target = target or demo_models_dir() / "target"
    model, tokenizer = load_model(target), load_tokenizer(target)
    if drafter is Drafter.ngram:
        proposer: decoder.drafters.Drafter = NgramDrafter()
    else:
        proposer = ModelDrafter(load_model(draft or demo_models_dir() / "draft"))
    return Engine(model, proposer, eos_ids={EOS}), proposer, tokenizer


def log_to_stderr() -> None:
    """Structured logs, one JSON object a line, on stderr."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _say_if_away(client: redis.Redis) -> None:
    from redis.exceptions import RedisError

    try:
        client.ping()
    except (RedisError, OSError) as e:
        log.warning("worker: the stream server is away; serving losslessly, telemetry is kept as it fits", error=str(e))


def _stop_on_signals() -> threading.Event:
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


if __name__ == "__main__":
    app()
