"""Whatever is fed to the policy reader, it gives a policy or a PolicyError with a line; what it gives reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.errors import PolicyError
from policies.load import parse_policy, to_yaml
from policies.model import Policy
from policies.rules import RULES
from policies.scalars import format_duration, parse_duration

DEFAULTS = Path(__file__).parents[2] / "policies" / "defaults"
TEXTS = [path.read_text() for path in sorted(DEFAULTS.glob("*.yaml"))]
PIECES = [
    *("", " ", "\n", "\t", ":", "- ", "{", "}", "[", "]", ",", "'", '"', "#", "&a ", "*a", "<<: ", "!!str ", "---\n"),
    *("|", ">", "%", "@", "\0", "\ufeff", "\ud800", "é", "\u2028", "~", "null", "true", "yes", "on", ".inf", ".nan"),
    *("1e999", "-1", "1e-3", "0x1f", "1:30", "9" * 400, "2001-01-01", "28d", "0s", "2%", "max_loss", "stop: 1\n"),
]
few = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def check(text: str) -> bool:
    """True for a policy; a PolicyError must lie within the text; anything else escapes and fails the test."""
    try:
        policy = parse_policy(text)
    except PolicyError as e:
        assert e.line is not None
        assert 1 <= e.line <= text.count("\n") + text.count("\r") + text.count("\u2028") + 2
        str(e).encode()
        return False
    assert parse_policy(to_yaml(policy)) == policy
    return True


@few
@given(
    st.sampled_from(TEXTS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from(PIECES)), max_size=4),
)
def test_an_edited_policy_is_a_policy_or_a_placed_error(text: str, edits: list[tuple[float, int, str]]) -> None:
    for where, length, piece in edits:
        at = int(where * len(text))
        text = text[:at] + piece + text[at + length :]
    check(text)


@few
@given(st.lists(st.sampled_from([*PIECES, "version", "pool", "classes", "a", "0.5"]), max_size=40))
def test_any_mixture_of_yaml_pieces_is_refused_with_a_line(pieces: list[str]) -> None:
    assert not check("".join(pieces))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Documents of the right shape; most are good, some have values that do not fit together."""
    share = st.floats(0, 0.4).map(lambda x: round(x, 4))
    override = {
        "max_loss": share,
        "rules": st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3, unique=True),
        "block": st.fixed_dictionaries({}, optional={"max": st.integers(1, 64), "explore": share}),
        "pull_back": st.fixed_dictionaries({}, optional={"stop": st.floats(0, 0.1)}),
        "min_labels": st.integers(1, 10**6),
    }
    return draw(
        st.fixed_dictionaries(
            {
                "version": st.just("lenity/v1"),
                "pool": st.from_regex(r"[a-z][a-z0-9._:-]{0,20}", fullmatch=True),
                "objective": st.fixed_dictionaries(
                    {
                        "metric": st.just("m"),
                        "max_loss": st.floats(0.001, 0.05),
                        "window": st.integers(3, 366).map(lambda d: f"{d}d"),
                    }
                ),
            },
            optional={
                "leniency": st.fixed_dictionaries({"max_theta": st.floats(0, 1)}),
                "evidence": st.fixed_dictionaries({"holdback": share, "label_deadline": st.just("1h1.5s")}),
                "classes": st.dictionaries(
                    st.sampled_from(["chat", "code", "1", "on", "null"]), st.fixed_dictionaries({}, optional=override)
                ),
            },
        )
    )


@few
@given(documents())
def test_the_canonical_text_of_a_policy_reads_back_as_the_same_policy(document: dict[str, Any]) -> None:
    policy = Policy.model_validate(document)
    again = parse_policy(to_yaml(policy))
    assert again == policy
    for name in ("default", *policy.classes):
        assert again.for_class(name) == policy.for_class(name)


@few
@given(st.integers(1, 10**13))
def test_any_duration_in_microseconds_reads_back(microseconds: int) -> None:
    seconds = round(microseconds / 1e6, 6)
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= 1e-6
