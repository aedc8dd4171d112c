"""Measures a pair on the spot for `lenity advise`: prompts are decoded losslessly, and every round is kept.

Block lengths change from one request to the next, long ones first, so that acceptance is seen at every position and
seconds at every width; plain decoding is one of them. With ``rows`` above 1 so many requests decode side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from decoder.batch import Batch
from decoder.loading import load_engine
from decoder.request import Knobs, Request, RoundTrace
from decoder.sampling import SamplingParams
from decoder.telemetry import Round, pack
from policies.errors import ModelError
from storage.records import TokenBlock

PROMPT_KEYS = ("prompt", "question", "text", "input")


@dataclass
class _Kept:
    """An observer that keeps what it is told."""

    rounds: list[Round] = field(default_factory=list)

    def on_round(self, trace: RoundTrace, /) -> None:
        self.rounds.append(Round("advise", trace))


@dataclass(frozen=True)
class Measured:
    """Telemetry of the decoded prompts, and what decoded them."""

    blocks: list[TokenBlock]
    prompts: int
    tokens: int
    target: str
    drafter: str
    rows: int


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: JSON lines (an object with one of `PROMPT_KEYS`, or a string), else one prompt a line.

    Raises ModelError for a file that cannot be read or holds none.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"cannot read prompts from {path}: {e}") from e
    found = []
    for number, line in enumerate(lines, 1):
        if path.suffix != ".jsonl":
            found.append(line)
            continue
        try:
            value: Any = json.loads(line)
        except ValueError as e:
            raise ModelError(f"{path}:{number}: not JSON: {e}") from e
        text = next((value[k] for k in PROMPT_KEYS if k in value), None) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ModelError(f"{path}:{number}: no prompt; expected a string, or an object with {PROMPT_KEYS}")
        found.append(text)
    if not found:
        raise ModelError(f"{path} holds no prompt")
    return found


def measure(
    prompts: Sequence[str] | None,
    *,
    target: Path | None = None,
    draft: Path | None = None,
    ngram: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    temperature: float = 1.0,
    max_tokens: int = 64,
    lengths: Sequence[int] = (8, 4, 12, 6, 2, 1, 0),
    rows: int = 1,
    count: int = 35,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Measured:
    """Decode ``count`` prompts losslessly, at these block lengths in turn; None: problems of the bundled pair.

    Models as in `decoder.loading.load_engine`. ``progress`` is told prompts done and prompts in all. Raises ModelError.
    """
    engine, _, tokenizer = load_engine(target, draft, ngram=ngram, device=device, dtype=dtype)
    ids = _ids(prompts, tokenizer, count, seed)
    kept, tokens, done = _Kept(), 0, 0
    if rows == 1:  # the first request is slower than all that follow
        engine.generate(_request(ids[0], -1, temperature, 8, seed), lambda: Knobs.lossless(4))
    for start in range(0, len(ids), rows):
        part, g = ids[start : start + rows], lengths[(start // rows) % len(lengths)]
        requests = [_request(one, start + i, temperature, max_tokens, seed) for i, one in enumerate(part)]
        knobs = partial(Knobs.lossless, g)
        if rows == 1:
            tokens += len(engine.generate(requests[0], knobs, kept).token_ids)
        else:
            batch = Batch(engine, rows)
            for request in requests:
                batch.add(request, knobs, kept)
            while batch.rows:
                tokens += sum(len(completion.token_ids) for completion in batch.step())
        done += len(part)
        progress(done, len(ids))
    blocks = pack(kept.rounds, pool="advise", worker="here", boot="b0", first_seq=0)
    name = "n-grams" if ngram else str(draft.name if draft else "the bundled draft")
    return Measured(blocks, len(ids), tokens, target.name if target else "the bundled target", name, rows)


def _ids(prompts: Sequence[str] | None, tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    if prompts is None:
        from decoder.demo.pair import prompt_ids
        from decoder.demo.simulation import fresh_problems

        return [prompt_ids(tokenizer, problem.prompt) for problem in fresh_problems(seed + 31, count, "easy")]
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    return [list(tokenizer(text)["input_ids"]) for text in chosen]


def _request(ids: list[int], number: int, temperature: float, max_tokens: int, seed: int) -> Request:
    params = replace(SamplingParams(), temperature=temperature, max_tokens=max_tokens, seed=seed + number + 1)
    return Request(request_id=f"advise-{number}", prompt_ids=ids, params=params)
