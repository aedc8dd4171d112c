"""`lenity policy`: check policy files, see what an edit would mean, make alert rules, go back.

Exit codes: 0 done and good, 1 a fault in a policy or nothing found, 2 misused, 4 the controller does not answer.
"""

from __future__ import annotations

import getpass
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from controller.commands.backtest import policy_backtest
from controller.commands.client import REFUSED, PoolArgument, TokenFileOption, fail, get, token_from
from controller.commands.common import DEFAULT_DATABASE, DatabaseOption, JsonOption, errors, print_json
from policies.errors import PolicyError

if TYPE_CHECKING:
    from controller.plan import ClassPlan
    from policies.load import Loaded

policy_app = typer.Typer(
    no_args_is_help=True, help="Check policies, see what an edit would mean, make alert rules, go back."
)

PathsArgument = Annotated[list[Path], typer.Argument(help="Policy files, or directories of them.")]
FileArgument = Annotated[Path, typer.Argument(help="The edited policy file.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the root."""
    app.add_typer(policy_app, name="policy")


@policy_app.command("validate")
def policy_validate(paths: PathsArgument, as_json: JsonOption = False) -> None:
    """Check policy files; exit code 1 and FILE:LINE: KEY for every fault.

    Example: lenity policy validate policies/
    """
    good, faults = _load_all(paths)
    if as_json:
        rows: list[dict[str, Any]] = [{"path": path, "ok": True, "pool": x.policy.pool} for path, x in good]
        for path, found in faults.items():
            said = [{"path": e.path, "line": e.line, "key": e.key, "error": e.message} for e in found]
            rows.append({"ok": False, **said[0], "path": path, "faults": said})
        print_json(rows)
    else:
        for path, loaded in good:
            typer.echo(f"{path}: good (pool {loaded.policy.pool})")
        _say(faults)
    raise typer.Exit(REFUSED if faults else 0)


@policy_app.command("schema")
def policy_schema() -> None:
    """Print the JSON Schema of a policy file, for editors.

    Example: lenity policy schema > policy.schema.json
    """
    from policies.schema import policy_schema as schema

    typer.echo(json.dumps(schema(), indent=2, ensure_ascii=False))


@policy_app.command("rules")
def policy_rules(
    paths: PathsArgument,
    runbooks: Annotated[
        str, typer.Option(help="Where the runbook pages are; a page's name is put after it.")
    ] = "docs/runbooks/",
) -> None:
    """Print Prometheus rules for policies: recording rules, and an alert for everything that can go wrong.

    Example: lenity policy rules policies/ > rules.yml
    """
    from policies.alerts import rules_yaml

    good, faults = _load_all(paths)
    _say(faults)
    if faults:
        raise typer.Exit(REFUSED)
    typer.echo(rules_yaml([loaded.policy for _, loaded in good], runbooks), nl=False)


@policy_app.command("plan")
def policy_plan(
    file: FileArgument,
    database: DatabaseOption = DEFAULT_DATABASE,
    url: Annotated[
        str | None,
        typer.Option(help="Compare with what a running controller has in force; what it means now needs the database."),
    ] = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what an edited policy changes against the one in force, and what it would mean now.

    Example: lenity policy plan policies/chat.yaml
    """
    from controller.plan import changed_alerts, plan_knobs
    from policies.diff import differences
    from policies.load import load, parse_policy

    with errors():
        new = load(file).policy
        state: dict[str, Any] | None = None
        if url is not None:
            active = get(url, f"/v1/pools/{quote(new.pool)}/policy", token_from(token_file))["active"]
        else:
            active, state = _stored(database, new.pool)
        if active is None:
            raise fail(f"no policy of pool {new.pool!r} is in force there; the whole file is new", REFUSED)
        old = parse_policy(active["text"], f"revision {active['revision']}")
        changes, (gone, come) = differences(old, new), changed_alerts(old, new)
        plans = [] if state is None else plan_knobs(state, old, new)
    if as_json:
        body = {"pool": new.pool, "against_revision": active["revision"], "changes": [asdict(c) for c in changes]}
        body |= {"alerts_removed": gone, "alerts_added": come, "classes": [asdict(p) for p in plans]}
        print_json(body | {"as_of": None if state is None else state["time"]})
        return
    typer.echo(f"Pool {new.pool}: {len(changes)} values differ from revision {active['revision']}, which is in force.")
    if changes:
        table = Table("class", "key", "in force", "edit", box=None, padding=(0, 2))
        for c in changes:
            table.add_row(c.traffic_class or "(policy)", c.key, c.before, c.after)
        Console().print(table)
    for sign, lines in (("-", gone), ("+", come)):
        for line in lines:
            typer.echo(f"{sign} {line}")
    if state is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(state["time"]))
        typer.echo(f"\nWith the state of {when}:")
        Console().print(_plan_table(plans))
        for p in plans:
            typer.echo(f"{p.traffic_class}: {p.after.state} ({p.after.reason}). {p.after.explanation}")


@policy_app.command("rollback")
def policy_rollback(
    pool: PoolArgument,
    reason: Annotated[str, typer.Option("--why", help="Why; it stays on the record.")],
    to: Annotated[int | None, typer.Option(min=1, help="Revision to go back to; the last good one by default.")] = None,
    who: Annotated[str | None, typer.Option(help="Who goes back; the user who runs this by default.")] = None,
    file: Annotated[Path | None, typer.Option(help="Write here instead of to the file the revision came from.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the text and write nothing.")] = False,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Write an earlier policy back to its file; the controller takes it over as a new revision that says why.

    Example: lenity policy rollback chat-7b --why "max_loss was a typing error"
    """
    from policies.restore import restored_text, write_policy
    from storage.history import History

    with errors():
        store = History(database)
        store.check_schema()
        rows = store.policy_revisions(pool, limit=1000)
        store.close()
        row = _earlier(rows, to)
        if row is None:
            what = "earlier good policy" if to is None else f"good revision {to}"
            raise fail(f"pool {pool!r} has no {what} in {database.partition('://')[0]} history", REFUSED)
        path = file or Path(row["source"])
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        text = restored_text(row["text"], path, f"revision {row['revision']} by {who or _user()}, {day}: {reason}")
        if show:
            typer.echo(text, nl=False)
            return
        if file is None and not path.exists() and not path.parent.exists():
            raise fail(f"{path} is not on this machine; run this where the policy file is, or give --file", REFUSED)
        write_policy(path, text)
    typer.echo(f"{path}: revision {row['revision']} of {row['time']:%Y-%m-%d %H:%M} UTC is back")


policy_app.command("backtest")(policy_backtest)


# -- inside ------------------------------------------------------------------------------------------------------------


def _load_all(paths: list[Path]) -> tuple[list[tuple[str, Loaded]], dict[str, list[PolicyError]]]:
    """Every good policy with its path, and every fault by file; a second file for a pool is a fault."""
    from policies.load import InvalidPolicy, load
    from policies.reload import policy_files

    with errors():
        files = [file for path in paths for file in (policy_files(path) if path.is_dir() else [path])]
    if not files:
        raise typer.BadParameter(f"no policy files in {', '.join(map(str, paths))}")
    good: list[tuple[str, Loaded]] = []
    faults: dict[str, list[PolicyError]] = {}
    owners: dict[str, Path] = {}
    for path in dict.fromkeys(files):
        try:
            loaded = load(path)
            pool, (file, line) = loaded.policy.pool, loaded.pool_at
            if pool in owners:
                message = f"pool {pool!r} has a policy already, in {owners[pool]}; one policy governs a pool"
                raise PolicyError(message, path=file, line=line, key="pool")
        except PolicyError as e:
            faults[str(path)] = [e, *(e.others if isinstance(e, InvalidPolicy) else ())]
        else:
            owners[pool] = path
            good.append((str(path), loaded))
    return good, faults


def _say(faults: dict[str, list[PolicyError]]) -> None:
    for found in faults.values():
        for error in found:
            typer.echo(str(error), err=True)


def _stored(database: str, pool: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The revision in force, and the loop's last state, from the history."""
    from storage.history import History

    store = History(database)
    try:
        store.check_schema()
        rows = store.policy_revisions(pool)
        saved = store.load_snapshot(pool)
    finally:
        store.close()
    return next((row for row in rows if row["accepted"]), None), None if saved is None else saved[0]


def _earlier(rows: list[dict[str, Any]], to: int | None) -> dict[str, Any] | None:
    """The revision to go back to, of ``rows`` newest first: where the newest is refused, the one in force."""
    good = [row for row in rows if row["accepted"]]
    if to is not None:
        return next((row for row in good if row["revision"] == to), None)
    if not good or not rows[0]["accepted"]:
        return good[0] if good else None
    return next((row for row in good if row["sha"] != good[0]["sha"]), None)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return "unknown"


def _plan_table(plans: list[ClassPlan]) -> Table:
    table = Table("class", "", "g", "theta", "rule", "speed", "touches/request", "budget left", box=None)
    for p in plans:
        for name, k in (("now", p.before), ("edit", p.after)):
            speed = "-" if k.speed_plain is None else f"{k.speed_plain:.2f}x plain"
            cells = (str(k.g), f"{k.theta:.3f}", k.rule, speed, f"{k.touches_per_request:.3g}", f"{k.remaining:.0%}")
            table.add_row(p.traffic_class if name == "now" else "", name, *cells)
    return table
