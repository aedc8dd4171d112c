"""Records what the bundled pair's drafts look like, for scenarios with recorded text: writes pair_easy.npz here.

    python -m tests.scenarios.record_pair

Lossless decoding at temperature 1 with blocks of 4 on easy problems, a fixed number of them from a fixed seed.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from controller.simulation.source import save_recording
from decoder.demo.pair import EOS, load_pair, prompt_ids
from decoder.demo.problems import make_problem
from decoder.drafters.model import ModelDrafter
from decoder.generate import Engine, Knobs, Request, RoundTrace, SamplingParams
from decoder.telemetry import Round, pack

PROBLEMS = 60


class _Traces:
    """Keeps every round."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def on_round(self, trace: RoundTrace) -> None:
        """Take one round."""
        self.rounds.append(Round(trace.traffic_class, trace))


def main() -> None:
    """Decode and save."""
    torch.set_num_threads(1)
    pair, traces, rng = load_pair(), _Traces(), random.Random(4)
    engine = Engine(pair.target, ModelDrafter(pair.draft), eos_ids=[EOS])
    for i in range(PROBLEMS):
        ids = prompt_ids(pair.tokenizer, make_problem(rng).prompt)
        request = Request(f"r{i}", ids, SamplingParams(temperature=1.0, max_tokens=96, seed=i))
        engine.generate(request, lambda: Knobs.lossless(4), traces)
    blocks = pack(traces.rounds, pool="recording", worker="w", boot="b", first_seq=0)
    save_recording(Path(__file__).with_name("pair_easy.npz"), blocks)


if __name__ == "__main__":
    main()
