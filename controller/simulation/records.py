"""From rounds to what a worker sends: token blocks, request records, forks and scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.simulation.document import Costs
from controller.simulation.machine import Machine
from controller.simulation.rounds import Rounds, Texts
from controller.simulation.source import Atoms, Bools, Ints
from policies.rules import Scalars
from storage.records import ACCEPTED, EXAMINED, TOUCH, Lease, TokenBlock


@dataclass(frozen=True)
class Knobs:
    """What a worker uses now; ``lease`` None: lossless by itself."""

    g: int
    theta: float
    rho: float
    lease: Lease | None

    @property
    def rule(self) -> str:
        """The accept rule in force."""
        return "lossless" if self.lease is None else self.lease.rule

    @property
    def lenient(self) -> bool:
        """Whether these knobs can touch anything."""
        return self.lease is not None and self.theta > 0 and self.rho > 0


@dataclass(frozen=True)
class Decoded:
    """Requests that one worker decoded under one set of knobs, with everything per output position."""

    texts: Texts
    rounds: Rounds
    which: Ints  # population per position, -1 for recorded text
    atom: Ints
    accept: Bools  # as served
    touch: Bools  # examined, and only the lenient rule accepts
    held_from: Ints  # per request: position from which it is finished losslessly, or beyond its end


def report(
    decoded: Decoded,
    atoms: Atoms,
    knobs: Knobs,
    machine: Machine,
    costs: Costs,
    *,
    rows: int,
    at_most: int,
    prompt_tokens: int,
    span_s: float,
    head: tuple[str, str, str, int],
    rng: np.random.Generator,
) -> TokenBlock | None:
    """A block of at most ``at_most`` of these rounds (of single requests), in a batch of ``rows`` each.

    A contiguous run of rounds is taken as representative. ``head`` is (pool, worker, boot, seq); ``span_s`` the seconds
    that the rounds ran for, which says how likely a pause hit one that is reported. None without a whole batch.
    """
    rounds = decoded.rounds
    count = min(len(rounds.start), max(at_most, 2 * rows))
    begin = int(rng.integers(len(rounds.start) - count + 1))
    taken = np.arange(begin, begin + count)
    opens = rounds.start[taken] == decoded.texts.first[rounds.request[taken]]
    # One batched round: rows of equal width, and either all or none of them read their prompts.
    sort = rounds.width[taken] * 2 + opens
    groups = [taken[sort == key] for key in np.unique(sort)]
    chosen = [group[: len(group) // rows * rows].reshape(-1, rows) for group in groups]
    batches = np.concatenate(chosen)
    if not len(batches):
        return None
    batches = batches[np.argsort(batches[:, 0], kind="stable")]
    width = rounds.width[batches[:, 0]]
    opening = rounds.start[batches[:, 0]] == decoded.texts.first[rounds.request[batches[:, 0]]]
    verify = machine.verify(width, rows) * (1 + 2.0 * opening)
    noise = np.exp(costs.noise * rng.standard_normal((3, len(batches))))
    pauses = np.zeros(len(batches))
    if costs.pause_every is not None and rng.random() < span_s / costs.pause_every:
        # One of the tick's rounds was hit; it is among those reported with the share that is reported.
        hit = int(rng.integers(max(len(batches), len(rounds.start) // rows)))
        if hit < len(batches):
            pauses[hit] = costs.pause
    of_round = batches.ravel()
    widths = rounds.width[of_round]
    position = np.arange(int(widths.sum())) - np.repeat(np.cumsum(widths) - widths, widths)
    at = np.repeat(rounds.start[of_round], widths) + position
    examined = position < np.repeat(rounds.examined[of_round], widths)
    atom = decoded.atom[at].copy()
    fresh = ~examined & (decoded.which[at] >= 0)  # a draft that nobody examined is not the one of the next round
    atom[fresh] = atoms.draw(decoded.which[at][fresh], rng)
    held = at >= decoded.held_from[decoded.texts.request[at]]
    flags = examined * np.uint8(EXAMINED) + (examined & decoded.accept[at]) * np.uint8(ACCEPTED)
    flags += (examined & decoded.touch[at]) * np.uint8(TOUCH)
    columns = {name: getattr(atoms.scalars, name)[atom].astype(np.float32) for name in Scalars._fields}
    pool, worker, boot, seq = head
    return TokenBlock(
        pool=pool,
        traffic_class="default",
        worker=worker,
        boot=boot,
        seq=seq,
        epoch=0 if knobs.lease is None else knobs.lease.epoch,
        lease_seq=0 if knobs.lease is None else knobs.lease.seq,
        rule=knobs.rule,
        rho=knobs.rho,
        round_rows=np.full(len(batches), rows, dtype=np.uint16),
        round_width=width.astype(np.uint16),
        round_emitted=rounds.emitted[batches].sum(axis=1).astype(np.uint32),
        round_prefill=(opening * prompt_tokens * rows).astype(np.uint32),
        round_draft_s=(machine.draft(width, rows) * noise[0]).astype(np.float32),
        round_verify_s=(verify * noise[1] + pauses).astype(np.float32),
        round_overhead_s=(machine.overhead_s * noise[2]).astype(np.float32),
        request=np.repeat(np.tile(np.arange(rows), len(batches)), widths).astype(np.uint16),
        round=np.repeat(np.repeat(np.arange(len(batches)), rows), widths).astype(np.uint32),
        position=(position + 1).astype(np.uint8),
        theta=np.where(held, 0.0, knobs.theta).astype(np.float32),
        flags=flags.astype(np.uint8),
        **columns,
    )
