"""Draft-verify rounds of many requests at once, from what happens at each of their output positions.

As in the decoder, an output index has its own draft and its own coins, whichever round gets there. So whether the draft
at an index would be accepted is known beforehand, and the rounds follow: after a rejection a new one begins; a run of
accepted drafts is cut every ``g + 1`` tokens, where the last is the bonus token that nobody examines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.simulation.source import Bools, F, Ints


@dataclass(frozen=True)
class Texts:
    """Requests one after another: index of each one's first position, its length, and per position its request."""

    first: Ints
    tokens: Ints
    request: Ints
    left: Ints  # tokens of the request after this one

    @classmethod
    def of(cls, tokens: Ints) -> Texts:
        """Requests of these lengths, each at least 1."""
        ends = np.cumsum(tokens)
        first = ends - tokens
        request = np.repeat(np.arange(len(tokens)), tokens)
        return cls(first, tokens, request, ends[request] - 1 - np.arange(int(tokens.sum())))


@dataclass(frozen=True)
class Rounds:
    """The rounds of `Texts` in order; ``of`` and ``examined_at`` are per position, the rest per round."""

    start: Ints
    width: Ints
    emitted: Ints
    request: Ints
    of: Ints
    examined_at: Bools

    @property
    def examined(self) -> Ints:
        """Examined drafts per round."""
        return np.minimum(self.emitted, self.width)

    @property
    def accepted(self) -> Ints:
        """Accepted drafts per round."""
        return self.emitted - 1


def chop(texts: Texts, accept: Bools, g: int, explore: Bools) -> Rounds:
    """The rounds when drafts are accepted where ``accept`` says so (per position), with blocks of ``g >= 0``.

    ``explore`` lengthens blocks by one. At ``g = 0`` it is a coin of every round; otherwise it is read where a run of
    accepted drafts begins and holds for that run, so that slightly fewer rounds than asked are longer.
    """
    n = len(accept)
    if g == 0:
        return _plain(texts, accept, explore & (texts.left > 0))
    index = np.arange(n)
    begins = np.empty(n, dtype=bool)
    begins[0] = True
    begins[1:] = ~accept[:-1]
    begins[texts.first] = True
    run = np.maximum.accumulate(np.where(begins, index, 0))
    length = g + explore[run].astype(np.int64)
    offset = (index - run) % (length + 1)
    return _rounds(texts, offset == 0, np.minimum(length, texts.left))


def chop_deep(
    texts: Texts, lenient: Bools, part: Bools, lossless: Bools, whole: int, g: int, explore: Bools
) -> tuple[Rounds, Bools]:
    """The rounds, and what is accepted where, when the first ``whole`` positions of a block are ``lenient``, the next
    one is ``part``, and those after it are ``lossless`` (all per position). Blocks of ``g >= 1``, one longer where a
    round that begins there says ``explore``."""
    index = np.arange(len(lenient))
    length = np.minimum(g + explore, texts.left)
    shallow = np.minimum(length, whole)
    kept = np.minimum(_run(lenient), shallow)
    beyond = np.minimum(index + whole, len(index) - 1)
    after = np.minimum(beyond + 1, len(index) - 1)
    deeper = (kept == whole) & (length > whole) & part[beyond]
    kept = np.where(deeper, whole + 1 + np.minimum(_run(lossless)[after], length - whole - 1), kept)
    following = index + kept + 1
    begins = np.zeros(len(index), dtype=bool)
    at, end = texts.first, texts.first + texts.tokens
    while len(at):
        begins[at] = True
        at = following[at]
        here = at < end
        at, end = at[here], end[here]
    rounds = _rounds(texts, begins, length)
    position = index - rounds.start[rounds.of]
    return rounds, np.where(position < whole, lenient, np.where(position == whole, part, lossless))


def _run(taken: Bools) -> Ints:
    """How many positions in a row are taken from each one on."""
    index = np.arange(len(taken))
    stops = np.where(taken, len(taken), index)
    return np.minimum.accumulate(stops[::-1])[::-1] - index


def _plain(texts: Texts, accept: Bools, explore: Bools) -> Rounds:
    """Rounds of one token, and a draft where ``explore`` says so; an accepted one takes the next position with it."""
    taking = explore & accept
    index = np.arange(len(accept))
    last_without = np.maximum.accumulate(np.where(taking, -1, index))
    behind = np.concatenate(([0], (index - last_without)[:-1]))  # drafts in a row that were accepted just before
    return _rounds(texts, behind % 2 == 0, explore.astype(np.int64))


def _rounds(texts: Texts, begins: Bools, width: Ints) -> Rounds:
    """Rounds that begin at these positions and draft the ``width`` given there."""
    start = np.flatnonzero(begins)
    of = np.cumsum(begins) - 1
    emitted = np.diff(np.append(start, len(begins)))
    drafted = width[start]
    position = np.arange(len(begins)) - start[of]
    return Rounds(start, drafted, emitted, texts.request[start], of, position < drafted[of])


def first_per_request(marks: Bools, texts: Texts) -> Ints:
    """Index of the first marked position of each request; -1 for a request without one."""
    found = np.full(len(texts.tokens), -1, dtype=np.int64)
    at = np.flatnonzero(marks)
    requests, where = np.unique(texts.request[at], return_index=True)
    found[requests] = at[where]
    return found


def per_request(values: F | Bools, request: Ints, count: int) -> F:
    """Sums of values by request."""
    return np.asarray(np.bincount(request, weights=values, minlength=count), dtype=np.float64)
