"""Open the model's structure and the data before anything is written: what is wrong with either is said here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from windlass.data import Sequences, open_sequences
from windlass.errors import UserError
from windlass.spec import Run
from windlass.trainer.model import ModelFacts, facts, meta_model, model_config


@dataclass(frozen=True)
class Prepared:
    config: Any  # transformers configuration
    reference: nn.Module  # the model on the meta device, neither sharded nor wrapped
    facts: ModelFacts
    sequences: Sequences
    validation: Sequences | None
    order: dict[str, Any]  # everything the order of sequences depends on

    def model_identity(self) -> dict[str, Any]:
        return self.facts.as_dict(self.config)


def prepare(run: Run) -> Prepared:
    config = model_config(run)
    reference = meta_model(config, run)
    model_facts = facts(reference)
    tokenizer = run.data.tokenizer
    assert tokenizer  # resolved
    sequences = open_sequences(run, "train", tokenizer=tokenizer)
    assert sequences is not None
    if sequences.vocab_size > model_facts.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer} has {sequences.vocab_size:,} tokens, the model {model_facts.vocab_size:,}",
            cause="a token beyond the model's embedding has no row there",
            fix=f"data.tokenizer=… (the model's own), or model.config.vocab_size={sequences.vocab_size}",
        )
    return Prepared(
        config=config,
        reference=reference,
        facts=model_facts,
        sequences=sequences,
        validation=open_sequences(run, "validation", tokenizer=tokenizer),
        order=_order(run, sequences),
    )


def _order(run: Run, sequences: Sequences) -> dict[str, Any]:
    data = run.data.model_dump(
        mode="json",
        include={
            "source",
            "config",
            "split",
            "files",
            "text_field",
            "tokenizer",
            "sequence_length",
            "document_mask",
            "shuffle",
            "holdout",
        },
    )
    return {
        **data,
        "num_sequences": sequences.num_sequences,
        "global_batch": run.train.global_batch,
        "seed": run.train.seed,
    }
