"""A short training through the whole of windlass, on the nodes, image and storage of a run."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from windlass.clusters.result import Result
from windlass.common.files import parse_record
from windlass.spec import load_run
from windlass.targets.kubernetes.api.kubeconfig import Access

STEPS = 20
PATIENCE_SECONDS = 900


def train(run_file: str, overrides: Sequence[str], access: Access) -> Result:
    """Train a tiny model where the run would train; what `windlass run` itself says of it."""
    run = load_run(run_file, [*overrides, "target.kind=kubernetes"])
    name = f"deep-check-{secrets.token_hex(3)}"
    place = {"context": access.context, "namespace": access.namespace}
    target = run.target.model_dump(mode="json", exclude_unset=True)
    gpus = run.resources.gpus_per_node
    ranks = run.resources.nodes * (run.resources.processes_per_node or (8 if gpus is None else max(gpus, 1)))
    values = {
        "name": name,
        "model": {"preset": "llama-tiny"},
        "data": {"source": "corpus:austen", "sequence_length": 128},
        "train": {"steps": STEPS, "global_batch": 8 * ranks},
        "resources": run.resources.model_dump(mode="json", exclude_unset=True),
        "image": run.image.model_dump(mode="json", exclude_unset=True),
        "target": {**target, "kubernetes": {**target.get("kubernetes", {}), **place}},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deep-check.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        windlass = [sys.executable, "-m", "windlass.cli.main"]
        command = [*windlass, "run", str(path), "--yes", "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            subprocess.run([*windlass, "stop", name], capture_output=True, timeout=60)
            return Result("training", "fail", f"a tiny model was not trained within {PATIENCE_SECONDS} s")
        if done.returncode:
            fix = f"windlass why {name}"
            return Result("training", "fail", "a tiny model could not be trained", _error(done.stderr), fix)
        trained = f"a tiny model was trained for {STEPS} steps on the run's own nodes"
        for clean_up in (["stop", name], ["rm", name, "--yes"]):  # its objects in the cluster, its folder here
            left = subprocess.run([*windlass, *clean_up], capture_output=True, text=True, timeout=60)
            if left.returncode:
                what, fix = f"{trained}; it could not be taken away", f"windlass {' '.join(clean_up)}"
                return Result("training", "warn", what, _error(left.stderr), fix)
        return Result("training", "pass", trained)


def _error(text: str) -> str:
    """The error object that `--json` prints at last, or the last lines."""
    for line in reversed(text.splitlines()):
        record = parse_record(line)
        if record is not None and "error" in record:
            return str(record["error"])
    return text.strip()[-400:]
