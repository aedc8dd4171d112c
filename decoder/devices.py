"""What differs between a CPU and a GPU, where the host runs ahead of the device: sending numbers, and taking times."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor


def send(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of ``values`` (nested lists or a NumPy array) on the device.

    To a GPU from pinned memory: an ordinary copy makes the host wait until the device has done all it was given before.
    """
    here = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    if dtype is not None:
        here = here.to(dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


class Stopwatch:
    """Started when made; `lap` ends drafting, then the target's pass; the rest is overhead.

    On a GPU laps are marked on the device. That costs no wait, but `seconds` may be asked only after the host has
    waited for what came after the last lap.
    """

    def __init__(self, device: torch.device):
        self._device_side = device.type == "cuda"
        self._began = time.perf_counter()
        self._laps: list[float] = [self._began]
        self._events: list[torch.cuda.Event] = []
        self._mark()

    def lap(self) -> None:
        """End a part."""
        self._laps.append(time.perf_counter())
        self._mark()

    def seconds(self) -> tuple[float, float, float]:
        """Drafting, the target's pass, and the rest up to now."""
        now = time.perf_counter()
        draft_s, verify_s = self._laps[1] - self._laps[0], self._laps[2] - self._laps[1]
        if self._device_side:
            draft_s, verify_s = (a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False))
        return draft_s, verify_s, max(0.0, now - self._began - draft_s - verify_s)

    def _mark(self) -> None:
        if self._device_side:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
