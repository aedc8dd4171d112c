"""Several policy files and directories that change while the program runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import PolicyError
from policies.recall import Accepted
from policies.reload import PolicySet, SetChange, policy_files


def text(pool: str, max_loss: str = "0.01", more: str = "") -> str:
    return f"version: lenity/v1\npool: {pool}\nobjective: {{metric: m, max_loss: {max_loss}, window: 28d}}\n{more}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "a.yaml").write_text(text("a"))
    (tmp_path / "b.yml").write_text(text("b"))
    for name in (".hidden.yaml", "_base.yaml", "notes.txt"):
        (tmp_path / name).write_text("not: a policy\n")
    return tmp_path


def settled(files: PolicySet) -> SetChange:
    """What two polls in a row bring; the first reading of an edit changes nothing yet."""
    first = files.poll()
    assert not first
    return files.poll()


def losses(files: PolicySet) -> dict[str, float]:
    """What is in force, after every pool has taken what is new."""
    for member in files.files.values():
        member.poll()
    return {pool: member.current[0].objective.max_loss for pool, member in files.files.items()}


def test_a_directory_has_one_policy_per_file(directory: Path) -> None:
    files = PolicySet([directory])
    assert losses(files) == {"a": 0.01, "b": 0.01}
    assert not files.poll()
    assert [p.name for p in policy_files(directory)] == ["a.yaml", "b.yml"]


def test_an_edit_counts_once_two_readings_agree(directory: Path) -> None:
    """A file that is written in several steps is not taken half-way, even where the half is a good policy."""
    files = PolicySet([directory])
    whole = text("a", "0.02", "classes: {code: {max_loss: 0}}\n")
    (directory / "a.yaml").write_text(whole[: whole.index("classes")])
    assert not files.poll()
    (directory / "a.yaml").write_text(whole)
    assert not files.poll()
    assert files.poll() == SetChange(changed=("a",))
    change = files.files["a"].poll()
    assert change is not None
    assert change.policy.for_class("code").max_loss == 0
    assert files.files["a"].poll() is None


def test_pools_come_and_go_with_their_files(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "c.yaml").write_text(text("c"))
    (directory / "b.yml").unlink()
    assert not files.poll()
    assert files.poll() == SetChange(added=("c",), removed=("b",))
    assert losses(files) == {"a": 0.01, "c": 0.01}


def test_a_new_file_that_is_being_written_waits(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "c.yaml").write_text("version: lenity/v1\n")
    assert not files.poll()
    (directory / "c.yaml").write_text(text("c"))
    assert not files.poll()
    assert files.poll() == SetChange(added=("c",))
    assert files.rejected == {}


def test_a_bad_edit_leaves_its_pool_as_it_was_and_others_go_on(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "a.yaml").write_text(text("a", "2"))
    (directory / "b.yml").write_text(text("b", "0.03"))
    change = settled(files)
    assert change.changed == ("b",)
    assert [(e.path, e.line, e.key) for e in change.rejected] == [(str(directory / "a.yaml"), 3, "objective.max_loss")]
    assert files.files["a"].rejected is None, "the pool's loop sees it when it polls, as it sees a change"
    assert losses(files) == {"a": 0.01, "b": 0.03}
    a = files.files["a"]
    assert a.rejected is not None
    assert (a.rejected.line, a.rejected_text) == (3, text("a", "2"))
    (directory / "a.yaml").write_text(text("a", "0.04"))
    assert settled(files) == SetChange(changed=("a",))
    assert losses(files)["a"] == 0.04
    assert (a.rejected, files.rejected) == (None, {})


def test_reverting_a_bad_edit_clears_the_rejection(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "a.yaml").write_text(text("a", "2"))
    settled(files)
    losses(files)
    (directory / "a.yaml").write_text(text("a"))
    assert settled(files) == SetChange()
    losses(files)
    assert files.files["a"].rejected is None


def test_a_second_file_for_a_pool_is_refused_and_the_first_goes_on(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "c.yaml").write_text("# late\n" + text("a", "0.5"))
    change = settled(files)
    assert not change.changed
    [error] = change.rejected
    assert (error.path, error.line, error.key) == (str(directory / "c.yaml"), 3, "pool")
    assert "has a policy already, in" in error.message
    (directory / "a.yaml").write_text(text("a", "0.02"))
    assert settled(files).changed == ("a",)
    assert losses(files)["a"] == 0.02
    assert files.files["a"].rejected is not None, "the pool says that another file wants it"
    (directory / "c.yaml").unlink()
    assert settled(files) == SetChange()
    losses(files)
    assert files.files["a"].rejected is None


def test_a_pool_moves_to_another_file_without_a_change(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "a.yaml").rename(directory / "chat.yaml")
    assert settled(files) == SetChange()
    losses(files)
    assert files.files["a"].path == directory / "chat.yaml"


def test_a_file_keeps_its_pool(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "a.yaml").write_text(text("aa"))
    change = settled(files)
    assert (change.added, change.removed) == ((), ())
    assert (change.rejected[0].line, change.rejected[0].key) == (2, "pool")
    assert losses(files) == {"a": 0.01, "b": 0.01}


def test_a_named_file_that_is_gone_keeps_its_pool(directory: Path) -> None:
    files = PolicySet([directory / "a.yaml", directory / "b.yml"])
    (directory / "a.yaml").unlink()
    [error] = settled(files).rejected
    assert "does not exist" in str(error)
    assert losses(files) == {"a": 0.01, "b": 0.01}


def test_a_directory_that_is_away_keeps_its_pools(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = PolicySet([directory])
    away = tmp_path_factory.mktemp("away") / "policies"
    directory.rename(away)
    change = settled(files)
    assert change.removed == ()
    assert len(change.rejected) == 2
    away.rename(directory)
    settled(files)
    losses(files)
    assert all(member.rejected is None for member in files.files.values())


def test_two_files_for_one_pool_at_the_start_are_both_refused(directory: Path) -> None:
    (directory / "c.yaml").write_text(text("a"))
    files = PolicySet([directory])
    assert set(files.files) == {"b"}
    assert set(files.rejected) == {str(directory / "a.yaml"), str(directory / "c.yaml")}
    (directory / "c.yaml").unlink()
    assert settled(files).added == ("a",)


def test_good_policies_run_beside_bad_ones_and_none_at_all_is_an_error(directory: Path) -> None:
    (directory / "a.yaml").write_text("version: 1\n")
    files = PolicySet([directory])
    assert set(files.files) == {"b"}
    assert "a.yaml:1: version" in str(files.rejected[str(directory / "a.yaml")])
    with pytest.raises(PolicyError, match=r"a\.yaml:1: version"):
        PolicySet([directory / "a.yaml"])
    (directory / "empty").mkdir()
    with pytest.raises(PolicyError, match="no policy files"):
        PolicySet([directory / "empty"])


def test_the_same_file_given_twice_counts_once(directory: Path) -> None:
    files = PolicySet([directory, directory / "a.yaml", directory / "." / "b.yml"])
    assert set(files.files) == {"a", "b"}
    assert files.rejected == {}


def test_an_edit_of_a_parent_changes_its_children(directory: Path) -> None:
    (directory / "_base.yaml").write_text("version: lenity/v1\nobjective: {metric: m, max_loss: 1%, window: 28d}\n")
    for pool in ("a", "b"):
        (directory / f"{pool}.yaml").write_text(f"extends: _base.yaml\npool: {pool}\n")
    (directory / "b.yml").unlink()
    files = PolicySet([directory])
    assert losses(files) == {"a": 0.01, "b": 0.01}
    base = directory / "_base.yaml"
    base.write_text(base.read_text().replace("1%", "3%"))
    assert settled(files) == SetChange(changed=("a", "b"))
    assert losses(files) == {"a": 0.03, "b": 0.03}
    base.unlink()
    assert len(settled(files).rejected) == 2
    assert losses(files) == {"a": 0.03, "b": 0.03}


def test_defaults_that_appear_count(directory: Path) -> None:
    files = PolicySet([directory])
    (directory / "_defaults.yaml").write_text("block: {max: 3}\n")
    assert settled(files) == SetChange(changed=("a", "b"))
    losses(files)
    assert files.files["b"].current[0].block.max == 3


def test_each_swap_of_a_mounted_config_map_is_one_reload(tmp_path: Path) -> None:
    """Kubernetes mounts chat.yaml -> ..data/chat.yaml, ..data -> a dated directory, and swaps ..data by rename."""
    mount = tmp_path / "mount"
    mount.mkdir()

    def publish(name: str, max_loss: str) -> None:
        (mount / name).mkdir()
        (mount / name / "chat.yaml").write_text("extends: _base.yaml\npool: chat\n")
        base = f"version: lenity/v1\nobjective: {{metric: m, max_loss: {max_loss}, window: 28d}}\n"
        (mount / name / "_base.yaml").write_text(base)
        (mount / "..tmp").symlink_to(name)
        (mount / "..tmp").replace(mount / "..data")

    publish("..2024_1", "0.01")
    for name in ("chat.yaml", "_base.yaml"):
        (mount / name).symlink_to(f"..data/{name}")
    files = PolicySet([mount])
    seen = []
    for i, loss in enumerate(("0.02", "0.03", "0.04"), 2):
        publish(f"..2024_{i}", loss)
        for _ in range(4):
            files.poll()
            change = files.files["chat"].poll()
            seen += [] if change is None else [change.policy.objective.max_loss]
    assert seen == [0.02, 0.03, 0.04]


# -- what was in force before the start --------------------------------------------------------------------------------


def test_a_bad_file_goes_on_with_what_its_pool_had(directory: Path) -> None:
    """Known by the pool that it names, else by the file that it was; a good file needs no memory."""
    (directory / "a.yaml").write_text(text("a", "2"))
    (directory / "b.yml").write_text("pool: {")
    (directory / "c.yaml").write_text(text("c"))
    asked = []

    def known() -> list[Accepted]:
        asked.append(1)
        elsewhere = str(directory / "moved.yaml")
        return [
            Accepted("b", text("b", "0.03"), str(directory / "." / "b.yml")),
            Accepted("a", text("a", "0.02"), elsewhere),
            Accepted("c", text("c", "0.04"), elsewhere),
            Accepted("earlier", text("earlier"), str(directory / "b.yml")),
        ]

    files = PolicySet([directory], known)
    assert losses(files) == {"a": 0.02, "b": 0.03, "c": 0.01}
    assert asked == [1]
    assert {pool: member.rejected is not None for pool, member in files.files.items()} == {
        "a": True,
        "b": True,
        "c": False,
    }
    assert files.files["a"].rejected_text == text("a", "2")
    assert set(files.rejected) == {str(directory / "a.yaml"), str(directory / "b.yml")}
    (directory / "a.yaml").write_text(text("a", "0.02"))
    assert not settled(files).changed, "the same as what is in force"
    assert losses(files)["a"] == 0.02
    assert files.files["a"].rejected is None


def test_of_two_files_the_one_goes_on_that_had_the_pool(directory: Path) -> None:
    (directory / "b.yml").write_text(text("a", "0.02"))
    files = PolicySet([directory], lambda: [Accepted("a", text("a"), str(directory / "b.yml"))])
    assert losses(files) == {"a": 0.02}
    assert "a.yaml" in str(files.files["a"].rejected)
    with pytest.raises(PolicyError, match="a policy already"):
        PolicySet([directory], lambda: [Accepted("a", text("a"), "gone.yaml")])


def test_a_memory_that_fits_nothing_is_none(directory: Path) -> None:
    """Other pools and files, a pool that a good file has, and a text that is no policy any more."""
    (directory / "a.yaml").write_text("")
    (directory / "b.yml").write_text(text("b", "2"))
    here = str(directory / "a.yaml")
    for accepted in (Accepted("z", text("z"), "z.yaml"), Accepted("b", text("b", "3"), here)):
        with pytest.raises(PolicyError):
            PolicySet([directory], lambda accepted=accepted: [accepted])  # type: ignore[misc]
    (directory / "b.yml").write_text(text("b"))
    assert losses(PolicySet([directory], lambda: [Accepted("b", text("b", "0.05"), here)])) == {"b": 0.01}
