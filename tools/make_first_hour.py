"""Write docs/first-hour.md: every command of it is run here, and what it printed goes into the page.

`python tools/make_first_hour.py` writes the page; tests/test_first_hour.py runs the same commands.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-hour.md"
WIDTH = 80
FILES = ROOT / "examples" / "first-hour"  # some chats, and a few lines of transformers


@dataclass(frozen=True)
class Step:
    """A paragraph, and the command that follows it."""

    text: str
    command: str
    shows: tuple[str, ...] = ()  # what the output must hold
    code: int = 0
    lines: int = 14  # of the output, in the page


STEPS = (
    Step(
        "## Train a model\n\n`init` writes a short run file; without options, for a tiny model and a text that "
        "windlass ships. No account, no download, no GPU.",
        "windlass init base.yaml",
        ("wrote base.yaml",),
    ),
    Step("This is all of it:", "cat base.yaml", ("preset: llama-tiny",)),
    Step(
        "`plan` says what a run will do and checks it, without starting anything.",
        "windlass plan base.yaml",
        ("model",),
    ),
    Step(
        "`run` trains it and shows a bar. Here one process is killed on purpose, with `kill -9` at step 50: the run "
        "restarts itself from its last checkpoint. Ctrl-C only detaches.",
        "windlass run base.yaml train.steps=80 checkpoint.every=20 --inject kill:rank=0,step=50",
        ("killed by SIGKILL", "resumed from the checkpoint of step 40", "finished"),
        lines=30,
    ),
    Step(
        "`show` tells the story of a run again at any time.", "windlass show base", ("finished", "restarts"), lines=30
    ),
    Step(
        "## Fine-tune it on your own chats\n\n`export` writes a Hugging Face folder.",
        "windlass ckpt export base",
        ("runs/base/export",),
    ),
    Step("Chats are one JSON object per line:", "head -n 1 chats.jsonl", ('"messages"',)),
    Step(
        "`init` has a task for them, which starts from that folder (or from any model of the hub).",
        "windlass init chat.yaml --task chat --model runs/base/export --data chats.jsonl",
        ("wrote chat.yaml",),
    ),
    Step(
        "See what will be trained on before you train: it stands between ⟦ and ⟧.",
        "windlass data inspect chats.jsonl --format chat --tokenizer runs/base/export --samples 1",
        ("⟦Emma Woodhouse",),
        lines=24,
    ),
    Step("Train for 10 steps:", "windlass run chat.yaml train.steps=10", ("finished",), lines=24),
    Step(
        "## Go on, with another learning rate\n\nThe same command with more steps goes on from the last checkpoint. "
        "Learning rate, schedule, clip and batch may change on the way; what changes is shown and recorded.",
        "windlass run chat.yaml train.steps=15 train.learning_rate=1e-5",
        ("train.learning_rate is 1e-05 from here on; it was 2e-05", "finished"),
        lines=30,
    ),
    Step(
        "## Branch, and compare\n\n`--from RUN@STEP` begins a new run with the weights and the optimizer of another.",
        "windlass run chat.yaml name=bolder --from chat@10 train.steps=15 train.learning_rate=1e-4",
        ("finished",),
        lines=24,
    ),
    Step(
        "`compare` shows in which settings runs differ, and what came of it.",
        "windlass compare chat bolder",
        ("train.learning_rate",),
    ),
    Step("All runs, newest first:", "windlass ls", ("base", "chat", "bolder")),
    Step(
        "## Use it\n\nThe exported folder is an ordinary transformers model.",
        "windlass ckpt export bolder",
        ("runs/bolder/export",),
    ),
    Step("These lines load it and let it answer:", "cat load.py", ("from_pretrained",)),
    Step(
        "A model this small has learnt little. `windlass generate bolder 'Who is Emma?' --chat` asks it "
        "without a script.",
        "python load.py",
        ("<assistant>",),
    ),
    Step("What is no longer needed goes with `rm`:", "windlass rm base --yes", (), lines=4),
)

BEGINNING = """# The first hour

From a fresh clone to a model that was fine-tuned on your own chats, killed, resumed with a lower learning rate,
branched, compared, exported and loaded: on a laptop, without a GPU or an account, in a few minutes. Every command of
this page was run by `python tools/make_first_hour.py`, which wrote it; CI runs the same commands.

```sh
make setup                         # or: pip install -e '.[train]'
export PATH=$PWD/.venv/bin:$PATH
mkdir first-hour && cd first-hour
cp ../examples/first-hour/* .      # chats.jsonl and load.py, which this page uses later
```
"""

END = """
## What may change when a run goes on

| may change | how |
|---|---|
| steps, learning rate, schedule, warm-up, clip, decay, betas | from the next step on; shown, and in the history |
| global batch | the order of the data goes on where it is; not for streams (`hf:`) |
| ranks, nodes, target, sharding, micro-batch, compile, fp8 | freely; the numbers stay the same, but for rounding |
| checkpoints, validation, logging | freely |
| model, data, tokenizer, sequence length, seed, precision | not in the same run: `name=OTHER`, or `--from RUN` |

A run that never saved a checkpoint may change everything.

## Where next

[Every key of the run file](run-file.md) · [data](data.md) · [fine-tuning](fine-tuning.md) ·
[checkpoints](checkpoints.md) · [Slurm](slurm.md) · [Kubernetes](kubernetes.md)
"""


def write_files(folder: Path) -> None:
    """As the page's first lines do."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True)


def perform(step: Step, folder: Path) -> str:
    """Run one command as a user does, and return what it printed; raises where that is not what the page promises."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("WINDLASS_RUNS", None)
    done = subprocess.run(
        step.command,
        shell=True,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != step.code:
        raise AssertionError(f"{step.command} ended with {done.returncode}, not {step.code}:\n{done.stdout}")
    for text in step.shows:
        if text not in done.stdout:
            raise AssertionError(f"{step.command} did not print {text!r}:\n{done.stdout}")
    return done.stdout


def shown(output: str, most: int, folder: Path) -> str:
    """What the page keeps of an output: no progress lines, no path of this machine, not more than fits."""
    lines = [line.rstrip() for line in output.replace(str(folder), "~/first-hour").splitlines()]
    progress = [index for index, line in enumerate(lines) if re.match(r"step \d+/\d+ ", line)]
    lines = [line for index, line in enumerate(lines) if index not in progress[1:-1]]  # the first and the last will do
    while lines and not lines[-1]:
        lines.pop()
    if len(lines) > most:
        lines = [*lines[: most // 2], "…", *lines[-(most - most // 2) :]]
    return "\n".join(lines)


def main() -> None:
    parts = [BEGINNING]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        for step in STEPS:
            print(f"$ {step.command}", flush=True)
            output = perform(step, folder)
            parts.append(f"{step.text}\n" if step.text else "")
            parts.append(f"```console\n$ {step.command}\n{shown(output, step.lines, folder)}\n```\n")
    PAGE.write_text("\n".join(parts) + END)


if __name__ == "__main__":
    main()
