"""Every process logs the same keys in either form, and what libraries log comes out alike."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from storage.logs import LogFormat, configure_logging


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """The process's logging is put back after each test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()


def log_something(service: str) -> None:
    log = structlog.get_logger("x")
    log.info("pool taken", pool="p", epoch=1)
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("tick failed", pool="p")
        logging.getLogger("some.library").error("oh no: %s", "why", exc_info=True)
    logging.getLogger("some.library").info("chatter")


@pytest.mark.parametrize("service", ["controller", "worker"])
def test_json_lines_have_the_same_keys_from_every_process(capsys: pytest.CaptureFixture[str], service: str) -> None:
    """`auto` means JSON where nobody watches."""
    configure_logging(service, LogFormat.auto)
    log_something(service)
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    common = {"timestamp", "level", "service", "event"}
    assert [set(e) - common for e in entries] == [{"pool", "epoch"}, {"pool", "exception"}, {"exception"}]
    assert {e["service"] for e in entries} == {service}
    assert [e["event"] for e in entries] == ["pool taken", "tick failed", "oh no: why"]
    assert "ValueError: bad" in entries[1]["exception"]
    assert entries[0]["timestamp"].endswith("Z")


def test_the_console_form_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """For people: one line an entry, a traceback below it, no colours."""
    configure_logging("worker", LogFormat.console)
    log_something("worker")
    text = capsys.readouterr().err
    for part in ("pool taken", "epoch=1", "service=worker", "ValueError: bad", "oh no: why"):
        assert part in text
    assert "\x1b" not in text
    assert "chatter" not in text
