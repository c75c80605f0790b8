"""What is measured: one table of model shapes, sequence lengths and batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Point:
    name: str
    title: str
    preset: str  # of windlass/catalog/models.json
    batch: int
    length: int = 8192
    changes: dict[str, Any] = field(default_factory=dict)  # to the preset's transformers configuration
    documents: int = 0  # tokens of one, packed and kept apart; 0: one document without an end
    lora: int = 0  # rank; 0: everything trains

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch * self.length

    def config(self) -> dict[str, Any]:
        """Fields of the transformers configuration, `model_type` among them."""
        from windlass.catalog.models import preset

        return {**preset(self.preset).config, **self.changes}


POINTS = {
    point.name: point
    for point in (
        Point("1b-b2", "Llama-3.2-1B, T=8192, B=2", "llama3.2-1b", batch=2),
        Point("1b-b4", "Llama-3.2-1B, T=8192, B=4", "llama3.2-1b", batch=4),
        Point(
            "8bw-b2", "Llama-3.1-8B width, 8 layers, T=8192, B=2", "llama3.1-8b", 2, changes={"num_hidden_layers": 8}
        ),
        Point("1b-t2048-b16", "Llama-3.2-1B, T=2048, B=16", "llama3.2-1b", batch=16, length=2048),
        Point("1b-t4096-b8", "Llama-3.2-1B, T=4096, B=8", "llama3.2-1b", batch=8, length=4096),
        Point("3b-b2", "Llama-3.2-3B, T=8192, B=2", "llama3.2-3b", batch=2),
        Point("3b-b4", "Llama-3.2-3B, T=8192, B=4", "llama3.2-3b", batch=4),
        Point("8b-b1", "Llama-3.1-8B, T=8192, B=1", "llama3.1-8b", batch=1),
        Point("1b-packed-b2", "Llama-3.2-1B, documents of 700, T=8192, B=2", "llama3.2-1b", 2, documents=700),
        Point(
            "1b-packed-b16",
            "Llama-3.2-1B, documents of 700, T=2048, B=16",
            "llama3.2-1b",
            batch=16,
            length=2048,
            documents=700,
        ),
        Point("8b-lora", "Llama-3.1-8B, LoRA of rank 16, T=2048, B=4", "llama3.1-8b", 4, length=2048, lora=16),
        Point("8b-lora-b1", "Llama-3.1-8B, LoRA of rank 16, T=2048, B=1", "llama3.1-8b", 1, length=2048, lora=16),
        Point("tiny-packed", "tiny, documents of 20", "llama3.2-tiny", batch=2, length=64, documents=20),
        Point("tiny-lora", "tiny, LoRA of rank 4", "llama3.2-tiny", batch=2, length=64, lora=4),
        Point("tiny", "tiny, to try the program itself", "llama3.2-tiny", batch=2, length=64),
    )
}
DEFAULT_POINTS = ("1b-b2", "1b-b4", "8bw-b2")
