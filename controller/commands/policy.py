"""`lenity policy`: check policy files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from controller.commands.common import JsonOption, print_json
from policies.errors import PolicyError

policy_app = typer.Typer(no_args_is_help=True, help="Check policy files.")


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the root."""
    app.add_typer(policy_app, name="policy")


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
        print_json(results)
    else:
        for r in results:
            if r["ok"]:
                typer.echo(f"{r['path']}: good (pool {r['pool']})")
    raise typer.Exit(0 if all(r["ok"] for r in results) else 1)
