from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decoder.demo.measure import Estimate, choose, figures_of, paired, ratio, share
from decoder.demo.simulation import Run, Setting, distributions, fresh_problems, inverse_cdf, position_scalars


def make_run(exact: list[float], touches: list[int], accepted: list[float], texts: list[str] | None = None) -> Run:
    n = len(exact)
    return Run(
        texts=texts or [f"text {i}" for i in range(n)],
        exact=np.array(exact),
        strict=np.array(exact),
        touches=np.array(touches),
        held=np.zeros(n, dtype=bool),
        tokens=np.full(n, 10),
        accepted=np.array(accepted),
        drift=np.zeros(n),
        overlap=np.array(accepted),
    )


def test_shares_have_the_wilson_interval() -> None:
    """Golden: 81 of 263, 95%, from Newcombe (1998), Table I: .2553 to .3662."""
    found = share(np.array([1.0] * 81 + [0.0] * 182))
    assert (found.value, found.low, found.high) == pytest.approx((81 / 263, 0.2553, 0.3662), abs=5e-5)


def test_the_interval_of_a_share_of_none_starts_at_zero() -> None:
    """Golden: 0 of 20 (same table): 0 to .1611."""
    assert share(np.zeros(20)).high == pytest.approx(0.1611, abs=5e-5)
    assert share(np.zeros(20)).low == pytest.approx(0, abs=1e-12)


def test_paired_differences_cancel_what_both_share() -> None:
    assert paired(np.array([0.0, 0.0, 0.0])) == Estimate(0, 0, 0)
    found = paired(np.array([1.0, 0.0, 0.0, -1.0]))
    assert found.value == 0
    assert found.high == pytest.approx(1.959964 * np.sqrt(2 / 3) / 2)


def test_acceptance_is_a_ratio_of_sums_and_its_interval_covers() -> None:
    """500 repetitions of 200 requests with random lengths: coverage 95% within 5 standard errors (false alarm 6e-7)."""
    rng = np.random.default_rng(8)
    hits = 0
    for _ in range(500):
        tokens = rng.integers(5, 50, size=200)
        accepted = rng.binomial(tokens, np.where(tokens > 25, 0.6, 0.9)).astype(float)
        n = len(tokens)
        run = replace(make_run([0.0] * n, [0] * n, list(accepted)), tokens=tokens)
        lengths = np.arange(5, 50)
        truth = (lengths * np.where(lengths > 25, 0.6, 0.9)).sum() / lengths.sum()
        found = ratio(run)
        hits += found.low <= truth <= found.high
    assert abs(hits / 500 - 0.95) < 5 * np.sqrt(0.95 * 0.05 / 500)


def test_a_gain_that_is_the_same_everywhere_has_no_width() -> None:
    base = make_run([1, 1, 0], [0, 0, 0], [8, 7, 9])
    more = replace(base, accepted=base.accepted + 1)
    assert ratio(more, base).json() == [0.1, 0.1, 0.1]


def test_figures_refuse_a_run_whose_untouched_requests_differ() -> None:
    base = make_run([1, 1], [0, 0], [8, 8])
    assert figures_of(base, base)["loss"] == [0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="coupling"):
        figures_of(replace(base, texts=["text 0", "another"]), base)


def test_the_largest_gain_that_loses_at_most_a_point_is_chosen() -> None:
    def row(rule: str, gain: float, loss: float) -> dict[str, Any]:
        return {"rule": rule, "theta": 0.5, "rho": 1.0, "gain": [gain], "loss": [loss]}

    rows = [row("lossless", 0, 0), row("small", 0.05, -0.02), row("large", 0.12, 0.01), row("costly", 0.2, 0.011)]
    assert choose(rows) == Setting("large", 0.5)
    assert choose([*rows, row("equal", 0.117, 0.002)]) == Setting("equal", 0.5)  # within the tie, and loses less


def test_draws_by_inverse_cdf_have_the_weights() -> None:
    """One draw in the middle of each of 1,000 equal strips of (0, 1): counts are exact."""
    u = (torch.arange(1000) + 0.5) / 1000
    drawn = inverse_cdf(torch.tensor([0.0, 1.0, 3.0, 0.0]).expand(1000, 4), u)
    assert torch.bincount(drawn, minlength=4).tolist() == [0, 250, 750, 0]


def test_a_token_without_weight_is_never_drawn() -> None:
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert inverse_cdf(torch.tensor([0.0, 1.0, 1.0, 0.0]).expand(2, 4), ends).tolist() == [1, 2]


def test_temperature_zero_is_one_hot_on_the_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert distributions(logits, 0.0).tolist() == [[0.0, 1.0, 0.0]]
    assert torch.allclose(distributions(logits, 1e-2), distributions(logits, 0.0), atol=1e-6)
    assert torch.allclose(distributions(logits, 1.0), logits.softmax(-1))


def test_scalars_hold_the_maxima_and_the_distance() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.2, 0.2, 0.6]])
    s = position_scalars(p, q, p, q)
    assert (s.tv.item(), s.target_max_raw.item(), s.draft_max_raw.item()) == pytest.approx((0.6, 0.5, 0.6))


def test_fresh_problems_are_ordered_by_length() -> None:
    lengths = [len(p.prompt) for p in fresh_problems(1, 50, "easy")]
    assert lengths == sorted(lengths)
