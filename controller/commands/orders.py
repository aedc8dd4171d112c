"""Commands that change something at a running controller: orders to a pool, and labels.

Exit codes: 0 done, 1 refused or not found, 2 misused, 4 the controller does not answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from controller.commands.client import REFUSED, ClassOption, PoolArgument, TokenFileOption, fail, post, token_from
from controller.commands.common import DEFAULT_URL, JsonOption, UrlOption, errors, print_json

BATCH = 500

WhyOption = Annotated[str, typer.Option("--why", help="Why; it stays on the record.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the root."""
    for command in (freeze, lossless, resume, labels):
        app.command()(command)
    app.command("reset-budget")(reset_budget)
    app.command("adjust-budget")(adjust_budget)


def freeze(
    pool: PoolArgument,
    reason: WhyOption,
    cls: ClassOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep the knobs as they are: until resumed, leniency may only shrink.

    Example: lenity freeze chat-7b --why "a new drafter is rolled out"
    """
    _order(url, pool, cls, {"action": "freeze", "why": reason}, token_file, as_json)


def lossless(
    pool: PoolArgument,
    reason: WhyOption,
    cls: ClassOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode losslessly until resumed.

    Example: lenity lossless chat-7b --class code --why "wrong answers reported"
    """
    _order(url, pool, cls, {"action": "lossless", "why": reason}, token_file, as_json)


def resume(
    pool: PoolArgument,
    reason: WhyOption,
    cls: ClassOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a freeze or forced lossless decoding.

    Example: lenity resume chat-7b --why "rolled out"
    """
    _order(url, pool, cls, {"action": "resume", "why": reason}, token_file, as_json)


def reset_budget(
    pool: PoolArgument,
    reason: WhyOption,
    cls: ClassOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget what the window has spent; it stays on the record.

    Example: lenity reset-budget chat-7b --why "the loss was the scorer's"
    """
    _order(url, pool, cls, {"action": "reset_budget", "why": reason}, token_file, as_json)


def adjust_budget(
    pool: PoolArgument,
    amount: Annotated[float, typer.Argument(help="Loss units to add: one is one request's whole quality.")],
    reason: WhyOption,
    cls: ClassOption = None,
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add to the budget of the window, or take from it.

    Example: lenity adjust-budget chat-7b 2.5 --why "a load test was charged"
    """
    _order(url, pool, cls, {"action": "adjust_budget", "amount": amount, "why": reason}, token_file, as_json)


def labels(
    file: Annotated[Path, typer.Argument(help="JSON lines, one score each; - reads standard input.", allow_dash=True)],
    url: UrlOption = DEFAULT_URL,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send quality labels; exit code 1 if any was refused.

    A line: {"request_id": "…", "metric": "answer_correct", "score": 1, "scorer_version": "v3"}.
    Example: lenity labels scores.jsonl
    """
    token = token_from(token_file)
    accepted, duplicates, refused = 0, 0, []
    for first, batch in _batches(file):
        answer = post(url, "/v1/quality", {"labels": [row for _, row in batch]}, token)
        accepted, duplicates = accepted + answer["accepted"], duplicates + answer["duplicates"]
        refused += [r | {"line": batch[r["index"]][0], "index": first + r["index"]} for r in answer["refused"]]
    if as_json:
        print_json({"accepted": accepted, "duplicates": duplicates, "refused": refused})
    else:
        for r in refused:
            typer.echo(f"{file}:{r['line']}: {r['request_id']}: {r['reason']}", err=True)
        typer.echo(f"{accepted} taken, {duplicates} known already, {len(refused)} refused")
    if refused:
        raise typer.Exit(REFUSED)


# -- inside ------------------------------------------------------------------------------------------------------------


def _order(
    url: str, pool: str, cls: str | None, body: Mapping[str, Any], token_file: Path | None, as_json: bool
) -> None:
    order = {**body, "traffic_class": cls or "*"}
    made = post(url, f"/v1/pools/{quote(pool)}/actions", order, token_from(token_file))
    if as_json:
        print_json(made)
        return
    what = made["action"].replace("_", " ") + ("" if made["amount"] is None else f" by {made['amount']:g}")
    where = pool if made["traffic_class"] == "*" else f"{pool} / {made['traffic_class']}"
    record = f"number {made['id']}" if made["id"] else "to be written down when the database is back"
    typer.echo(f"{what}: {where}, ordered by {made['who']}, {record}; in force at the next tick")


def _batches(file: Path) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
    """(number of labels before, [(line, label)]) for each batch; ends the program at a line that is no JSON object."""
    with errors():
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    batch: list[tuple[int, Any]] = []
    sent = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_no_number)
        except ValueError as e:
            raise fail(f"{file}:{number}: not a line of JSON: {e}", REFUSED) from e
        batch.append((number, row))
        if len(batch) == BATCH:
            yield sent, batch
            sent, batch = sent + len(batch), []
    if batch:
        yield sent, batch


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")
