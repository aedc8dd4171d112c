"""The decode benchmark on a GPU: ``python -m bench.gpu [--device cuda] [--dtype bfloat16] [--quick]``; prints JSON.

The same methods, prompts and keys as `bench.decode`, with both models in ``--dtype``; ratios are of wall time, and the
device is waited for at both ends of a request. Needs nothing but the project itself; SmolLM2 is measured if its
directory is there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import transformers

from bench.common import Clock
from bench.decode import Setup, measure, parser, show, stderr

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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object; 2 where there is no GPU."""
    options = parser(__doc__)
    options.add_argument("--device", default="cuda", help="cuda, or cuda:N")
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of both models")
    args = options.parse_args(argv)
    if (why := refusal(args.device)) is not None:
        print(f"gpu: {why}", file=sys.stderr)
        return 2
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, args.dtype)
    found = measure(args, Setup(args.device, dtype, Clock(args.device), stderr), dtype)
    show({**found, "gpu": torch.cuda.get_device_name(args.device), "dtype": args.dtype}, as_json=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
