"""Minutes of telemetry: what was drafted, examined, accepted and touched by position, and what rounds took.

    blocks of a tick -> add -> sums of the minute, per class -> take, once the minute is over -> rows for the history

A block counts in the minute in which the controller read it; workers' clocks do not matter. The sums of the current
minute are part of the loop's state, so a minute is given out once and whole, also by a successor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from controller.costs import BUCKETS
from storage.records import ACCEPTED, EXAMINED, MAX_DEPTH, PINNED, TOUCH, TokenBlock
from storage.rows import MINUTE, RollupRow, RoundRow, TokenRow

F = npt.NDArray[np.float64]

_FOLD_AT = 64  # blocks that wait at most
_POSITIONS = int(MAX_DEPTH) + 1  # position 0 does not occur; deeper ones count at the last
_TOKEN_SUMS = ("drafted", "examined", "accepted", "touches", "pinned", "theta_sum", "tv_sum")
_ROUND_SUMS = ("rounds", "request_rounds", "drafted", "emitted", "prefill_tokens", "draft_s", "verify_s", "overhead_s")
# [16, 5]: which of the counts a position with these flag bits belongs to.
_COUNTS = np.array([[1, *(int(bool(f & bit)) for bit in (EXAMINED, ACCEPTED, TOUCH, PINNED))] for f in range(16)])


class _Minute:
    """The sums of one class: tokens [buckets, positions, sums] and rounds [buckets, sums]."""

    def __init__(self) -> None:
        self.tokens: F = np.zeros((len(BUCKETS), _POSITIONS, len(_TOKEN_SUMS)))
        self.rounds: F = np.zeros((len(BUCKETS), len(_ROUND_SUMS)))
        self._waiting: list[TokenBlock] = []

    def add(self, block: TokenBlock) -> None:
        self._waiting.append(block)
        if len(self._waiting) >= _FOLD_AT:
            self.fold()

    def fold(self) -> None:
        """Add what waits to the sums."""
        if not self._waiting:
            return
        of = _columns(self._waiting)
        self._waiting = []
        size = len(BUCKETS)
        per_round = np.searchsorted(BUCKETS, np.clip(of["round_rows"], 1, BUCKETS[-1]))
        bucket = per_round[of["round"]]
        cell = bucket * _POSITIONS + np.minimum(of["position"], _POSITIONS - 1)
        cells = size * _POSITIONS
        flags = np.bincount(cell * 16 + (of["flags"] & 15), minlength=cells * 16).reshape(cells, 16)
        sums = [flags @ _COUNTS, *(np.bincount(cell, of[c], minlength=cells)[:, None] for c in ("theta", "tv"))]
        self.tokens += np.hstack(sums).reshape(self.tokens.shape)
        amounts = [of[c] for c in ("round_emitted", "round_prefill", "round_draft_s", "round_verify_s")]
        amounts.append(of["round_overhead_s"])
        columns = [np.bincount(per_round, minlength=size), np.bincount(per_round, of["round_rows"], minlength=size)]
        columns.append(np.bincount(bucket, minlength=size))
        columns += [np.bincount(per_round, amount, minlength=size) for amount in amounts]
        self.rounds += np.stack(columns, axis=1)

    def rows(self, pool: str, traffic_class: str, time: float) -> list[RollupRow]:
        """What was seen, one row for each position and bucket."""
        self.fold()
        made: list[RollupRow] = []
        for b, position in np.argwhere(self.tokens[:, :, 0] > 0).tolist():
            values = _named(_TOKEN_SUMS, self.tokens[b, position])
            made.append(TokenRow(pool, traffic_class, time, BUCKETS[b], position, **values))
        for b in np.flatnonzero(self.rounds[:, 0] > 0).tolist():
            values = _named(_ROUND_SUMS, self.rounds[b])
            made.append(RoundRow(pool, traffic_class, time, BUCKETS[b], **values))
        return made


class Rollup:
    """Minutes of one pool. One thread uses it; `now` is in Unix seconds and should not fall."""

    def __init__(self, pool: str):
        self.pool = pool
        self._minutes: dict[tuple[float, str], _Minute] = {}

    def add(self, block: TokenBlock, now: float, traffic_class: str | None = None) -> None:
        """Count a block that came at `now`, under its own class or the one that it was counted for elsewhere."""
        name = block.traffic_class if traffic_class is None else traffic_class
        self._minutes.setdefault((_minute(now), name), _Minute()).add(block)

    def take(self, now: float) -> list[RollupRow]:
        """The rows of the minutes that are over, each minute once; hand them to `History.save_tick` with the state of
        the same tick."""
        over = sorted(key for key in self._minutes if key[0] < _minute(now))
        return [row for key in over for row in self._minutes.pop(key).rows(self.pool, key[1], key[0])]

    def to_state(self) -> dict[str, Any]:
        """The minutes that are not over, JSON-able: for each class the cells that are not zero."""
        state = []
        for (time, name), minute in self._minutes.items():
            minute.fold()
            tokens = np.argwhere(minute.tokens[:, :, 0] > 0)
            rounds = np.flatnonzero(minute.rounds[:, 0] > 0)
            state.append(
                {
                    "time": time,
                    "class": name,
                    "tokens": [[b, p, *minute.tokens[b, p].tolist()] for b, p in tokens.tolist()],
                    "rounds": [[b, *minute.rounds[b].tolist()] for b in rounds.tolist()],
                }
            )
        return {"minutes": state}

    @classmethod
    def from_state(cls, pool: str, state: Mapping[str, Any]) -> Self:
        """The rollup that wrote `state`; cells of a bucket or position that this program does not have are left out."""
        self = cls(pool)
        for saved in state.get("minutes", ()):
            minute = self._minutes.setdefault((float(saved["time"]), str(saved["class"])), _Minute())
            for b, position, *values in saved["tokens"]:
                if b < len(BUCKETS) and position < _POSITIONS and len(values) == len(_TOKEN_SUMS):
                    minute.tokens[b, position] = values
            for b, *values in saved["rounds"]:
                if b < len(BUCKETS) and len(values) == len(_ROUND_SUMS):
                    minute.rounds[b] = values
        return self


def _minute(now: float) -> float:
    return now // MINUTE * MINUTE


def _columns(blocks: list[TokenBlock]) -> dict[str, npt.NDArray[Any]]:
    """The columns of several blocks behind each other; rounds are numbered on."""
    names = (*TokenBlock.ROUND_COLUMNS, "position", "theta", "tv", "flags")
    joined = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in names}
    sizes = [block.round_rows.size for block in blocks]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    joined["round"] = np.concatenate([block.round + start for block, start in zip(blocks, starts, strict=True)])
    return joined


def _named(names: tuple[str, ...], values: F) -> dict[str, Any]:
    """Sums by name: seconds, knobs and distances as they are, everything else a count."""
    return {n: v if n.endswith(("_s", "_sum")) else int(v) for n, v in zip(names, values.tolist(), strict=True)}
