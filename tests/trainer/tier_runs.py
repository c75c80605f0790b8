"""Runs on several "nodes": each rank gets a node's own memory and disk, which a test may take away."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Job, Result, resume, start
from windlass.checkpoint import CheckpointFolder
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder

STEPS = 12


def tiered_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    """A run with memory, disk and run folder as tiers; `changes` are keys of the checkpoint section."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    checkpoint = {
        "every": 4,
        "memory_every": 1,
        "memory_path": "$WINDLASS_NODE_DIR/memory",
        "local_every": 2,
        "local_path": "$WINDLASS_NODE_DIR/disk",
        "upload_seconds": 30,
    }
    return tiny_run(
        corpus,
        model={"preset": "llama3.2-tiny", "config": shape},
        train__steps=STEPS,
        checkpoint={key: value for key, value in {**checkpoint, **changes}.items() if value is not None},
    )


@dataclass
class Cluster:
    """Nodes of a run below one folder."""

    root: Path
    run: dict[str, Any]
    ranks: int = 2
    nodes: int = 2
    environment: dict[str, str] = field(default_factory=dict)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        prelude = functools.partial(be_on_node, str(self.root), self.ranks // self.nodes, self.environment)
        return {"ranks": self.ranks, "nodes": self.nodes, "prelude": prelude, **options}

    def start(self, **options: Any) -> Job:
        for marker in self.folder.logs.glob(".fault-*"):  # every attempt may have faults of its own
            marker.unlink()
        return start(self.root, self.run, **self._options(options))

    def train(self, **options: Any) -> Result:
        return self.start(**options).result()

    def resume(self, **options: Any) -> Result:
        return resume(self.root, self.run, **self._options(options))

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / "runs" / self.run.get("name", "run"))

    def node(self, number: int) -> Path:
        return self.root / f"node-{number}"

    def pieces(self, number: int, tier: str) -> list[CheckpointFolder]:
        """The folders of runs in a node's tier: "memory" or "disk"."""
        return [CheckpointFolder(path) for path in sorted((self.node(number) / tier).glob("*")) if path.is_dir()]

    def lose(self, number: int, tier: str | None = None) -> None:
        """Take a tier of a node away, or all of the node."""
        shutil.rmtree(self.node(number) / (tier or "."), ignore_errors=True)

    def events(self, event: str) -> list[dict[str, Any]]:
        return [one for one in read_json_lines(self.folder.history) if one["event"] == event]


def be_on_node(root: str, ranks_per_node: int, environment: dict[str, str], rank: int) -> None:
    """In a rank, before it trains."""
    os.environ.update(environment)
    os.environ["WINDLASS_NODE_DIR"] = str(Path(root) / f"node-{rank // ranks_per_node}")
