"""The `lenity` command."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console
from rich.table import Table

from policies.errors import LenityError, PolicyError
from storage.errors import StorageError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Adaptive control loop for speculative decoding with an online quality error budget.",
)
policy_app = typer.Typer(no_args_is_help=True, help="Check policy files.")
db_app = typer.Typer(no_args_is_help=True, help="Look after the history database.")
app.add_typer(policy_app, name="policy")
app.add_typer(db_app, name="db")

DEFAULT_DATABASE = "sqlite:///lenity.db"
DatabaseOption = Annotated[
    str, typer.Option(envvar="LENITY_DATABASE_URL", help="sqlite:///FILE or postgresql+psycopg://…")
]
RedisOption = Annotated[str, typer.Option(envvar="LENITY_REDIS_URL", help="redis://…, rediss://… or unix:///SOCKET")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[str, typer.Option(envvar="LENITY_URL", help="The controller's address.")]
DEFAULT_URL = "http://127.0.0.1:8470"
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Leave everything running with the page open until Ctrl-C.")] = False,
    short: Annotated[bool, typer.Option(help="Smaller samples in every phase.")] = False,
    directory: Annotated[Path, typer.Option(help="Where logs, database and picture go.")] = Path("run/demo"),
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = 8470,
    workers: Annotated[int, typer.Option(min=1, max=8, help="Decoding workers.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the problems and of decoding.")] = 1,
) -> None:
    """Run the whole loop on real models: leniency opens, traffic shifts, quality drops, leniency is pulled back."""
    from controller.demo.run import run_demo

    raise typer.Exit(run_demo(directory, keep=keep, short=short, port=port, workers=workers, seed=seed))


@app.command()
def controller(
    policy: Annotated[list[Path], typer.Option(help="Policy file; repeat for several pools.")],
    redis_url: RedisOption = "redis://127.0.0.1:6379/0",
    database: DatabaseOption = DEFAULT_DATABASE,
    host: Annotated[str, typer.Option(help="Address of the API and page.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API and page.")] = 8470,
    tick: Annotated[float, typer.Option(min=0.05, help="Seconds between ticks.")] = 1.0,
    ttl: Annotated[float, typer.Option(min=0.2, help="Seconds that a lease lasts; at least three ticks.")] = 5.0,
    half_life_rounds: Annotated[float, typer.Option(min=100, help="Memory of the estimates, in rounds.")] = 4000.0,
    log_json: Annotated[bool, typer.Option(help="Log JSON lines.")] = False,
) -> None:
    """Run the controller: read telemetry, estimate, govern, solve and lease.

    Example: lenity controller --policy policies/defaults/default.yaml --redis-url redis://127.0.0.1:6379/0
    """
    from controller.loop import LoopConfig
    from controller.service import Service, ServiceConfig

    configure_logging(log_json)
    if ttl < 3 * tick:
        raise typer.BadParameter(f"a lease of {ttl:g} s must outlast three ticks of {tick:g} s", param_hint="--ttl")
    loop = LoopConfig(tick_s=tick, ttl_s=ttl, half_life_rounds=half_life_rounds)
    service = Service(ServiceConfig(redis_url, database, tuple(policy), host, port, loop))
    raise typer.Exit(service.run())


@app.command(context_settings=PASS_ON)
def worker(context: typer.Context) -> None:
    """Run a decoding worker (needs the `worker` extra); `lenity worker --help` lists its options."""
    try:
        from decoder.cli import app as worker_app
    except ModuleNotFoundError as e:
        raise SystemExit(f"lenity: the worker needs {e.name}; install it with: pip install 'lenity[worker]'") from e
    worker_app(["worker", *context.args], prog_name="lenity")


@app.command(context_settings=PASS_ON)
def frontier(context: typer.Context) -> None:
    """Compare accept rules over their knobs (needs the `worker` extra); `lenity frontier --help` lists the options."""
    try:
        from decoder.cli import app as worker_app
    except ModuleNotFoundError as e:
        raise SystemExit(f"lenity: the sweep needs {e.name}; install it with: pip install 'lenity[worker]'") from e
    worker_app(["frontier", *context.args], prog_name="lenity")


@app.command()
def status(url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show every pool and class of a running controller."""
    body = _get(url, "/v1/pools")
    if as_json:
        sys.stdout.write(json.dumps(body) + "\n")
        return
    table = Table(
        "pool", "class", "state", "g", "theta", "speed", "budget left", "explanation", box=None, padding=(0, 2)
    )
    for pool in body["pools"]:
        for c in pool["classes"]:
            speed = c["predicted_speedup_plain"]
            table.add_row(
                pool["pool"],
                c["traffic_class"],
                c["state"],
                str(c["g"]),
                f"{c['theta']:.3f}",
                "-" if speed is None else f"{speed:.2f}x plain",
                f"{c['remaining']:.0%}",
                c["explanation"],
            )
    Console().print(table)


@app.command()
def history(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    database: DatabaseOption = DEFAULT_DATABASE,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show the newest decisions of a pool from the database, each with its reason."""
    from storage.history import History

    with _errors():
        store = History(database)
        store.check_schema()
        rows = store.decisions(pool, limit=limit)
    if as_json:
        sys.stdout.write(json.dumps(rows, default=str) + "\n")
        return
    table = Table("time", "class", "state", "reason", "g", "theta", "explanation", box=None, padding=(0, 2))
    for row in rows:
        knobs = row["lease"]["table"][0]
        table.add_row(
            f"{row['time']:%Y-%m-%d %H:%M:%S}",
            row["traffic_class"],
            row["state"],
            row["reason"],
            str(knobs["g"]),
            f"{knobs['theta']:.3f}",
            row["explanation"],
        )
    Console().print(table)


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(exists=True, help="Scenario file, or a directory of *.yaml files.")],
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (PNG); for a directory, one each into PATH.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the scenario's own seed.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Play scenarios: the real controller against a simulated pool, under simulated time.

    Exit code 1 if any comes out otherwise than it announces. Example: lenity simulate tests/scenarios --plot run/plots
    """
    from controller.simulate import command

    with _errors():
        raise typer.Exit(command(scenario, plot=plot, as_json=as_json, seed=seed))


@policy_app.command("validate")
def policy_validate(
    paths: Annotated[list[Path], typer.Argument(help="Policy files, or directories of *.yaml files.")],
    as_json: JsonOption = False,
) -> None:
    """Check policy files; exit code 1 and FILE:LINE: KEY for every fault."""
    from policies.load import load_policy

    files = [f for p in paths for f in (sorted(p.glob("*.y*ml")) if p.is_dir() else [p])]
    if not files:
        raise typer.BadParameter(f"no policy files in {', '.join(map(str, paths))}")
    results: list[dict[str, Any]] = []
    for path in files:
        try:
            results.append({"path": str(path), "ok": True, "pool": load_policy(path).pool})
        except PolicyError as e:
            results.append({"path": e.path, "ok": False, "line": e.line, "key": e.key, "error": e.message})
            if not as_json:
                typer.echo(str(e), err=True)
    if as_json:
        sys.stdout.write(json.dumps(results) + "\n")
    else:
        for r in results:
            if r["ok"]:
                typer.echo(f"{r['path']}: good (pool {r['pool']})")
    raise typer.Exit(0 if all(r["ok"] for r in results) else 1)


@db_app.command("upgrade")
def db_upgrade(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Bring the database's schema up to this version."""
    from storage.history import History

    with _errors():
        store = History(database)
        store.upgrade()
        typer.echo(f"{database.partition('://')[0]}: {store.schema_status()}")


@db_app.command("status")
def db_status(database: DatabaseOption = DEFAULT_DATABASE) -> None:
    """Say which schema the database has and which one this version needs."""
    from storage.history import History

    with _errors():
        typer.echo(str(History(database).schema_status()))


def configure_logging(as_json: bool) -> None:
    """Structured logs on standard error: JSON lines, or readable ones."""
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.getLogger("apscheduler").setLevel(logging.ERROR)


class _errors:
    """Turns our errors into one line on standard error and exit code 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LenityError | StorageError | OSError):
            raise SystemExit(f"lenity: {error}") from error


def _get(url: str, path: str) -> Any:
    import httpx

    try:
        answer = httpx.get(url.rstrip("/") + path, timeout=5.0)
        answer.raise_for_status()
    except httpx.HTTPError as e:
        raise SystemExit(
            f"lenity: no answer from the controller at {url} ({e}); is `lenity controller` running?"
        ) from e
    return answer.json()


def main() -> None:
    """Entry point of the `lenity` command."""
    with _errors():
        app()


if __name__ == "__main__":
    main()
