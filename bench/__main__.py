"""List the benchmarks: each is `python -m bench.NAME [--quick] --json`, its last line one JSON object."""

from __future__ import annotations

from pathlib import Path


def main() -> None:
    """Print every benchmark with the first sentence of its docstring."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if not path.stem.startswith("_"):
            print(f"python -m bench.{path.stem:12} {path.read_text().split(chr(10), 1)[0].strip(chr(34))}")


if __name__ == "__main__":
    main()
