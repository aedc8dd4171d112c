"""Options of a long-running command from its environment and from a file, on top of its flags.

    flag  >  variable NAME  >  file that NAME_FILE points to  >  file given by --config  >  default

The command line library does the converting and the precedence (`auto_envvar_prefix`, `default_map`); this module only
reads the two kinds of file. A settings file is a flat YAML mapping whose keys are the long flags without their dashes:

    redis-url: redis://store:6379/0
    policy: [/etc/lenity/policies]
    tick: 1
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 64 * 1024
_NULLS = ("", "~", "null", "Null", "NULL")


def from_environment(prefix: str) -> dict[str, Any]:
    """Context settings for a command whose every option may come from a variable: ``prefix`` _ its name."""
    return {"auto_envvar_prefix": prefix}


def variables(param: Any, prefix: str) -> list[str]:
    """The environment variables that an option listens to, the one to document first."""
    given = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
    return [*given, f"{prefix}_{param.name.upper()}"]


def flag_name(param: Any) -> str:
    """The key of an option in a settings file: its longest flag without the dashes."""
    return str(max(param.opts, key=len)).lstrip("-")


def options(command: Any) -> dict[str, Any]:
    """The options that files and the environment may set, by key."""
    return {
        flag_name(p): p
        for p in command.params
        if p.param_type_name == "option" and not p.is_eager and p.name not in ("help", "config")
    }


def _apply(context: typer.Context, path: Path | None) -> Path | None:
    if context.resilient_parsing:
        return path
    known = options(context.command)
    values = {} if path is None else read_settings(path, known, context)
    prefix = context.auto_envvar_prefix or ""
    for param in known.values():
        text = _secret(variables(param, prefix))
        if text is not None:
            values[param.name] = [text] if param.multiple else text
    names = {n for p in known.values() for n in variables(p, prefix)} | {f"{prefix}_CONFIG"}
    for name in sorted(os.environ):
        if prefix and name.startswith(f"{prefix}_") and not {name, name.removesuffix("_FILE")} & names:
            typer.echo(f"lenity: {name} is set, but there is no such option; it changes nothing", err=True)
    context.default_map = {**(context.default_map or {}), **values}
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_apply,
        exists=True,
        dir_okay=False,
        help="YAML file of options, named as the flags; flags and environment win.",
    ),
]


def read_settings(path: Path, known: Mapping[str, Any], context: Any = None) -> dict[str, Any]:
    """The options in the file at ``path`` by parameter name; ``known`` are the command's, by key.

    Raises typer.BadParameter that names file, line and key for what is no option, is given twice or cannot be.
    """

    def refuse(node: Node | None, key: str, message: str) -> typer.BadParameter:
        place = f"{path}:{node.start_mark.line + 1}" if node is not None else str(path)
        return typer.BadParameter(f"{place}: {key}: {message}" if key else f"{place}: {message}")

    root = _compose(path)
    if root is None:
        return {}
    if not isinstance(root, MappingNode):
        raise refuse(root, "", "must be a mapping of options, such as redis-url: redis://store:6379/0")
    found: dict[str, Any] = {}
    for key_node, value_node in root.value:
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        param = known.get(key)
        if param is None:
            close = difflib.get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
            raise refuse(key_node, key, f"unknown key; {hint}")
        if param.name in found:
            raise refuse(key_node, key, "given twice")
        items = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        if isinstance(value_node, SequenceNode) and not param.multiple:
            raise refuse(value_node, key, "takes one value, not a list")
        if not all(isinstance(i, ScalarNode) and (i.style or i.value not in _NULLS) for i in items):
            raise refuse(value_node, key, "needs a value; leave the key out for the default")
        texts = [str(i.value) for i in items]
        found[param.name] = texts if param.multiple else texts[0]
        try:
            param.process_value(context, found[param.name])
        except typer.BadParameter as e:
            raise refuse(value_node, key, e.message) from e
    return found


def _compose(path: Path) -> Node | None:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise typer.BadParameter(f"{path}: larger than {MAX_BYTES // 1024} KiB; these are not settings")
        node: Node | None = yaml.compose(raw.decode("utf-8-sig"), Loader=yaml.SafeLoader)
        return node
    except OSError as e:
        raise typer.BadParameter(f"{path}: cannot be read: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as e:
        mark = getattr(e, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise typer.BadParameter(f"{place}: not valid YAML: {getattr(e, 'problem', None) or e}") from e


def _secret(names: list[str]) -> str | None:
    """The content of the file that one of NAME_FILE points to; a variable of the same name would be ambiguous."""
    for name in names:
        file = os.environ.get(f"{name}_FILE")
        if not file:
            continue
        if os.environ.get(name):
            raise typer.BadParameter(f"{name} and {name}_FILE are both set; keep one")
        try:
            text = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise typer.BadParameter(f"{name}_FILE: {file} cannot be read: {getattr(e, 'strerror', e)}") from e
        if not text or "\n" in text:
            raise typer.BadParameter(f"{name}_FILE: {file} must hold one line of text")
        return text
    return None
