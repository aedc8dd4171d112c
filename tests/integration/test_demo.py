"""The demo in its short form: the whole loop in real processes on the bundled pair, in CI too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from controller.demo.run import PHASES
from storage.history import History
from storage.records import Lease


@pytest.mark.timeout(620)
def test_every_phase_happens_and_the_database_tells_the_same_story(tmp_path: Path) -> None:
    """Exit code 0, and what the phases claim is in the history: states, alert, revisions, epochs, a picture."""
    command = [sys.executable, "-m", "controller.cli", "demo", "--short", "--port", "0", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}\n{logs}"
    for key, _ in PHASES:
        assert f"✓ ({key})" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 20_000

    history = History(f"sqlite:///{tmp_path / 'history.db'}")
    try:
        decisions = history.decisions("demo", limit=5000)
        states = {d["state"] for d in decisions}
        assert {"certified", "measured", "breached"} <= states
        assert {d["epoch"] for d in decisions} == {1, 2}, "a killed controller's successor has a newer epoch"
        for d in decisions:
            lease = Lease(**(d["lease"] | {"table": (), "caps": ()}))
            if d["state"] == "breached":
                assert all(row["theta"] == 0 for row in d["lease"]["table"]), f"lenient in breach: {lease}"
        fired = [a for a in history.alerts("demo", limit=100) if a.name.startswith("LenityBudget")]
        assert any(a.firing for a in fired) and any(not a.firing for a in fired), "it fires, and it ends"
        revisions = history.policy_revisions("demo")[::-1]
        assert [r["accepted"] for r in revisions] == [True, False, True]
        assert "max_thetta" in revisions[1]["error"]
        lossless = history.requests_between("demo", 0, 1e10)
        assert lossless["arms"]["holdback"]["requests"] > 0 and lossless["arms"]["lenient"]["requests"] > 0
    finally:
        history.close()
