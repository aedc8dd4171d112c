"""Fakes around the serving loop: a batch without models, listeners, a stream that keeps what it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from decoder.branches import BranchStore
from decoder.knobs import LeaseReader, Terms
from decoder.request import Completion, ForkResult, Knobs, Request, TokenLogprob
from decoder.sampling import SamplingParams
from decoder.serving import Job, Serving
from decoder.telemetry import TelemetrySender
from decoder.worker import Reporter, Scoring, WorkerMetrics
from storage.records import Lease, Record, from_fields, to_fields

SCORING = Scoring("m", "s", "1", lambda ids: 0.5)


def completion(request: Request, reason: str = "stop", **values: Any) -> Completion:
    touched = values.get("fork_drawn", False)
    given: dict[str, Any] = {
        "token_ids": [7] * min(9, request.params.max_tokens), "arm": "lenient" if touched else "untouched",
        "touches": int(touched), "first_touch_at": 5.0 if touched else None, "fork_drawn": False, "label_drawn": False,
        "holdback_prob": 0.0, "fork_prob": 1.0, "label_prob": 0.0, "target_passes": 1,
        "knobs": Knobs(g=4, label_deadline=60.0),
        "drafted": 4, "examined": 2, "accepted": 1, "first_token_s": 0.1, "total_s": 2.0, "fork_point": None,
    }  # fmt: skip
    return Completion(request=request, finish_reason=reason, **(given | values))


class Batch:
    """Rows that take as many rounds as they have tokens to make; ``outcome`` goes into their completions."""

    def __init__(self, size: int = 2, **outcome: Any):
        self.size, self.outcome = size, outcome
        self.seats: dict[str, list[Any]] = {}
        self.fails = 0
        self.knobs: list[Knobs] = []
        self.strategies: list[str] = []

    @property
    def rows(self) -> int:
        return len(self.seats)

    @property
    def free(self) -> int:
        return self.size - self.rows

    def add(
        self, request: Request, knobs: Callable[[], Knobs], observer: Any, on_tokens: Any, strategy: str = ""
    ) -> None:
        if not request.prompt_ids:
            raise ValueError("no prompt")
        self.strategies.append(strategy)
        self.seats[request.request_id] = [request, request.params.max_tokens, knobs, on_tokens]

    def step(self) -> list[Completion]:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("out of memory")
        done = []
        for name, seat in list(self.seats.items()):
            self.knobs.append(seat[2]())
            seat[1] -= 1
            if seat[3]:
                said = seat[0].params.logprobs is not None
                seat[3]([7], [TokenLogprob(7, -0.5, [])] if said else [])
            if not seat[1]:
                del self.seats[name]
                logprobs = [TokenLogprob(7, -0.5, [])] * seat[0].params.max_tokens
                told = {} if seat[0].params.logprobs is None else {"logprobs": logprobs}
                done.append(completion(seat[0], **(told | self.outcome)))
        return done

    def cancel(self, request_id: str) -> Completion | None:
        seat = self.seats.pop(request_id, None)
        if seat is None or seat[1] == seat[0].params.max_tokens:
            return None
        return completion(seat[0], "cancelled", **self.outcome)


class Listener:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def tokens(self, ids: list[int], logprobs: list[TokenLogprob]) -> None:
        self.said.append(ids)

    def finished(self, completion: Completion) -> None:
        self.said.append(completion.finish_reason)

    def failed(self, error: Exception) -> None:
        self.said.append(type(error))


class Stream:
    def __init__(self) -> None:
        self.entries: list[Record] = []

    def append(self, records: Sequence[Record]) -> int:
        self.entries += [from_fields(to_fields(r)) for r in records]
        return len(records)


class Leases:
    """A store with at most one lease."""

    def __init__(self, lease: Lease | None = None):
        self.lease = lease

    def read(self, pool: str, traffic_class: str) -> tuple[Lease, float] | None:
        return None if self.lease is None else (self.lease, self.lease.ttl)


class Bench:
    """A serving loop over fakes, turned by hand."""

    def __init__(
        self, batch: Batch | None = None, queue_size: int = 2, lease: Lease | None = None, judged: bool = False
    ):
        self.now, self.forked, self.rounds = 0.0, 0, 0
        self.fork_fails = False
        self.batch, self.lane = batch or Batch(), Batch(1)
        self.branches = BranchStore(lambda: self.now) if judged else None
        self.stream = Stream()
        self.sender = TelemetrySender(self.stream, "p", "w", "b", start=False)
        self.leases = Leases(lease)
        reader = LeaseReader(self.leases, "p")
        reader.poll_once()
        metrics = WorkerMetrics(self.sender, reader)
        reporter = Reporter(self.sender, metrics, pool="p", worker="w", boot="b", wall=lambda: 1000.0)
        self.metric = metrics.registry.get_sample_value
        self.serving = Serving(
            self.batch, self.lane, self.branch, reader, reporter, queue_size=queue_size,
            branches=self.branches, clock=lambda: self.now,
        )  # type: ignore[arg-type]  # fmt: skip

    def branch(self, completion: Completion) -> Bench:
        """Begin a fork: the bench is the branch, too. It takes two rounds."""
        self.rounds = 2
        return self

    def step(self) -> ForkResult | None:
        """A round of it."""
        if self.fork_fails:
            raise RuntimeError("out of memory")
        self.rounds -= 1
        if self.rounds:
            return None
        self.forked += 1
        return ForkResult([1, 2], 1, 1, 0.1, "stop")

    def job(self, name: str, rounds: int = 1, **values: Any) -> Listener:
        """Submit one request."""
        listener = Listener()
        request = Request(name, [1], SamplingParams(max_tokens=rounds))
        self.serving.submit([replace(Job(request, Terms(), listener), **values)])
        return listener

    def turns(self, most: int = 1000) -> int:
        """Turn until there is nothing to do."""
        return next(i for i in range(most) if not self.serving.turn())

    def records(self, kind: type) -> list[Any]:
        self.sender.flush_once()
        return [r for r in self.stream.entries if isinstance(r, kind)]


class Bytes:
    """A tokenizer whose tokens are given byte strings, or the bytes; it may drop a space at the beginning."""

    def __init__(self, tokens: Sequence[bytes] = (), strip: bool = False, template: str | None = None):
        self.tokens = list(tokens) or [bytes([i]) for i in range(256)]
        self.strip, self.chat_template = strip, template
        self.calls: list[Any] = []

    def __call__(self, text: str, **options: Any) -> SimpleNamespace:
        self.calls.append((text, options["add_special_tokens"]))
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, ids: list[int], **_: Any) -> str:
        text = b"".join(self.tokens[i] for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip else text

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "tool":
            raise ValueError("no tools")
        return "|".join(f"{m['role']}>{m['content']}" for m in messages) + "|assistant>"
