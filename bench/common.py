"""What the decode benchmarks share: ways of decoding, and times of interleaved repeats.

Every way of decoding is a `Method`: it continues one prompt greedily, and its models count and time their passes
(`Probe`). `interleave` runs all methods prompt by prompt, in an order that rotates, and `Timings` compares them: per
prompt the median over the repeats, summed over the prompts. The spread of a ratio is that over the single repeats.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bench.prompts import Prompt
from decoder.generate import Engine, Knobs, Request, SamplingParams

WALL, CPU = 0, 1  # kinds of seconds

# -- passes and times --------------------------------------------------------------------------------------------------


class Clock:
    """Wall and CPU seconds, and which of them figures are of: CPU time on a CPU, wall time on an accelerator.

    An accelerator is waited for before a time is read.
    """

    def __init__(self, device: str = "cpu"):
        self._cuda = device.startswith("cuda")
        self.kind = CPU if device == "cpu" else WALL
        # Not both: where the machine is shared, a system call is where a process loses its turn, and reading CPU time
        # is one. Wall time beside it would see the whole wait between two passes.
        self.tick = time.process_time if self.kind == CPU else time.perf_counter

    def wait(self) -> None:
        """Let the device finish what it was given."""
        if self._cuda:
            torch.cuda.synchronize()

    def now(self) -> tuple[float, float]:
        """(wall, CPU) seconds."""
        self.wait()
        return time.perf_counter(), time.process_time()


class Probe:
    """Counts the passes of a model while installed, and times them by the clock's `tick`: all, and the first one.

    Copies of one model, given as a tuple, are counted as that model.

    On an accelerator a pass is only waited for when ``every`` is set; otherwise only the first one is.
    """

    def __init__(self, model: Any, clock: Clock, *, every: bool = False):
        self._models = model if isinstance(model, tuple) else (model,)
        self._clock, self._every = clock, every
        self.reset()

    def reset(self) -> None:
        """Start again from nothing."""
        self.passes = 0
        self.seconds = self.first = 0.0

    @contextlib.contextmanager
    def installed(self) -> Iterator[Probe]:
        """The model's forward is the counting one inside."""
        for model in self._models:
            model.forward = self._counting(model.forward)
        try:
            yield self
        finally:
            for model in self._models:
                del model.forward  # the class's own shows again; a bound one left behind would outlive copies

    def _counting(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        tick = self._clock.tick

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            began = tick()
            found = inner(*args, **kwargs)
            if self._every or not self.passes:
                self._clock.wait()
            spent = tick() - began
            if not self.passes:
                self.first = spent
            self.passes += 1
            self.seconds += spent
            return found

        return forward


@dataclass
class Run:
    """One prompt, continued once.

    ``seconds`` are (wall, CPU) of everything; ``inside`` is what of the clock's kind went into the models' forwards,
    and ``first`` into the target's first one, which reads the prompt. ``passes`` are the target's.
    """

    tokens: list[int]
    passes: int
    seconds: tuple[float, float]
    inside: float
    first: float


class Method(NamedTuple):
    """A way to continue prompts: name -> output ids of (prompt ids)."""

    name: str
    decode: Callable[[list[int]], list[int]]


def ours(name: str, engine: Engine, knobs: Knobs, tokens: int, temperature: float = 0.0) -> Method:
    """Lenity's engine with fixed knobs."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens)
    return Method(name, lambda ids: engine.generate(Request(name, ids, params), lambda: knobs).token_ids)


def library(name: str, model: Any, eos: int, pad: int, tokens: int, **arguments: Any) -> Method:
    """``generate`` of transformers, greedily, with these arguments.

    ``assistant_tokens`` is for an assistant: so many drafted tokens a round, always; without it the library's defaults.
    """
    assistant = arguments.get("assistant_model")
    drafted = arguments.pop("assistant_tokens", None)

    def decode(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids], device=model.device)
        with torch.inference_mode(), _assistant_tokens(assistant, drafted):
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=eos,
                pad_token_id=pad,
                **arguments,
            )
        return list(out[0, len(ids) :].tolist())

    return Method(name, decode)


@contextlib.contextmanager
def _assistant_tokens(assistant: Any, count: int | None) -> Iterator[None]:
    """Let the assistant draft exactly ``count`` tokens a round inside; None: the library's defaults, always afresh."""
    if assistant is None:
        yield
        return
    config, kept = assistant.generation_config, vars(assistant.generation_config).copy()
    if count is not None:
        config.num_assistant_tokens = count
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        vars(config).clear()
        vars(config).update(kept)  # the library adapts its threshold and keeps it there


def interleave(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    models: Sequence[Any],
    clock: Clock,
    *,
    repeats: int,
    every: bool = False,
) -> Timings:
    """Every method on every prompt, ``repeats`` times, in an order that rotates, after a warm-up.

    ``models`` are those whose forwards are counted and timed, the target first (none: a compiled model must be left as
    it is); ``every`` as in `Probe`.
    """
    timings = Timings(clock.kind)
    for method in (methods[0], methods[-1]):
        method.decode(prompts[0].ids[-32:])
    with contextlib.ExitStack() as stack:
        gc.collect()
        gc.freeze()  # what is loaded need not be looked through before every run
        stack.callback(gc.unfreeze)
        probes = [stack.enter_context(Probe(model, clock, every=every).installed()) for model in models]
        for repeat in range(repeats):
            for i, prompt in enumerate(prompts):
                shift = (repeat + i) % len(methods)
                for method in [*methods[shift:], *methods[:shift]]:
                    timings.add(method.name, prompt.name, _timed(method, prompt, probes, clock))
    return timings


def _timed(method: Method, prompt: Prompt, probes: list[Probe], clock: Clock) -> Run:
    for probe in probes:
        probe.reset()
    gc.collect()
    wall, cpu = clock.now()
    tokens = method.decode(prompt.ids)
    ended = clock.now()
    return Run(
        tokens,
        probes[0].passes if probes else 0,
        seconds=(ended[WALL] - wall, ended[CPU] - cpu),
        inside=sum(probe.seconds for probe in probes),
        first=probes[0].first if probes else 0.0,
    )


# -- figures -----------------------------------------------------------------------------------------------------------


class Ratio(NamedTuple):
    """How much faster one method is than another, and the least and greatest of the single repeats."""

    value: float
    low: float
    high: float


@dataclass
class Timings:
    """What `interleave` saw: runs by method and prompt, one per repeat. ``kind``: the clock's, figures are of it."""

    kind: int
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)

    def add(self, method: str, prompt: str, run: Run) -> None:
        """Note one run."""
        self.runs.setdefault(method, {}).setdefault(prompt, []).append(run)

    def tokens(self, method: str) -> int:
        """Output tokens over all prompts, of one repeat."""
        return sum(len(runs[0].tokens) for runs in self.runs[method].values())

    def passes(self, method: str) -> int:
        """Target passes over all prompts, of one repeat."""
        return sum(runs[0].passes for runs in self.runs[method].values())

    def seconds_per_token(self, method: str, kind: int, repeat: int | None = None) -> float:
        """Seconds (`WALL` or `CPU`) a token: of medians over the repeats, or of one repeat."""
        return self._per_token(method, lambda run: run.seconds[kind], 0, repeat)

    def ratio(self, fast: str, slow: str, kind: int | None = None) -> Ratio:
        """Speed of ``fast`` over speed of ``slow``, in seconds of ``kind`` (None: the clock's)."""
        kind = self.kind if kind is None else kind
        return self._ratio(fast, slow, lambda run: run.seconds[kind], 0)

    def decode_ratio(self, fast: str, slow: str) -> Ratio:
        """The same without the target's first pass, which reads the prompt, and the token that it gives."""
        return self._ratio(fast, slow, lambda run: run.seconds[self.kind] - run.first, 1)

    def overhead(self, method: str) -> Ratio:
        """Time of everything over time inside the models' forwards, both without the target's first pass."""
        runs = list(self.runs[method].values())

        def of(repeat: int) -> float:
            once = [run[repeat] for run in runs]
            spent = sum(run.seconds[self.kind] - run.first for run in once)
            return spent / sum(run.inside - run.first for run in once)

        single = [of(repeat) for repeat in range(len(runs[0]))]
        return Ratio(*(round(x, 3) for x in (statistics.median(single), min(single), max(single))))

    def fastest(self, names: Sequence[str]) -> str:
        """The method of least time a token among ``names``."""
        return min(names, key=lambda name: self.seconds_per_token(name, self.kind))

    def table(self) -> dict[str, dict[str, float | int]]:
        """Per method: tokens, target passes, and tokens a second of wall time and, on a CPU, of CPU time."""
        rows: dict[str, dict[str, float | int]] = {}
        for method in self.runs:
            row: dict[str, float | int] = {"tokens": self.tokens(method), "target_passes": self.passes(method)}
            row["tokens_per_s"] = round(1 / self.seconds_per_token(method, WALL), 1)
            if self.kind == CPU:
                row["tokens_per_cpu_s"] = round(1 / self.seconds_per_token(method, CPU), 1)
            rows[method] = row
        return rows

    def same_output(self, method: str, other: str) -> tuple[int, int]:
        """(prompts with the same output, prompts) of two methods."""
        pairs = [(runs[0].tokens, self.runs[other][prompt][0].tokens) for prompt, runs in self.runs[method].items()]
        return sum(a == b for a, b in pairs), len(pairs)

    def _per_token(self, method: str, spent: Callable[[Run], float], fewer: int, repeat: int | None) -> float:
        total, count = 0.0, 0
        for runs in self.runs[method].values():
            total += statistics.median(map(spent, runs)) if repeat is None else spent(runs[repeat])
            count += len(runs[0].tokens) - fewer
        return total / count

    def _ratio(self, fast: str, slow: str, spent: Callable[[Run], float], fewer: int) -> Ratio:
        def of(repeat: int | None) -> float:
            return self._per_token(slow, spent, fewer, repeat) / self._per_token(fast, spent, fewer, repeat)

        single = [of(repeat) for repeat in range(len(next(iter(self.runs[fast].values()))))]
        return Ratio(round(of(None), 3), round(min(single), 3), round(max(single), 3))
