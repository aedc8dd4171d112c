"""`lenity advise`: measure a pair on the spot and say what to do with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from controller.commands.common import JsonOption, errors, print_json

if TYPE_CHECKING:
    from controller.advise import Advice


def advise(
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts: JSON lines, or one a line; by default problems of the bundled pair.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Target model's directory; the bundled one by default.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model's directory; the bundled one by default.")] = None,
    ngram: Annotated[bool, typer.Option("--ngram", help="Draft by n-grams instead of a model.")] = False,
    rule: Annotated[str, typer.Option(help="Accept rule that leniency would use.")] = "token_v3",
    rows: Annotated[int, typer.Option(min=1, max=32, help="Requests that decode side by side.")] = 1,
    count: Annotated[int, typer.Option(min=7, help="Prompts to decode.")] = 70,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer, at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:0.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure a pair of models on prompts and say: acceptance, costs, block length, speed, and what would help most.

    Examples: lenity advise

    lenity advise --target models/big --draft models/small --prompts prompts.jsonl --rows 8 --device cuda
    """
    from controller.advise import advise as decide
    from decoder.advise import measure, read_prompts

    console = Console(stderr=True)
    with errors(), Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        texts = None if prompts is None else read_prompts(prompts)
        task = bar.add_task("decoding prompts", total=count)
        measured = measure(
            texts,
            target=target,
            draft=draft,
            ngram=ngram,
            device=device,
            dtype=dtype,
            temperature=temperature,
            max_tokens=max_tokens,
            rows=rows,
            count=count,
            seed=seed,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )
        advice = decide(measured.blocks, rows=rows, rule=rule)
    about = {"target": measured.target, "draft": measured.drafter, "prompts": measured.prompts}
    if as_json:
        print_json(about | {"tokens": measured.tokens} | advice.to_json())
    else:
        _show(
            advice, f"{measured.target} with {measured.drafter}, {measured.prompts} prompts, {measured.tokens} tokens"
        )


def _show(advice: Advice, title: str) -> None:
    out = Console()
    out.print(f"[bold]{title}[/bold]")
    for number, step in enumerate(advice.steps, 1):
        out.print(f"{number}. {step.question} [bold]{step.answer}[/bold]")
        out.print(f"   {step.because}", highlight=False)
    if advice.helps:
        table = Table("what would help", "times plain", "times now")
        for one in advice.helps:
            table.add_row(one.change, f"{one.speedup_plain:.2f}", f"{one.gain:.2f}")
        out.print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(advise)
