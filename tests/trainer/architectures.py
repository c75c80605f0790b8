"""Try every causal architecture that the installed transformers registers: `python -m tests.trainer.architectures`.

Each is built tiny on the CPU and trained for two steps by the trainer's own parts. It works, is refused in words, or
fails; that a token cannot see those after it is measured, not believed.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tests.trainer.tiny_models import tiny_config

LENGTH, LIMIT_S = 16, 120


@dataclass(frozen=True)
class Outcome:
    model_type: str
    verdict: str  # works, refused, failed or not tried
    says: str


def all_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def try_one(model_type: str, root: Path) -> Outcome:
    """Two steps of a tiny model, and whether its loss looks ahead."""
    from windlass.errors import UserError

    try:
        config = tiny_config(model_type)
        folder = root / model_type
        config.save_pretrained(folder)
    except Exception as error:
        return Outcome(model_type, "not tried", f"no tiny configuration: {type(error).__name__}: {_line(error)}")
    obstacle = transformers_cannot(config)
    if obstacle:
        return Outcome(model_type, "not tried", f"transformers itself does not run the tiny configuration: {obstacle}")
    try:
        with time_limit(LIMIT_S):
            return train(model_type, folder)
    except UserError as error:
        return Outcome(model_type, "refused", error.what + (f": {error.evidence}" if error.evidence else ""))
    except Exception as error:
        return Outcome(model_type, "failed", f"{type(error).__name__}: {_line(error)}")


def transformers_cannot(config: Any) -> str | None:
    """Why a plain model of transformers does not run forward and backward; then nobody could train it."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with time_limit(LIMIT_S):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            logits = model(input_ids=torch.randint(3, 100, (2, LENGTH)), use_cache=False).logits
            logits.float().logsumexp(-1).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {_line(error)}"
    return None


def train(model_type: str, folder: Path) -> Outcome:
    import torch

    from windlass.plan import resolve
    from windlass.plan.layout import Layout
    from windlass.spec.loading import parse_run
    from windlass.trainer.batches import MicroBatch, StepBatch
    from windlass.trainer.distributed.ranks import Ranks
    from windlass.trainer.fast.attention import use_attention
    from windlass.trainer.fast.head import return_loss
    from windlass.trainer.model.structure import attention_name, meta_model, model_config
    from windlass.trainer.model.weights import draw_weights, materialize, restore_buffers
    from windlass.trainer.optimizer import AdamW
    from windlass.trainer.parallelize import parallelize
    from windlass.trainer.preparation import model_facts
    from windlass.trainer.step import Stepper

    data = {"source": "x", "tokenizer": "tiny", "sequence_length": LENGTH}
    sections = {"train": {"precision": "fp32", "steps": 2, "warmup_steps": 0}, "resources": {"gpus_per_node": 0}}
    run = resolve(parse_run({"name": "x", "model": {"path": str(folder)}, "data": data, **sections}))
    alone = Ranks(0, 1, 0, torch.device("cpu"), None, None)  # type: ignore[arg-type]
    config = model_config(run)
    reference, model = meta_model(config, run), meta_model(config, run)
    layout = Layout.resolve(run, 1, 2, model_facts(run, reference, config, cuda=False))
    use_attention(model, layout)
    return_loss(model, fused=False)
    parallelize(model, run, layout, alone)
    materialize(model, alone.device)
    restore_buffers(model, reference, alone.device)
    draw_weights(model, reference, seed=0, device=alone.device)
    updates = AdamW(model, run.train, bf16_copies=False, num_micro=1)
    stepper = Stepper(model, layout, alone)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 100, (2, LENGTH + 1), generator=draw)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], None, ("a", "b"))
    losses = []
    for _ in range(3):
        shares = stepper.backward(StepBatch([batch], 2 * LENGTH, 2 * LENGTH, None, 0.0), 2.0 * LENGTH)
        losses.append(float(shares.sum()))
        updates.apply(3e-3, shares.sum())
    if not min(losses[1:]) < losses[0]:
        return Outcome(model_type, "failed", f"the loss does not fall: {losses}")
    if looks_ahead(model, tokens[:1, :-1]):
        return Outcome(model_type, "failed", "a token's prediction depends on tokens after it")
    return Outcome(model_type, "works", f"attention {attention_name(model)}, loss {losses[0]:.2f} → {losses[-1]:.2f}")


def looks_ahead(model: Any, tokens: Any) -> bool:
    """Whether the loss of the first half changes with the tokens of the second."""
    import torch

    half = tokens.shape[1] // 2
    labels = tokens.roll(-1, 1)
    labels[:, half - 1 :] = -100
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 7) % 90 + 3
    model.eval()
    with torch.no_grad():
        first, second = (float(model(one, labels, None, 1.0)) for one in (tokens, other))
    return abs(first - second) > 2e-6 * abs(first)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def over(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:160] if lines else ""


def survey(types: Sequence[str], root: Path, *, show: bool = False) -> list[Outcome]:
    outcomes = []
    for model_type in types:
        began = time.monotonic()
        outcome = try_one(model_type, root)
        outcomes.append(outcome)
        if show:
            took = time.monotonic() - began
            print(f"{outcome.verdict:<9} {model_type:<26} {outcome.says}  ({took:.1f} s)", flush=True)
    return outcomes


def main() -> int:
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    types = sys.argv[1:] or all_types()
    with tempfile.TemporaryDirectory() as root:
        outcomes = survey(types, Path(root), show=True)
    verdicts = ("works", "refused", "failed", "not tried")
    counts = {name: sum(one.verdict == name for one in outcomes) for name in verdicts}
    print(f"{len(outcomes)} architectures: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
