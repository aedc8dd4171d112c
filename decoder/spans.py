"""Structured spans of an answer, where leniency is 0: fenced code and tool-call arguments. Prose around stays lenient.

A wrong word in prose is a wording; a wrong token in code or in a call's arguments is a fault. The tracker reads the
answer as it grows and says for every drafted token whether leniency may be used on it. It errs on the strict side: a
token is lenient only if the text is prose before, in and after it, and what may still turn out to be the start of a
fence or a marker counts as structured until it has turned out not to be.

Fences are those of CommonMark, a little wider: three or more backticks or tildes that begin a line, behind any indent,
quote or list marker; they end at a line of at least as many of the same. Inline code is prose. An answer that is JSON
as a whole (``response_format``) needs no tracker: the request is pinned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# What opens a tool call, and what closes it ("": nothing does; the rest of the answer is one).
MARKERS: dict[str, str] = {
    "<tool_call>": "</tool_call>",  # Hermes, Qwen
    "<function=": "</function>",  # Llama 3.1 with custom functions
    "<|tool_call|>": "<|/tool_call|>",  # Granite, Phi
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",  # Kimi
    "<\uff5ctool\u2581calls\u2581begin\uff5c>": "<\uff5ctool\u2581calls\u2581end\uff5c>",  # DeepSeek
    "[TOOL_CALLS]": "",  # Mistral
    "<|python_tag|>": "",  # Llama 3.1
}

_FENCES = "`~"
# What may stand before a fence on its line: indent, quotes, one or more list markers.
_LEAD = re.compile(r"(?:[ \t]|>|[-*+](?=[ \t]|$)|\d{1,9}(?:[.)](?=[ \t]|$)|$))*\Z")


@dataclass(frozen=True)
class _State:
    """Where the text stands. ``line`` is the current line while it may still begin or end a fence, else None."""

    line: str | None = ""
    fence: str = ""  # the run that opened the fence we are in
    opening: bool = False  # still on the line that opened it
    closer: str = ""  # what ends the tool call we are in
    endless: bool = False  # in a call that nothing closes
    tail: str = ""  # the last characters, if they are a proper beginning of a marker or of the closer

    @property
    def prose(self) -> bool:
        maybe_fence = bool(self.line) and self.line is not None and self.line[-1] in _FENCES
        return not (self.fence or self.closer or self.endless or self.tail or maybe_fence)

    def after(self, text: str) -> tuple[_State, bool]:
        """The state after ``text``, and whether it was prose all the way, here included."""
        if self.endless or (self is _PROSE and _PLAIN.match(text)):
            return self, not self.endless
        state, prose = self, self.prose
        for char in text:
            state = state._next(char)
            prose = prose and state.prose
        return (_PROSE if state == _PROSE else state), prose

    def _next(self, char: str) -> _State:
        if self.endless:
            return self
        if self.closer:
            return self._in_call(char)
        if self.fence:
            return self._in_fence(char)
        return self._in_prose(char)

    def _in_call(self, char: str) -> _State:
        tail = self.tail + char
        if tail.endswith(self.closer):
            return _PROSE
        return replace(self, tail=_overlap(tail, (self.closer,)))

    def _in_fence(self, char: str) -> _State:
        if char == "\n":
            if self.line is not None and _closes(self.line, self.fence):
                return _State()
            return replace(self, line="", opening=False)
        if self.opening:
            if char == self.fence[0] and self.line is not None:
                return replace(self, fence=self.fence + char)
            # Three backticks with more of them on the same line are inline code.
            return _PROSE if char == "`" == self.fence[0] else replace(self, line=None)
        if self.line is None:
            return self
        line = self.line + char
        return replace(self, line=None if line.strip(" \t>\r" + self.fence[0]) else line)

    def _in_prose(self, char: str) -> _State:
        tail = self.tail + char
        for marker, closer in MARKERS.items():
            if tail.endswith(marker):
                return _State(line=None, closer=closer, endless=not closer)
        tail = _overlap(tail, tuple(MARKERS))
        if char == "\n":
            return _State()
        if self.line is None:
            return replace(self, tail=tail)
        line = self.line + char
        lead, run = _split(line)
        if len(run) >= 3:
            return _State(line="", fence=run, opening=True)
        return replace(self, line=line if _LEAD.match(lead) else None, tail=tail)


_PROSE = _State(line=None)  # in the middle of a line of prose
_PLAIN = re.compile(r"[^`~<\[\n]*\Z")  # text that changes nothing there: no fence, marker or line begins in it


def _split(line: str) -> tuple[str, str]:
    """A line as what is before its last run of one fence character, and that run."""
    if not line or line[-1] not in _FENCES:
        return line, ""
    lead = line.rstrip(line[-1])
    return lead, line[len(lead) :]


def _closes(line: str, fence: str) -> bool:
    run = line.strip(" \t>\r")
    return len(run) >= len(fence) and not run.strip(fence[0])


def _overlap(text: str, markers: tuple[str, ...]) -> str:
    """The longest end of ``text`` that is a proper beginning of one of ``markers``."""
    for start in range(max(0, len(text) - max(map(len, markers)) + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return text[start:]
    return ""


class SpanTracker:
    """Says which drafted tokens of one request may be accepted leniently.

    ``text_of(token_id)`` is the text of one token; it should be cached. Text that a token shares with another (a split
    UTF-8 character) may come out as anything but the characters of fences and markers.
    """

    def __init__(self, text_of: Callable[[int], str]):
        self._text_of = text_of
        self._read: list[int] = []
        self._state = _State()

    def lenient_mask(self, output_ids: Sequence[int], block: Sequence[int]) -> list[bool]:
        """For every token of ``block``, drafted after ``output_ids``: whether leniency may be used on it.

        Cheap when ``output_ids`` goes on from the last call; read anew when it does not (the other branch of a fork).
        """
        read = len(self._read)
        if list(output_ids[:read]) != self._read:
            self._read, self._state, read = [], _State(), 0
        for token in output_ids[read:]:
            self._state, _ = self._state.after(self._text_of(token))
        self._read.extend(output_ids[read:])
        state, mask = self._state, []
        for token in block:
            state, prose = state.after(self._text_of(token))
            mask.append(prose)
        return mask
