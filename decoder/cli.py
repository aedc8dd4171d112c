"""The command line of the decoding side: ``lenity worker`` and ``lenity frontier``, also ``python -m decoder.cli``.

torch is imported inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import re
import socket
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoder.wiring import HttpOptions, Scorer, assemble, serve_http, serve_traffic, stop_on_signals
from policies.settings import ConfigOption, from_environment
from storage.errors import StorageError
from storage.logs import LogFormat, LogFormatOption, configure_logging
from storage.stream import connect

if TYPE_CHECKING:
    pass

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
    """Requests that a worker makes itself."""

    demo = "demo"


@app.callback()
def _commands() -> None:
    """Commands have names even if there is only one."""


@app.command(context_settings=from_environment("LENITY_WORKER"))
def worker(
    redis_url: Annotated[
        str, typer.Option(envvar="LENITY_REDIS_URL", help="Stream server: redis://, rediss:// or unix:///path.sock")
    ],
    pool: Annotated[str, typer.Option(help="Pool whose leases are obeyed")] = "demo",
    worker_id: Annotated[str, typer.Option(help="Name in telemetry; by default the host's name")] = "",
    target: Annotated[Path | None, typer.Option(help="Target model directory; by default the bundled one")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model directory; by default the bundled one")] = None,
    drafter: Annotated[Drafter, typer.Option(help="What proposes tokens")] = Drafter.model,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda, cuda:0")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    static_length: Annotated[
        int | None, typer.Option(min=1, help="Caches of a fixed length, in tokens; for a GPU, with --compiler")
    ] = None,
    compiler: Annotated[str | None, typer.Option(help="Compile passes with this torch backend, e.g. inductor")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for the models")] = 1,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve OpenAI's API here (port 0: a free one)")
    ] = None,
    traffic: Annotated[Traffic | None, typer.Option(help="Decode made-up requests instead of serving")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the traffic; each worker id draws its own")] = 0,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Stop the traffic after so many requests")] = None,
    metrics_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve Prometheus metrics here")] = None,
    model_name: Annotated[str, typer.Option(help="Name of the model for callers; by default the pool's")] = "",
    max_rows: Annotated[int, typer.Option(min=1, help="Requests that decode together")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that wait; more are answered with 429")] = 64,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish what is running after SIGTERM")] = 30.0,
    traffic_class: Annotated[
        list[str] | None, typer.Option(help="Traffic class that callers may name; repeat. The first is the default")
    ] = None,
    scorer: Annotated[Scorer, typer.Option(help="Scores served answers; none: no forks are drawn")] = Scorer.none,
    metric: Annotated[str, typer.Option(help="Name of the scores, as in the policy's objective")] = "json_valid",
    judge_token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token of judges, who may then read both texts of forks")
    ] = None,
    log_format: LogFormatOption = LogFormat.auto,
    config: ConfigOption = None,
) -> None:
    """Decode requests under the pool's leases, and report telemetry; lossless whenever there is no lease.

    Either serves HTTP (--serve) or makes its own requests (--traffic). SIGTERM and SIGINT finish what is in hand, flush
    the telemetry and exit with 0.
    """
    configure_logging("worker", log_format)
    worker_id = worker_id or re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname()) or "worker"
    classes = tuple(traffic_class or ["default"])
    names = [("--pool", pool), ("--worker-id", worker_id), ("--metric", metric)]
    for option, value in [*names, *(("--traffic-class", name) for name in classes)]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", value):
            raise typer.BadParameter(f"{value!r} is not a short name (letters, digits, . _ : -)", param_hint=option)
    if (serve is None) == (traffic is None):
        raise typer.BadParameter("give exactly one of --serve HOST:PORT and --traffic demo", param_hint="--serve")
    http = None
    if serve is not None:
        token = _token(judge_token_file) if judge_token_file is not None else None
        http = HttpOptions(_address(serve), model_name or pool, max_rows, queue, grace, classes, scorer, metric, token)
    import torch

    from decoder.loading import load_engine
    from policies.errors import ModelError

    try:
        client = connect(redis_url, name=f"lenity-worker-{worker_id}")
        stop = stop_on_signals()
        torch.set_num_threads(threads)
        engine, _, tokenizer = load_engine(
            target,
            draft,
            ngram=drafter is Drafter.ngram,
            device=device,
            dtype=dtype,
            static_length=static_length,
            compiler=compiler,
        )
        parts = assemble(client, engine, tokenizer, target is None, pool=pool, worker=worker_id, stop=stop)
        if http is not None:
            code = serve_http(parts, http, metrics_port)
        else:
            code = serve_traffic(parts, client, seed, max_requests, metrics_port)
    except (ModelError, StorageError) as e:
        typer.echo(f"lenity worker: {e}", err=True)
        raise typer.Exit(2) from e
    raise typer.Exit(code)


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


def _token(path: Path) -> str:
    """The token in a file: one line of at least 16 characters."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise typer.BadParameter(f"{path} cannot be read: {e}", param_hint="--judge-token-file") from e
    if len(token) < 16 or not token.isprintable() or " " in token:
        problem = f"{path} does not hold a token: expected one line of at least 16 characters without spaces"
        raise typer.BadParameter(problem, param_hint="--judge-token-file")
    return token


def _address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, with an IPv6 host in brackets."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT", param_hint="--serve")
    return host, int(port)


if __name__ == "__main__":
    app()
