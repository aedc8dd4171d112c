"""The decode benchmark on a GPU: ``python -m bench.gpu [--device cuda] [--dtype bfloat16] [--quick]``; prints JSON.

The same methods, prompts and keys as `bench.decode`, with both models in ``--dtype``; ratios are of wall time, and the
device is waited for at both ends of a request. Needs nothing but the project itself; SmolLM2 is measured if its
directory is there. ``--static-length N`` also measures the bundled pair with caches of fixed length, and ``--compiler
inductor`` compiles its target on top of that (CUDA graphs).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from bench.common import Clock, Method, interleave, ours
from bench.decode import FULL, QUICK, Setup, Size, measure, parser, show, stderr
from bench.prompts import bundled_prompts
from decoder.demo.pair import EOS, load_pair
from decoder.drafters import ModelDrafter
from decoder.generate import Engine, Knobs

DTYPES = ("float32", "bfloat16", "float16")


def refusal(device: str) -> str | None:
    """Why nothing can be measured on that device; None if it can."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        return f"{device!r} is no device: try cuda, or cuda:1"
    if parsed.type != "cuda":
        return f"this script measures on a GPU, not on {device!r}; for the CPU run: python -m bench.decode"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here; run this where there is one, with a torch built for it"
    if parsed.index is not None and parsed.index >= torch.cuda.device_count():
        return f"there is no {device}: torch sees {torch.cuda.device_count()} GPU(s)"
    return None


def static(size: Size, setup: Setup, length: int, compiler: str | None, g: int) -> dict[str, Any]:
    """Plain and lossless decoding of the bundled pair, with caches that grow and with ones of fixed ``length``."""
    pair = load_pair(setup.dtype)
    target, draft = pair.target.to(setup.device), pair.draft.to(setup.device)
    options: dict[str, dict[str, Any]] = {"": {}, "_static": {"static_length": length, "compiler": compiler}}
    methods: list[Method] = []
    for suffix, kept in options.items():
        engine = Engine(target, ModelDrafter(draft), eos_ids=[EOS], device=setup.device, **kept)
        for name, length_of_block in (("plain", 0), ("ours", g)):
            methods.append(ours(name + suffix, engine, Knobs.lossless(length_of_block), size.tokens))
    prompts = bundled_prompts(pair.tokenizer, size.prompts, seed=4)
    setup.say(f"bundled pair: caches of {length} slots, compiler {compiler}")
    for method in methods:  # every width is compiled before its time counts
        for prompt in prompts:
            method.decode(prompt.ids)
    timings = interleave(methods, prompts, [], setup.clock, repeats=size.repeats)
    return {
        "length": length,
        "compiler": compiler,
        "block_length": g,
        "same_output": timings.same_output("ours_static", "ours"),
        "tokens_per_s": {name: row["tokens_per_s"] for name, row in timings.table().items()},
        "ours_static_vs_ours": timings.ratio("ours_static", "ours").value,
        "ours_static_vs_plain_static": timings.ratio("ours_static", "plain_static").value,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object; 2 where there is no GPU."""
    options = parser(__doc__)
    options.add_argument("--device", default="cuda", help="cuda, or cuda:N")
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of both models")
    options.add_argument("--static-length", type=int, metavar="N", help="also measure caches of N slots, as 512")
    options.add_argument("--compiler", help="torch.compile backend for them, as inductor")
    args = options.parse_args(argv)
    if args.compiler and not args.static_length:
        options.error("--compiler needs --static-length")
    if (why := refusal(args.device)) is not None:
        print(f"gpu: {why}", file=sys.stderr)
        return 2
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, args.dtype)
    setup = Setup(args.device, dtype, Clock(args.device), stderr)
    found = measure(args, setup, dtype)
    if args.static_length:
        g = found["bundled"]["block_length"]["ours"]
        found["static"] = static(QUICK if args.quick else FULL, setup, args.static_length, args.compiler, g)
    show({**found, "gpu": torch.cuda.get_device_name(args.device), "dtype": args.dtype}, as_json=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
