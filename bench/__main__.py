"""List the benchmarks: each is `python -m bench.NAME [--quick] --json`, its last line one JSON object."""

from __future__ import annotations

from pathlib import Path


def main() -> None:
    """Print every benchmark with the first sentence of its docstring."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text()
        if not path.stem.startswith("_") and '__name__ == "__main__"' in text:
            print(f"python -m bench.{path.stem:12} {text.split(chr(10), 1)[0].strip(chr(34))}")


if __name__ == "__main__":
    main()
