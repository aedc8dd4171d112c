"""Between text and tokens: prompts to ids, ids to text, and text that may be shown while more is coming."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 character decodes to


class Text:
    """A tokenizer as the server needs it. ``bos`` is put before every prompt, for tokenizers that do not do it."""

    def __init__(self, tokenizer: Any, bos: int | None = None):
        self.tokenizer = tokenizer
        self._bos = [] if bos is None else [bos]
        self._pieces: dict[int, str] = {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt; ``special=False`` for text that has its special tokens already (a chat template's)."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return [*self._bos, *ids] if special else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of output ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def piece(self, token: int) -> str:
        """The text of one token, special ones included, remembered."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._pieces[token] = piece
        return piece


class TextStream:
    """Text of one output as its tokens come, in parts that never have to be taken back.

    What may be the beginning of a ``stop`` string waits until it has turned out not to be, and so does a character
    whose bytes are not all there. The parts together are the text that decoding all tokens gives.
    """

    def __init__(self, text: Text, stop: Sequence[str] = ()):
        self._decode, self._stop = text.decode, tuple(stop)
        self._ids: list[int] = []
        self._from = self._to = 0  # tokens that give context to the next part, and those whose text is known
        self._text = ""
        self._sent = 0
        self._piece = text.piece
        self._starts: list[int] = []  # where the text of each token begins

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return len(self._ids)

    @property
    def begun(self) -> int:
        """How many tokens have text in the parts so far (to the character, where they share none)."""
        return bisect_left(self._starts, self._sent)

    @property
    def starts(self) -> list[int]:
        """Where in the whole text the text of each token begins; of those that were shown at least."""
        return self._starts

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; the text that can be shown now."""
        self._ids += ids
        # Some decoders drop a space at the beginning: decode behind the tokens of the part before.
        known = self._decode(self._ids[self._from : self._to])
        whole = self._decode(self._ids[self._from :])
        if whole.endswith(REPLACEMENT) or not whole.startswith(known):
            return ""
        self._text += whole[len(known) :]
        self._begin_at(len(self._text) - len(whole) + len(known), len(self._text))
        self._from, self._to = self._to, len(self._ids)
        end = max(self._sent, len(self._text) - self._waiting())
        part, self._sent = self._text[self._sent : end], end
        return part

    def finish(self, length: int | None = None) -> str:
        """The rest, when no more tokens come: up to ``length`` characters of the whole text (None: all)."""
        everything = self._decode(self._ids)
        self._begin_at(len(self._text), len(everything))
        whole = everything[:length]
        part, self._sent = whole[self._sent :], len(whole)
        return part

    def _begin_at(self, start: int, end: int) -> None:
        """Note where the tokens that were not known yet begin, in text from ``start`` to ``end``."""
        for token in self._ids[len(self._starts) :]:
            self._starts.append(min(start, end))
            start += len(self._piece(token))

    def _waiting(self) -> int:
        """How many characters at the end may belong to a stop string; a whole one waits with what follows it."""
        found = [at for at in (self._text.find(stop, self._sent) for stop in self._stop) if at >= 0]
        if found:
            return len(self._text) - min(found)
        for length in range(min(len(self._text) - self._sent, max(map(len, self._stop), default=1) - 1), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
