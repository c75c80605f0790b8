"""The demo: train, lose a rank to kill -9 in the middle, recover, export, and let the trained model write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from windlass.runfolder import runs_root

RUN_FILE = os.path.relpath(Path(__file__).parent / "demo.yaml")
KILL = "kill:rank=1,step=190"  # between two checkpoints, so that steps are repeated
PROMPT = "It is a truth universally acknowledged, that "


def main() -> int:
    windlass = [sys.executable, "-m", "windlass.cli.main"]
    command = ["run", RUN_FILE, "--fresh", "--yes", "--inject", KILL, *sys.argv[1:]]
    print(f"$ windlass {' '.join(command)}\n", flush=True)
    code = subprocess.run([*windlass, *command], check=False).returncode
    if code:
        return code
    print(f"\nThe exported model, loaded by transformers, goes on from {PROMPT!r}:\n", flush=True)
    print(generate(runs_root() / "demo" / "export"))
    return 0


def generate(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=40)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    sys.exit(main())
