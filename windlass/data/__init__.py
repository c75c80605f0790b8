"""From text to token sequences: sources, tokenizers, shards, and the order in which a run reads them. No torch here.

Each layer imports only those below it: checks and inspecting; sequences; build; shards; tokenizers; sources.
"""

from windlass.data.sequences.opening import open_sequences
from windlass.data.sequences.sequences import Batch, Sequence, Sequences

__all__ = ["Batch", "Sequence", "Sequences", "open_sequences"]
