"""The `lenity` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controller.commands import advise, data, operate, orders, policy
from controller.commands.common import DEFAULT_DATABASE, DatabaseOption, JsonOption, RedisOption, errors
from policies.settings import ConfigOption, from_environment
from storage.logs import LogFormat, LogFormatOption, configure_logging

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Adaptive control loop for speculative decoding with an online quality error budget.",
)
for group in (operate, orders, data, policy, advise):
    group.register(app)

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


@app.command(context_settings=from_environment("LENITY_CONTROLLER"))
def controller(
    policy: Annotated[list[Path], typer.Option(help="Policy file, or a directory of them; may be repeated.")],
    redis_url: RedisOption = "redis://127.0.0.1:6379/0",
    database: DatabaseOption = DEFAULT_DATABASE,
    host: Annotated[str, typer.Option(help="Address of the API and page.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API and page.")] = 8470,
    tick: Annotated[float, typer.Option(min=0.05, help="Seconds between ticks.")] = 1.0,
    ttl: Annotated[float, typer.Option(min=0.2, help="Seconds that a lease lasts; at least three ticks.")] = 5.0,
    tokens_file: Annotated[
        Path | None, typer.Option(help="Who may write: one 'role name token' a line; or such lines in LENITY_TOKENS.")
    ] = None,
    read_token_file: Annotated[
        Path | None, typer.Option(help="Reading needs a token too: one of this file's, in the same form.")
    ] = None,
    name: Annotated[str, typer.Option(help="This controller's name among several, the same after a restart.")] = "",
    spool: Annotated[
        Path | None, typer.Option(help="Directory where decisions wait while the database is away.")
    ] = None,
    half_life_rounds: Annotated[float, typer.Option(min=100, help="Memory of the estimates, in rounds.")] = 4000.0,
    traces: Annotated[
        str | None, typer.Option(help="Send traces of the loop here: OTLP over HTTP (needs the extra otel).")
    ] = None,
    log_format: LogFormatOption = LogFormat.auto,
    config: ConfigOption = None,
) -> None:
    """Run the controller: read telemetry, estimate, govern, solve and lease.

    Example: lenity controller --policy policies/defaults/default.yaml --redis-url redis://127.0.0.1:6379/0
    """
    from controller.loop import LoopConfig
    from controller.service import Service, ServiceConfig
    from controller.tracing import open_traces

    configure_logging("controller", log_format)
    if ttl < 3 * tick:
        raise typer.BadParameter(f"a lease of {ttl:g} s must outlast three ticks of {tick:g} s", param_hint="--ttl")
    loop = LoopConfig(tick_s=tick, ttl_s=ttl, half_life_rounds=half_life_rounds)
    tokens = (tokens_file, read_token_file)
    settings = ServiceConfig(redis_url, database, tuple(policy), host, port, loop, *tokens, name, spool)
    with open_traces(traces):
        code = Service(settings).run()
    raise typer.Exit(code)


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

    with errors():
        raise typer.Exit(command(scenario, plot=plot, as_json=as_json, seed=seed))


def main() -> None:
    """Entry point of the `lenity` command."""
    with errors():
        app()


if __name__ == "__main__":
    main()
