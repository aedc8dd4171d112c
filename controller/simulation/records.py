"""From rounds to what a worker sends: token blocks, request records, forks and scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.simulation.document import Costs
from controller.simulation.machine import Machine
from controller.simulation.rounds import Rounds, Texts
from controller.simulation.source import Atoms, Bools, Ints
from policies.rules import Scalars
from storage.records import ACCEPTED, EXAMINED, MAX_DEPTH, TOUCH, Lease, TokenBlock

MOST_ROUNDS = 96  # batched rounds reported in one tick by one worker


@dataclass(frozen=True)
class Knobs:
    """What a worker uses now; ``lease`` None: lossless by itself."""

    g: int
    theta: float
    rho: float
    lease: Lease | None
    depth: float = MAX_DEPTH

    @property
    def rule(self) -> str:
        """The accept rule in force."""
        return "lossless" if self.lease is None else self.lease.rule

    @property
    def lenient(self) -> bool:
        """Whether these knobs can touch anything."""
        return self.lease is not None and self.theta > 0 and self.rho > 0 and self.depth > 0


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
    """A block of some of these rounds, ``rows`` requests in each; None if no whole batch came about.

    Up to MOST_ROUNDS batched rounds are reported with their seconds, about ``at_most`` drafted positions with their
    scalars. ``head`` is (pool, worker, boot, seq); ``span_s`` the seconds that the rounds ran for, which says how
    likely a pause hit one of them.
    """
    rounds = decoded.rounds
    batches = _batches(decoded, rows, rng)
    if not batches:
        return None
    chosen, shown = _reported(batches, rounds, rows, at_most, rng)
    lead = np.array([batch[0] for batch in chosen])
    width = rounds.width[lead]
    opening = rounds.start[lead] == decoded.texts.first[rounds.request[lead]]
    emitted = np.array([rounds.emitted[batch].mean() * rows for batch in chosen])
    verify = machine.verify(width, rows) * (1 + 2.0 * opening)
    noise = np.exp(costs.noise * rng.standard_normal((3, len(chosen))))
    pauses = np.zeros(len(chosen))
    if costs.pause_every is not None and rng.random() < span_s / costs.pause_every:
        hit = int(rng.integers(len(batches)))  # it is reported if its round is
        if hit < len(chosen):
            pauses[hit] = costs.pause
    of_round = np.concatenate([batch[:n] for batch, n in zip(chosen, shown, strict=True)])
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
        round_rows=np.full(len(chosen), rows, dtype=np.uint16),
        round_width=width.astype(np.uint16),
        round_emitted=np.rint(emitted).astype(np.uint32),
        round_prefill=(opening * prompt_tokens * rows).astype(np.uint32),
        round_draft_s=(machine.draft(width, rows) * noise[0]).astype(np.float32),
        round_verify_s=(verify * noise[1] + pauses).astype(np.float32),
        round_overhead_s=(machine.overhead_s * noise[2]).astype(np.float32),
        request=np.repeat(np.concatenate([np.arange(n) for n in shown]), widths).astype(np.uint16),
        round=np.repeat(np.repeat(np.arange(len(chosen)), shown), widths).astype(np.uint32),
        position=(position + 1).astype(np.uint8),
        theta=np.where(held | (position >= knobs.depth), 0.0, knobs.theta).astype(np.float32),
        flags=flags.astype(np.uint8),
        **columns,
    )


def _batches(decoded: Decoded, rows: int, rng: np.random.Generator) -> list[Ints]:
    """Rounds of single requests put together to batched ones of equal width that all read their prompts, or none.

    What is left of a kind stands for a whole batch with as much probability as it fills one.
    """
    rounds = decoded.rounds
    opens = rounds.start == decoded.texts.first[rounds.request]
    sort = rounds.width * 2 + opens
    found: list[Ints] = []
    for key in np.unique(sort):
        group = np.flatnonzero(sort == key)
        whole = len(group) // rows * rows
        found += list(group[:whole].reshape(-1, rows))
        left = group[whole:]
        if len(left) and rng.random() < len(left) / rows:
            found.append(left)
    return found


def _reported(
    batches: list[Ints], rounds: Rounds, rows: int, at_most: int, rng: np.random.Generator
) -> tuple[list[Ints], list[int]]:
    """Which batched rounds are reported, in order of time, and of how many rows each has its drafts shown.

    Drafts are shown from a random round on until there are enough; rounds that drafted nothing take no room.
    """
    order = sorted(range(len(batches)), key=lambda i: int(batches[i][0]))
    turn = int(rng.integers(len(order)))
    order = order[turn:] + order[:turn]
    room, shown = at_most, dict.fromkeys(order, 0)
    for i in order:
        width = int(rounds.width[batches[i][0]])
        if width and room > 0:
            shown[i] = min(len(batches[i]), max(1, room // width))
            room -= shown[i] * width
    with_drafts = [i for i in order if shown[i]]
    others = [i for i in order if not shown[i]][: max(0, MOST_ROUNDS - len(with_drafts))]
    taken = sorted(with_drafts + others, key=lambda i: int(batches[i][0]))
    return [batches[i] for i in taken], [shown[i] for i in taken]
