"""Who may import whom, checked in fresh interpreters: the controller without torch, the worker without SQLAlchemy."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import importlib, sys
importlib.import_module({module!r})
found = sorted(name for name in {banned!r} if name in sys.modules)
sys.exit(", ".join(found) if found else 0)
"""


def loaded(module: str, *banned: str) -> str:
    """Which of ``banned`` importing ``module`` loads, comma-separated; fails if it cannot be imported."""
    code = CHECK.format(module=module, banned=banned)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    found = done.stderr.strip()
    assert done.returncode == 0 or "Traceback" not in found, found
    return found if done.returncode else ""


@pytest.mark.parametrize("module", ["controller.service", "controller.loop", "controller.cli"])
def test_the_controller_imports_neither_torch_nor_transformers(module: str):
    assert loaded(module, "torch", "transformers") == ""


@pytest.mark.parametrize("module", ["decoder.worker", "decoder.cli", "decoder.demo.traffic"])
def test_the_worker_imports_no_database(module: str):
    assert loaded(module, "sqlalchemy", "alembic") == ""


def test_the_check_sees_what_is_imported():
    """Negative control."""
    assert loaded("decoder.worker", "torch", "sqlalchemy") == "torch"
    assert loaded("sqlalchemy", "sqlalchemy") == "sqlalchemy"
