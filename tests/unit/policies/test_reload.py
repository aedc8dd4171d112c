"""A policy file that changes while the program runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from policies.errors import PolicyError
from policies.reload import PolicyFile, revision_of


def text(max_loss: str = "0.01", pool: str = "chat") -> str:
    return f"version: lenity/v1\npool: {pool}\nobjective: {{metric: m, max_loss: {max_loss}, window: 28d}}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(text())
    return path


def test_a_first_policy_that_is_bad_is_an_error(path: Path) -> None:
    path.write_text("version: 1\n")
    with pytest.raises(PolicyError):
        PolicyFile(path)


def test_an_unchanged_file_is_no_change(path: Path) -> None:
    file = PolicyFile(path)
    assert file.poll() is None
    assert file.current[1] == revision_of(text())


def test_a_good_edit_takes_effect_once(path: Path) -> None:
    file = PolicyFile(path)
    path.write_text(text("0.02"))
    change = file.poll()
    assert change is not None
    assert change.policy.objective.max_loss == 0.02
    assert (change.revision, change.previous_revision) == (revision_of(text("0.02")), revision_of(text()))
    assert (change.text, file.text) == (text("0.02"), text("0.02"))
    assert file.current == (change.policy, change.revision)
    assert file.poll() is None


def test_a_bad_edit_leaves_the_last_good_policy_and_says_why(path: Path) -> None:
    file = PolicyFile(path)
    before = file.current
    path.write_text(text("2"))
    assert file.poll() is None
    assert file.current == before
    assert file.rejected is not None
    assert (file.rejected.line, file.rejected.key) == (3, "objective.max_loss")
    assert (file.rejected_text, file.rejected_revision) == (text("2"), revision_of(text("2")))


def test_the_same_bad_edit_is_rejected_once(path: Path) -> None:
    file = PolicyFile(path)
    path.write_text(text("2"))
    file.poll()
    first = file.rejected
    file.poll()
    assert file.rejected is first


def test_reverting_a_bad_edit_clears_the_rejection_without_a_change(path: Path) -> None:
    file = PolicyFile(path)
    path.write_text(text("2"))
    file.poll()
    path.write_text(text())
    assert file.poll() is None
    assert file.rejected is None


def test_a_good_edit_after_a_bad_one_takes_effect(path: Path) -> None:
    file = PolicyFile(path)
    path.write_text(text("2"))
    file.poll()
    path.write_text(text("0.03"))
    assert file.poll() is not None
    assert file.rejected is None


def test_a_missing_file_is_rejected_and_the_last_good_policy_stays(path: Path) -> None:
    file = PolicyFile(path)
    path.unlink()
    assert file.poll() is None
    assert file.rejected is not None
    assert "does not exist" in str(file.rejected)
    first = file.rejected
    file.poll()
    assert file.rejected is first
    path.write_text(text("0.02"))
    assert file.poll() is not None
    assert file.rejected is None


@pytest.mark.parametrize("what", ["directory", "fifo", "latin-1", "empty"])
def test_what_cannot_be_read_as_a_policy_is_rejected(path: Path, what: str) -> None:
    file = PolicyFile(path)
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
        assert stat.S_ISFIFO(path.stat().st_mode)
    else:
        path.write_bytes(b"pool: \xe9\n" if what == "latin-1" else b"")
    assert file.poll() is None
    assert file.rejected is not None


def test_an_edit_of_the_same_size_with_the_same_times_is_seen(path: Path) -> None:
    file = PolicyFile(path)
    before = path.stat()
    path.write_text(text("0.09"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert file.poll() is not None


def test_touching_the_file_is_no_change(path: Path) -> None:
    file = PolicyFile(path)
    os.utime(path, (1, 1))
    assert file.poll() is None


def test_an_atomic_replace_is_one_change(path: Path) -> None:
    file = PolicyFile(path)
    new = path.with_suffix(".new")
    new.write_text(text("0.02"))
    new.replace(path)
    assert file.poll() is not None
    assert file.poll() is None


def test_each_swap_of_a_mounted_config_map_is_one_change(tmp_path: Path) -> None:
    """Kubernetes mounts policy.yaml -> ..data/policy.yaml, ..data -> a dated directory, and swaps ..data by rename."""
    mount = tmp_path / "mount"
    mount.mkdir()

    def publish(name: str, content: str) -> None:
        (mount / name).mkdir()
        (mount / name / "policy.yaml").write_text(content)
        (mount / "..tmp").symlink_to(name)
        (mount / "..tmp").replace(mount / "..data")

    publish("..2024_1", text("0.01"))
    (mount / "policy.yaml").symlink_to("..data/policy.yaml")
    file = PolicyFile(mount / "policy.yaml")
    seen = []
    for i, loss in enumerate(("0.02", "0.03", "0.04"), 2):
        publish(f"..2024_{i}", text(loss))
        changes = [file.poll(), file.poll()]
        seen += [c.policy.objective.max_loss for c in changes if c is not None]
    assert seen == [0.02, 0.03, 0.04]


def test_a_running_pool_cannot_be_renamed(path: Path) -> None:
    file = PolicyFile(path)
    path.write_text("# another\n" + text(pool="other"))
    assert file.poll() is None
    assert file.rejected is not None
    assert (file.rejected.line, file.rejected.key) == (3, "pool")
    assert file.current[0].pool == "chat"
