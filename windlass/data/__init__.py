"""From text to token sequences: sources, tokenizers, shards, and the order in which a run reads them. No torch here."""

from windlass.data.sequences.sequences import Batch, Sequence, Sequences, open_sequences

__all__ = ["Batch", "Sequence", "Sequences", "open_sequences"]
