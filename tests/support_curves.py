"""Curves with known answers, for tests of the solver."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from controller.curve import Curve, Settings, flat, settings_path

F = npt.NDArray[np.float64]


def constant_curve(a: float, gain: float, g_max: int, settings: Settings | None = None) -> Curve:
    """Acceptance ``a + theta gain`` at every position, independently; what is gained are touches. No error."""
    settings = settings or settings_path()
    step = settings.theta * gain
    accept = np.minimum(1.0, a + step)[:, None]
    reach = accept ** np.arange(g_max + 1)
    touches = np.zeros_like(reach)
    touches[:, 1:] = np.cumsum(reach[:, :-1] * (accept - a), axis=1)
    none = np.zeros_like(reach)
    return Curve(settings, reach, touches, none, none, flat(reach), np.full(g_max + 1, 1e4))


def random_curve(rng: np.random.Generator, g_max: int, levels: int, contexts: int = 12) -> Curve:
    """The curve of a rule that jumps: a few kinds of round, each position with its own A0 and place of its jump."""
    settings = settings_path(levels, float(rng.choice([1.0, rng.uniform(0.05, 1)])))
    a0 = rng.beta(*rng.uniform(0.3, 6, 2), size=(contexts, g_max))
    jump = rng.uniform(0, 1.3, size=(contexts, g_max)) ** rng.uniform(0.3, 3)
    smooth = rng.random()
    theta = settings.theta[:, None, None]
    full = np.where(theta >= jump, 1.0, a0 + smooth * theta * (1 - a0))
    accept = np.maximum(a0, full)
    weight = rng.dirichlet(np.ones(contexts))
    after = np.cumprod(accept, axis=2)
    before = np.concatenate((np.ones_like(after[:, :, :1]), after[:, :, :-1]), axis=2)
    reach = np.concatenate((np.ones((len(settings), 1)), np.einsum("c,scj->sj", weight, after)), axis=1)
    touched = np.cumsum(np.einsum("c,scj->sj", weight, before * (accept - a0)), axis=1)
    touches = np.concatenate((np.zeros((len(settings), 1)), touched), axis=1)
    by_depth = np.ones((len(settings), g_max + 1, g_max + 1))
    for k in range(g_max + 1):
        mixed = np.concatenate((accept[:, :, :k], np.broadcast_to(a0, accept.shape)[:, :, k:]), axis=2)
        by_depth[:, k, 1:] = np.einsum("c,scj->sj", weight, np.cumprod(mixed, axis=2))
    noisy = rng.random() < 0.5
    if noisy:  # estimates of rounds of unequal length need not rise along the path
        touches[1:, 1:] *= np.exp(rng.normal(0, 0.1, size=touches[1:, 1:].shape))
        touches = np.maximum.accumulate(touches, axis=1)
        by_depth[1:, :, 1:] *= np.exp(rng.normal(0, 0.02, size=by_depth[1:, :, 1:].shape))
        by_depth = np.minimum(1.0, by_depth)
        by_depth[:, 0], j = by_depth[0, 0], np.arange(g_max + 1)
        reach = by_depth[:, j, j].copy()
        by_depth = np.where(j[:, None] >= j, reach[:, None, :], by_depth)
    error = rng.choice([0.2, 2.0], p=[0.8, 0.2]) * rng.random() * touches
    return Curve(settings, reach, touches, 0.05 * reach * np.abs(1 - reach), error, by_depth, np.full(g_max + 1, 500.0))


def costs(g_max: int, c: float, slope: float = 0.0, overhead: float = 0.0) -> tuple[F, F, float]:
    """Seconds per round with a target pass of one second, a draft step of ``c`` and ``slope`` per extra width."""
    g = np.arange(g_max + 1)
    return c * g, 1 + slope * g, overhead
