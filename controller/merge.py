"""Many small blocks as few large ones, and which of them stand for all where there are more than a tick needs.

The estimates remember some thousand rounds. Where a tick brings more than that, all of them would be forgotten within
the tick; an even sample of the blocks tells as much, remembers a longer time, and bounds what a tick costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from storage.records import TokenBlock

MOST_ROUNDS = 2048  # of one class in one tick that enter the estimates
_MOST_POSITIONS = 1 << 11  # in a merged block; change detection is to see workers take turns
_GOLDEN = 0.6180339887498949


def sample(blocks: Sequence[TokenBlock], most_rounds: int = MOST_ROUNDS) -> tuple[list[TokenBlock], list[TokenBlock]]:
    """Blocks that enter the estimates, and the others; both in order.

    All of them where they have at most ``most_rounds`` rounds, else about as many blocks as have that many: one from
    each of equal stretches, at a place in it that does not look at what the block holds and follows no period.
    """
    rounds = sum(block.round_rows.size for block in blocks)
    if rounds <= most_rounds:
        return list(blocks), []
    count = max(1, len(blocks) * most_rounds // rounds)
    stretch = len(blocks) / count
    chosen = {int((i + (i * _GOLDEN) % 1.0) * stretch) for i in range(count)}
    picked = [block for i, block in enumerate(blocks) if i in chosen]
    return picked, [block for i, block in enumerate(blocks) if i not in chosen]


def merged(blocks: Iterable[TokenBlock]) -> list[TokenBlock]:
    """The same rounds in fewer blocks: those that differ in nothing but their number are put behind each other."""
    groups: dict[tuple[object, ...], list[list[TokenBlock]]] = {}
    for block in blocks:
        key = tuple(getattr(block, name) for name in TokenBlock.HEAD if name != "seq")
        parts = groups.setdefault(key, [[]])
        if sum(part.theta.size for part in parts[-1]) + block.theta.size > _MOST_POSITIONS:
            parts.append([])
        parts[-1].append(block)
    return [joined(part) for parts in groups.values() for part in parts if part]


def joined(blocks: Sequence[TokenBlock]) -> TokenBlock:
    """One block of the rounds of several, numbered on; its number is the last one's."""
    if len(blocks) == 1:
        return blocks[0]
    names = [*TokenBlock.ROUND_COLUMNS, *TokenBlock.POSITION_COLUMNS]
    columns: dict[str, Any] = {name: np.concatenate([getattr(block, name) for block in blocks]) for name in names}
    first = np.cumsum([0] + [block.round_rows.size for block in blocks[:-1]])
    columns["round"] = np.concatenate([block.round + np.uint32(n) for block, n in zip(blocks, first, strict=True)])
    return replace(blocks[-1], **columns)
