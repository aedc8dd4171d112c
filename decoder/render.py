"""Completions as OpenAI's response documents, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from decoder.generate import Completion
from decoder.protocol import Plan, Planner
from decoder.request import TokenLogprob
from decoder.text import REPLACEMENT


class Renderer:
    """The documents of one response. ``open`` are the request ids whose outputs have not ended yet."""

    def __init__(self, plan: Plan, planner: Planner, *, created: int, name: str):
        self._plan, self._text = plan, planner.text
        self._id = ("chatcmpl-" if plan.chat else "cmpl-") + name
        self._head = {"id": self._id, "created": created, "model": planner.model}
        self.request_ids = [f"{self._id}.{i}" for i in range(len(plan.seeds))]
        self._ended: dict[int, Completion] = {}

    @property
    def open(self) -> list[str]:
        return [name for i, name in enumerate(self.request_ids) if i not in self._ended]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The one document of a response that is not streamed."""
        self._ended = dict(enumerate(completions))
        choices = []
        for i, completion in self._ended.items():
            text = self._text.decode(completion.token_ids)[: completion.text_length]
            logprobs = None
            if completion.logprobs is not None:
                logprobs = self._logprobs(*self._shown(completion.logprobs, self._starts(completion), completion))
            choice = {"index": i, "finish_reason": completion.finish_reason, "logprobs": logprobs}
            if self._plan.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice)
        kind = "chat.completion" if self._plan.chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self._usage(), "lenity": self._lenity()}

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        """What comes before the first part of an output."""
        if self._plan.chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def part(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] = (), starts: Sequence[int] = ()
    ) -> dict[str, Any]:
        """One more part of the text, with the log-probabilities of the tokens that begin in it, at ``starts``."""
        return self._chunk(index, self._said(text), logprobs=self._logprobs(logprobs, starts))

    def end(
        self,
        index: int,
        text: str,
        completion: Completion,
        logprobs: Sequence[TokenLogprob] = (),
        starts: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The last part of an output; the last output also brings what all of them cost."""
        self._ended[index] = completion
        said = self._said(text) if text or not self._plan.chat else {"delta": {}}
        rest = self._logprobs(*self._shown(logprobs, starts, completion))
        chunk = self._chunk(index, said, completion.finish_reason, rest)
        return chunk if self.open else chunk | {"lenity": self._lenity()}

    def usage_chunk(self) -> dict[str, Any]:
        """What follows the last part if the caller asked for the usage."""
        return self._head | {"object": self._kind, "choices": [], "usage": self._usage()}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._plan.chat else "text_completion"

    def _said(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._plan.chat else {"text": text}

    def _chunk(
        self, index: int, said: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}
        chunk = self._head | {"object": self._kind, "choices": [choice]}
        return chunk | {"usage": None} if self._plan.include_usage else chunk

    def _usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self._plan.prompts))
        output = sum(len(c.token_ids) for c in self._ended.values())
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _lenity(self) -> dict[str, Any]:
        """What decoding cost, and under which lease it began; never the arm."""
        done = list(self._ended.values())
        knobs = done[0].knobs
        return {
            "drafted": sum(c.drafted for c in done),
            "accepted": sum(c.accepted for c in done),
            "target_passes": sum(c.target_passes for c in done),
            "lease": [knobs.epoch, knobs.lease_seq],
            "requests": self.request_ids,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob], starts: Sequence[int]) -> dict[str, Any] | None:
        """The log-probabilities of tokens whose text begins at ``starts``; None where there are none."""
        if not entries:
            return None
        if self._plan.chat:
            return {"content": [self._chat_token(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._text.piece(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._text.piece(t): value for t, value in entry.top} for entry in entries],
            "text_offset": list(starts),
        }

    @staticmethod
    def _shown(
        logprobs: Sequence[TokenLogprob], starts: Sequence[int], completion: Completion
    ) -> tuple[Sequence[TokenLogprob], Sequence[int]]:
        """Those of the tokens whose text begins before the stop string."""
        n = len(logprobs)
        if completion.text_length is not None:
            n = sum(start < completion.text_length for start in starts[:n])
        return logprobs[:n], starts[:n]

    def _starts(self, completion: Completion) -> list[int]:
        """Where the text of each token begins, in a text that is put together of the tokens' own."""
        lengths = [len(self._text.piece(token)) for token in completion.token_ids]
        return [0, *accumulate(lengths)][:-1]

    def _chat_token(self, entry: TokenLogprob) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            piece = self._text.piece(token)
            raw = None if REPLACEMENT in piece else list(piece.encode())
            return {"token": piece, "logprob": value, "bytes": raw}

        return one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top]}
