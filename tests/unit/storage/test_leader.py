"""The lock on a SQLite database ends with the process that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.leader import single_controller

HOLDER = """
import sys
from storage.leader import single_controller
with single_controller(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_controller_leaves_the_database_free(tmp_path: Path) -> None:
    """While it lives it is named; killed without cleaning up, it holds nothing."""
    url = f"sqlite:///{tmp_path / 'history.db'}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        with pytest.raises(StorageError, match=f"process {holder.pid} "), single_controller(url):
            pass
        holder.kill()
        holder.wait()
    with single_controller(url):
        pass


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError), single_controller(f"sqlite:///{tmp_path / 'file' / 'history.db'}"):
        pass
