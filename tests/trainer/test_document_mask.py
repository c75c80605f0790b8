"""With data.document_mask no document sees another one, in any family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.trainer.conftest import tiny_run
from tests.trainer.fine_tuning import SHAPE
from tests.trainer.harness import train
from tests.trainer.plain import documents_apart, plain_loop, token_stream, windows
from windlass.plan import resolve
from windlass.plan.layout import PLAIN_HEADS, Facts, Layout
from windlass.spec import parse_run
from windlass.trainer.batches import IGNORED, Batches, MicroBatch
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.attention import use_attention, wants_documents
from windlass.trainer.fast.head import return_loss
from windlass.trainer.fast.lean import join_weights, use_lean_blocks
from windlass.trainer.step import Stepper

FAMILIES = {
    "gpt2": GPT2Config(
        vocab_size=1024, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "sliding": MistralConfig(**SHAPE, sliding_window=8),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
}
LENGTH, BATCH, STEPS = 32, 8, 3


@pytest.mark.train
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "sliding"])
def test_documents_train_as_if_alone(family: str, corpus: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path / "model")
    rows = windows(token_stream(corpus), LENGTH)
    batches = [rows[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    losses, norms = plain_loop(tmp_path / "model", batches, [1e-3] * STEPS, loss_of=documents_apart)
    run = tiny_run(corpus, data__shuffle=False, data__tokenizer="tiny", data__document_mask=True)
    run["model"] = {"path": str(tmp_path / "model"), "init": "pretrained"}
    run["train"] |= {"steps": STEPS, "schedule": "constant", "warmup_steps": 0}
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [0, 0], result.output
    assert list(result.losses.values()) == pytest.approx(losses, rel=1e-5)
    assert list(result.grad_norms.values()) == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_document_changes_nothing(family: str) -> None:
    """The loss of the second document of a row, with two different first ones; bitwise."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).train()
    return_loss(model, fused=FAMILIES[family].model_type in PLAIN_HEADS)
    run = resolve(parse_run({"model": {"preset": "llama-tiny"}, "data": {}, "train": {"precision": "fp32"}}))
    nobody: Any = None
    layout = Layout.resolve(run, 1, 1, Facts.of({}, cuda=False, flash4_obstacle="no GPU"))
    stepper = Stepper(model, layout, Ranks(0, 1, 0, torch.device("cpu"), host=nobody, saving=nobody))
    first, second = 13, 19
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    labels = torch.full((1, first + second), IGNORED)
    labels[:, first:] = torch.randint(0, 1024, (1, second))
    shared = torch.randint(0, 1024, (1, second))
    losses = []
    for _ in range(2):
        tokens = torch.cat([torch.randint(0, 1024, (1, first)), shared], dim=1)
        losses.append(stepper.token_loss(MicroBatch(tokens, labels, positions, ("a",))))
    assert torch.equal(*losses)
    leaking = stepper.token_loss(MicroBatch(tokens, labels, None, ("a",)))
    assert not torch.equal(leaking, losses[1]), "without the mask it would be seen"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral", "llama", "lean"])
def test_packed_documents_without_a_mask(family: str) -> None:
    """flash-attn-4 is told where documents begin: losses and gradients are those that a mask gives."""
    config = LlamaConfig(**SHAPE) if family in ("llama", "lean") else FAMILIES[family]
    starts = [[0, 5, 6, 20], [0, 31]]
    sequences = [
        SimpleNamespace(tokens=torch.randint(0, 1024, (33,)).numpy(), loss=None, document_starts=np.array(one), id="a")
        for one in starts
    ]
    run = resolve(parse_run({"model": {"preset": "llama-tiny"}, "data": {"document_mask": True}}))
    run = run.model_copy(update={"data": run.data.model_copy(update={"sequence_length": LENGTH})})
    nobody: Any = None
    ranks = Ranks(0, 1, 0, torch.device("cpu"), host=nobody, saving=nobody)
    rows: Any = SimpleNamespace(sequences=sequences, state=None, epoch=0.0)
    batch = Batches(nobody, run, ranks, global_batch=3, micro=3, num_micro=1)._assemble(rows).micro_batches[0]
    assert batch.documents is not None
    assert batch.documents.tolist() == [0, 5, 6, 20, 32, 63, 64, 96]  # the last row is padding
    found = []
    for attention in ("sdpa", "flash4"):
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        chosen = run.model_copy(update={"model": run.model.model_copy(update={"attention": attention})})
        if family == "lean":
            chosen = chosen.model_copy(update={"train": run.train.model_copy(update={"lean_blocks": True})})
        layout = Layout.resolve(chosen, 1, 3, Facts.of(model.config.to_dict(), cuda=False))
        use_attention(model, layout)
        assert wants_documents(model) == (attention == "flash4")
        if family == "lean":
            assert layout.lean
            use_lean_blocks(model)
            join_weights(model)
        return_loss(model, fused=True)
        stepper = Stepper(model, replace(layout, precision="fp32"), ranks)
        loss = stepper.token_loss(batch)
        loss.backward()
        measured = stepper.measure(batch)[0]
        assert measured == pytest.approx(loss.item(), rel=1e-6)
        found.append((loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name, gradient in found[1][1].items():
        torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-4, atol=1e-5, msg=name)
