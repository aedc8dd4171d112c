"""One round of verification, checked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoder.verify import Block, residual, scalars_of, total_variation, verify
from policies.rules import get_rule

P, Q = torch.tensor([0.6, 0.4]), torch.tensor([0.8, 0.2])  # A0(0) = 0.75, A0(1) = 1, residual all on token 1


def block(tokens: list[int], p: Tensor = P, q: Tensor = Q) -> Block:
    """One row that drafted ``tokens``, with the same distributions at every position."""
    g, v = len(tokens), len(p)
    target, draft = p.expand(1, g + 1, v), q.expand(1, g, v)
    return Block(torch.tensor([tokens], dtype=torch.long), target, target, draft, draft)


def u(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(("accept", "accepted", "token"), [
    ((0.75, 1.0), 2, 0),  # both pass, the bonus comes from p
    ((0.75, 1.0 + 1e-9), 1, 1),
    ((0.76, 0.1), 0, 1),  # what follows a rejection is not examined
])  # fmt: skip
def test_tokens_pass_up_to_the_first_rejection(accept: tuple[float, ...], accepted: int, token: int) -> None:
    verdict = verify(block([0, 1]), None, 0.0, 0.0, u(*accept), u(0.5, 0.5, 0.5))
    assert verdict.lossless.accepted.tolist() == [accepted]
    assert verdict.lossless.token.tolist() == [token]
    assert verdict.lenient is verdict.lossless and not verdict.touch.any()


def test_a_bonus_token_is_drawn_from_the_target() -> None:
    for point, token in ((0.59, 0), (0.61, 1)):
        assert verify(block([1]), None, 0.0, 0.0, u(0.5), u(0.0, point)).lossless.token.tolist() == [token]


def test_without_a_draft_the_round_is_plain_sampling() -> None:
    empty = Block(
        torch.zeros(1, 0, dtype=torch.long), P.expand(1, 1, 2), P.expand(1, 1, 2), *[torch.zeros(1, 0, 2)] * 2
    )
    for point, token in ((0.59, 0), (0.61, 1)):
        verdict = verify(empty, get_rule("threshold"), 1.0, 1.0, torch.zeros(1, 0), u(point))
        assert verdict.lenient.accepted.tolist() == [0] and verdict.lenient.token.tolist() == [token]


def test_a_touch_is_what_only_the_lenient_rule_accepts() -> None:
    # threshold 0.3 accepts token 0 with certainty (0.75 >= 0.7); lossless rejects it at u = 0.9.
    verdict = verify(block([1, 0, 0]), get_rule("threshold"), 0.3, 1.0, u(0.5, 0.9, 0.8), u(0, 0, 0, 0.7))
    assert verdict.lossless.accepted.tolist() == [1] and verdict.lossless.token.tolist() == [1]
    assert verdict.lenient.accepted.tolist() == [3] and verdict.lenient.token.tolist() == [1]
    assert verdict.touch.tolist() == [[False, True, True]]


def test_a_position_that_is_not_examined_is_not_touched() -> None:
    p, q = torch.tensor([[[0.1, 0.9]] * 3]), torch.tensor([[[1.0, 0.0], [0.11, 0.89]]])
    b = Block(torch.tensor([[0, 0]]), p, p, q, q)
    verdict = verify(b, get_rule("threshold"), 0.2, 1.0, u(0.5, 0.95), u(0, 0, 0))
    assert verdict.lenient.accepted.tolist() == [0] and not verdict.touch.any()


def test_where_both_models_agree_a_forced_rejection_draws_from_the_target() -> None:
    p = torch.zeros(8)
    p[3] = 1 - 1e-7  # what a temperature of 0.01 makes of logits
    p[5] = 1e-7
    b = block([3], p, p * (1 + 1e-7))
    verdict = verify(b, None, 0.0, 0.0, u(2.0), u(0.5, 0.5))  # u = 2 rejects anything
    assert verdict.lossless.accepted.tolist() == [0] and verdict.lossless.token.tolist() == [3]
    assert torch.equal(residual(p, p), p)


def test_a_masked_token_is_never_accepted_even_at_uniform_zero() -> None:
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    verdict = verify(block([0], p, q), get_rule("threshold"), 1.0, 1.0, u(0.0), u(0.3, 0.3))
    assert verdict.lenient.accepted.tolist() == [0] and verdict.lenient.token.tolist() == [1]


def test_a_narrow_row_in_a_batch_is_verified_as_if_alone() -> None:
    alone = block([1])
    padded = Block(torch.tensor([[1, 0], [0, 0]]), P.expand(2, 3, 2), P.expand(2, 3, 2), *[Q.expand(2, 2, 2)] * 2,
                   widths=torch.tensor([1, 2]))  # fmt: skip
    both = verify(padded, get_rule("forgive"), 0.5, 1.0, torch.full((2, 2), 0.5), torch.full((2, 3), 0.7))
    one = verify(alone, get_rule("forgive"), 0.5, 1.0, u(0.5), u(0.7, 0.7))
    assert both.lenient.accepted.tolist() == [1, 2]
    assert both.lenient.token[0] == one.lenient.token[0] == 1  # a bonus from p: 0.7 > 0.6


def test_theta_may_differ_by_row_and_position() -> None:
    theta = torch.tensor([[0.3, 0.0]])
    verdict = verify(block([0, 0]), get_rule("threshold"), theta, 1.0, u(0.9, 0.9), u(0, 0, 0))
    assert verdict.lenient.accepted.tolist() == [1] and verdict.touch.tolist() == [[True, False]]


def test_a_mixing_weight_may_differ_by_position() -> None:
    """p = [.1, .9], q = [.9, .1]: token 0 has A0 = 1/9; at weight w the rule makes it 1/9 + 8w/9."""
    p, q = torch.tensor([[[0.1, 0.9]] * 4]), torch.tensor([[[0.9, 0.1]] * 3])
    block = Block(torch.zeros(1, 3, dtype=torch.int64), p, p, q, q)
    weights = torch.tensor([[1.0, 0.5, 0.0]])
    for u, touched in ((0.5, [1, 1, 0]), (0.6, [1, 0, 0]), (0.1, [0, 0, 0])):
        uniforms = torch.full((1, 3), u)
        verdict = verify(block, get_rule("threshold"), 1.0, weights, uniforms, torch.zeros(1, 4))
        assert verdict.touch[0].long().tolist() == touched


def test_rows_may_have_rules_of_their_own() -> None:
    """Threshold 0.3 and forgive 0.3 at u = 0.9, one row that is lossless, and each of them alone."""
    rules = [get_rule("threshold"), None, get_rule("forgive")]
    b = Block(torch.zeros(3, 2, dtype=torch.long), P.expand(3, 3, 2), P.expand(3, 3, 2), *[Q.expand(3, 2, 2)] * 2)
    theta = torch.tensor([[0.3], [0.0], [0.3]])
    accept, rest = torch.tensor([[0.9, 0.7], [0.9, 0.7], [0.9, 0.8]]), torch.full((3, 3), 0.7)
    together = verify(b, rules, theta, torch.ones(3, 1), accept, rest)
    for i, rule in enumerate(rules):
        one = verify(block([0, 0]), rule, 0.3, 1.0, accept[i : i + 1], rest[i : i + 1])
        assert together.lenient.accepted[i] == one.lenient.accepted and together.lenient.token[i] == one.lenient.token
        assert torch.equal(together.touch[i : i + 1], one.touch)
    assert together.lenient.accepted.tolist() == [2, 0, 0]
    assert together.touch.tolist() == [[True, False], [False, False], [False, False]]


def test_scalars_are_taken_from_the_right_places() -> None:
    target, draft = torch.tensor([[[0.5, 0.5, 0.0]] * 2]), torch.tensor([[[0.0, 1.0, 0.0]]])
    target_raw, draft_raw = torch.tensor([[[0.3, 0.2, 0.5]] * 2]), torch.tensor([[[0.6, 0.4, 0.0]]])
    s = scalars_of(Block(torch.tensor([[1]]), target, target_raw, draft, draft_raw))
    expected = {
        "target_prob": 0.5,
        "draft_prob": 1.0,
        "target_prob_raw": 0.2,
        "draft_prob_raw": 0.4,
        "target_max_raw": 0.5,
        "draft_max_raw": 0.6,
        "tv": 0.5,
    }
    assert {name: round(float(value), 6) for name, value in s._asdict().items()} == expected


def test_total_variation_lies_between_equal_and_disjoint() -> None:
    assert float(total_variation(P, P)) == 0
    assert float(total_variation(P, Q)) == pytest.approx(0.2)
    assert float(total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))) == 1
