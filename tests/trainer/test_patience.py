"""What one rank does for long while the others wait is outside of the limit that finds hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windlass.data import open_sequences
from windlass.plan import resolve
from windlass.spec import parse_run
from windlass.trainer.preparation import content_of


class One:
    """A world of one that notes how the others would wait."""

    is_first = True

    def __init__(self) -> None:
        self.patient: list[bool] = []

    def gather(self, value: Any, *, patient: bool = False) -> list[Any]:
        self.patient.append(patient)
        return [value]


def test_digests_of_large_files_have_no_limit(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"some words {n}"}) + "\n" for n in range(200)))
    sections = {"source": str(data), "tokenizer": "tiny", "sequence_length": 8}
    run = resolve(parse_run({"name": "x", "model": {"preset": "llama-tiny"}, "data": sections}))
    sequences = open_sequences(run, "train", tokenizer="tiny")
    assert sequences is not None
    ranks: Any = One()
    assert content_of(run, sequences, ranks)["data_fingerprint"]
    assert ranks.patient == [True]
