"""Loading a model's weights takes its size once over all ranks together, not once per rank.

What a rank needs beside its weights (torch's own modules, loaded on first use) is about 20 MiB for any model.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train

pytestmark = [pytest.mark.train, pytest.mark.slow]

SHAPE = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few hundred MiB in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("large") / "model"
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=8, num_key_value_heads=4))
    model.to_empty(device="cpu").save_pretrained(folder, max_shard_size="150MB")
    return folder


def measured(folder: Path, rank: int) -> None:
    """A prelude: note how far a rank's memory rises from before its model is built until its weights are loaded."""
    from windlass.trainer import state

    build = state.build_model

    def built(*args: Any, **options: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        model = build(*args, **options)
        (folder / f"memory-{rank}.json").write_text(json.dumps({"before": before, "peak": resident("VmHWM")}))
        return model

    state.build_model = built


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@pytest.mark.parametrize(
    ("ranks", "lora", "precision"), campaign([(2, False, "fp32"), (4, True, "bf16"), (4, False, "fp32")], always=2)
)
def test_all_ranks_together_hold_the_model_once(
    ranks: int,
    lora: bool,
    precision: str,
    large: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tiny_run(corpus, data__tokenizer="tiny", train__precision=precision)
    run["model"] = {"path": str(large), "init": "pretrained", **({"lora": {"rank": 2}} if lora else {})}
    prelude = functools.partial(measured, tmp_path)
    result = train(tmp_path, run, ranks=ranks, faults="kill:step=1", prelude=prelude, timeout=900)
    assert set(result.codes) == {-9}, result.output
    rises = []
    for rank in range(ranks):
        noted = json.loads((tmp_path / f"memory-{rank}.json").read_text())
        rises.append(noted["peak"] - noted["before"])
    files = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    held = files / 2 if lora and precision == "bf16" else files
    with capsys.disabled():
        kind = f"{'LoRA' if lora else 'full'} {precision}"
        print(f"\n{ranks} ranks, {kind}: {sum(rises) / held:.2f} × the model's {held / 2**20:.0f} MiB", end=" ")
    assert sum(rises) < 1.3 * held
