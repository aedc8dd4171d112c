"""Tokens, roles, and how often one may write."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from controller.auth import Buckets, Identity, TokenError, Tokens, parse_tokens

GOOD = "operator alice correct-horse-battery\nlabeller judge another-long-secret\n"


def test_a_token_has_a_name_and_a_role() -> None:
    tokens = Tokens(text=GOOD)
    assert tokens.identify("correct-horse-battery") == Identity("alice", "operator")
    assert tokens.identify("another-long-secret") == Identity("judge", "labeller")
    for wrong in ("", "correct-horse-batter", "correct-horse-battery ", "alice", "\udcff"):
        assert tokens.identify(wrong) is None


def test_roles_include_the_lower_ones() -> None:
    operator, labeller, viewer = (Identity("x", role) for role in ("operator", "labeller", "viewer"))  # type: ignore[arg-type]
    assert operator.may("labeller") and operator.may("viewer") and labeller.may("viewer")
    assert not labeller.may("operator") and not viewer.may("labeller")


def test_a_token_may_be_stored_as_its_digest() -> None:
    """The file then holds nothing that can be presented."""
    digest = hashlib.sha256(b"correct-horse-battery").hexdigest()
    tokens = Tokens(text=f"operator alice sha256:{digest}  # the night shift")
    assert tokens.identify("correct-horse-battery") == Identity("alice", "operator")
    assert tokens.identify(f"sha256:{digest}") is None
    assert tokens.identify(digest) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("operator alice", "expected 'role name token', found 2 words"),
        ("root alice correct-horse-battery", "the role must be"),
        ("operator a/b correct-horse-battery", "the name must be"),
        ("operator alice too-short", "16 characters or more"),
        ("operator alice sha256:abc", "64 hex digits"),
        ("operator alice correct-horse-battery\nviewer alice another-long-secret", "'alice' has a token already"),
        ("operator alice correct-horse-battery\nviewer bob correct-horse-battery", "same token as that of 'alice'"),
    ],
)
def test_a_fault_is_named_without_the_token(line: str, problem: str) -> None:
    with pytest.raises(TokenError, match=problem) as caught:
        parse_tokens(line, "tokens")
    assert str(caught.value).startswith("tokens:")
    assert not any(secret in str(caught.value) for secret in ("horse", "another", "too-short"))


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new token counts at once, one taken out does not; a fault keeps the last good, a lost file grants nothing."""
    path = tmp_path / "tokens"
    path.write_text(GOOD)
    tokens = Tokens(path)
    assert tokens.identify("correct-horse-battery") is not None
    _replace(path, "operator bob a-wholly-new-secret\n")
    assert tokens.identify("a-wholly-new-secret") == Identity("bob", "operator")
    assert tokens.identify("correct-horse-battery") is None
    with caplog.at_level(logging.WARNING):
        _replace(path, "operator bob\n")
        assert tokens.identify("a-wholly-new-secret") == Identity("bob", "operator")
    assert tokens.problem is not None and ":1: expected" in tokens.problem
    assert "a-wholly-new-secret" not in caplog.text
    path.unlink()
    assert tokens.identify("a-wholly-new-secret") is None
    _replace(path, GOOD)
    assert tokens.identify("correct-horse-battery") is not None
    assert tokens.problem is None


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="cannot be read"):
        Tokens(tmp_path / "none")


def test_where_tokens_come_from(tmp_path: Path) -> None:
    """A file, else the environment, else nobody may write."""
    path = tmp_path / "tokens"
    path.write_text(GOOD)
    assert len(Tokens.configured(path, {"LENITY_TOKENS": "viewer x a-third-long-secret"}) or ()) == 2
    assert len(Tokens.configured(None, {"LENITY_TOKENS": GOOD.replace("\n", ";")}) or ()) == 2
    assert Tokens.configured(None, {}) is None


def test_a_bucket_refills_with_time() -> None:
    """Three at once, then one a second, and each name has its own."""
    clock = [0.0]
    buckets = Buckets(1.0, 3.0, lambda: clock[0])
    assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
    assert buckets.take("b") == 0.0
    clock[0] = 0.75
    assert buckets.take("a") == pytest.approx(0.25)
    clock[0] = 1.0
    assert buckets.take("a") == 0.0
    clock[0] = 1_000.0
    assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0], "no more than the burst is saved up"


def _replace(path: Path, text: str) -> None:
    """As an editor does: a new file in the old one's place, whatever the clock's resolution."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
