"""The knobs in force at every drafted position of a round: for verification, and for telemetry afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from decoder.devices import send
from decoder.request import FloatArray, Knobs
from decoder.row import Row
from storage.records import ACCEPTED, EXAMINED, PINNED, TOUCH


class Leniency(NamedTuple):
    """The knobs in force: for `verify`, and per row and drafted position [width] with what structured spans pin."""

    theta: Tensor | float
    rho: Tensor | float
    by_row: list[FloatArray]
    pinned: list[npt.NDArray[np.bool_]]

    @classmethod
    def of(cls, rows: Sequence[Row], knobs: Sequence[Knobs], lenient: Sequence[bool], tokens: Tensor) -> Leniency:
        """Asks the rows' trackers about their blocks, tokens int64 [B, width]."""
        width = tokens.shape[-1]
        by_row, pinned, blocks = [], [], None
        for i, (row, k, may) in enumerate(zip(rows, knobs, lenient, strict=True)):
            request = row.request
            theta = np.full(width, k.theta if may else 0.0, dtype=np.float32)
            theta[math.ceil(k.depth) :] = 0
            fixed = np.full(width, request.pinned or (request.structured and not k.structured))
            if request.spans is not None and width and not k.structured:
                blocks = blocks or tokens.tolist()
                fixed |= ~np.array(request.spans.lenient_mask(row.output, blocks[i]), dtype=bool)
                theta[fixed] = 0
            by_row.append(theta)
            pinned.append(fixed)
        even = all(k.depth >= width for k in knobs)
        if len(rows) == 1 and blocks is None and even and tokens.device.type == "cpu":
            return cls(knobs[0].theta, knobs[0].rho, by_row, pinned)
        rhos = np.stack([k.weights(1 if even else width) for k in knobs])
        return cls(send(np.stack(by_row), tokens.device), send(rhos, tokens.device), by_row, pinned)


def applied(
    row: Row, touch: Sequence[int], accepted: int, theta: FloatArray, pinned: npt.NDArray[np.bool_]
) -> tuple[FloatArray, npt.NDArray[np.uint8]]:
    """The knob in force at every drafted position of a row, and the flag bits of what happened there."""
    knob, flags = theta.copy(), np.array(touch, dtype=np.uint8) * np.uint8(TOUCH)
    flags[:accepted] |= ACCEPTED
    flags[: accepted + 1] |= EXAMINED
    if row.arm == "holdback":
        knob[accepted + 1 :] = 0
        flags[accepted + 1 :] = 0
    flags[pinned] |= PINNED
    return knob, flags
