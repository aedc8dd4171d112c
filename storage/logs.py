"""Structured logs: the same keys from every process, as JSON lines or readable ones, on standard error.

Every entry has ``timestamp`` (ISO 8601, UTC), ``level``, ``service`` (controller or worker) and ``event``; then what it
is about (``pool``, ``worker``, …), ``error`` for a fault in one line and ``exception`` for a traceback. What libraries
log comes out alike, from warnings up.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from enum import StrEnum
from typing import Annotated, Any

import structlog
import typer


class LogFormat(StrEnum):
    """How log entries are written; ``auto``: readable on a terminal, JSON lines elsewhere."""

    auto = "auto"
    console = "console"
    json = "json"


LogFormatOption = Annotated[
    LogFormat,
    typer.Option(envvar="LENITY_LOG_FORMAT", help="Log entries: readable, JSON lines, or by where they go."),
]


def configure_logging(service: str, form: LogFormat = LogFormat.auto) -> None:
    """Write the logs of this process to standard error from now on, as ``service``."""
    as_json = form is LogFormat.json or (form is LogFormat.auto and not sys.stderr.isatty())

    def name_service(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        entry["service"] = service
        return entry

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_service,
    ]
    end: list[Any] = [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
    if as_json:
        end = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*shared, *end],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
