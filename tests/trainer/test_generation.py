"""`windlass generate`: the same tokens from a checkpoint, from its export, and from transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train

pytestmark = pytest.mark.train


def test_a_checkpoint_and_its_export_go_on_alike(corpus: Path, tmp_path: Path, windlass) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tiny_run(corpus, train__steps=12, checkpoint__every=6, train__learning_rate=1e-2)
    result = train(tmp_path, run)
    assert result.codes == [0], result.output
    said = windlass("generate", "run", "the quick", "--max-tokens", 8, "--json").json
    assert (said["step"], said["tokens"]) == (12, 8)
    assert windlass("generate", "run", "the quick", "--max-tokens", 8).out == f"{said['text']}\n"
    assert windlass("ckpt", "export", "run", "--dtype", "float32").code == 0
    folder = tmp_path / "runs" / "run" / "export"
    of_export = windlass("generate", folder, "the quick", "--max-tokens", 8, "--json").json
    assert (of_export["text"], of_export["step"]) == (said["text"], None)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the quick", return_tensors="pt")["input_ids"]
    expected = ids
    with torch.no_grad():
        for _ in range(8):
            likeliest = model(expected).logits[:, -1].argmax(dim=-1, keepdim=True)
            expected = torch.cat([expected, likeliest], dim=1)
    assert said["text"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)

    drawn = [
        windlass("generate", folder, "the", "--temperature", 2, "--seed", seed, "--json").json for seed in (1, 1, 2)
    ]
    assert drawn[0]["text"] == drawn[1]["text"] != drawn[2]["text"]
    chat = windlass("generate", folder, "the", "--chat", "--max-tokens", 4)  # through the tokenizer's template
    assert chat.code == 0, chat
