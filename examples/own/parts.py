"""A model, a loss, a dataset, an optimizer and a callback of one's own, for own.yaml beside this file."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.trainer.callbacks.callback import Callback


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mix(self.norm(hidden))[0]
        return hidden + self.feed_forward(hidden)


class Model(nn.Module):
    """Any module that makes logits of tokens will do. Its repeated blocks stand in a ModuleList."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("scale", torch.tensor(width**-0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss for each label. Those of -100 do not count, whatever is returned for them."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none", label_smoothing=0.1
    )
    return losses.view_as(labels)


class Counting:
    """Sequences that count upwards. An item is the same whenever it is asked for."""

    vocab_size = 256  # of its tokens; else that of data.tokenizer

    def __init__(self, run, part: str) -> None:
        self.length = run.data.sequence_length + 1
        self.num_items = 500 if part == "train" else 50

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> list[int]:
        return [(index + step * (1 + index % 3)) % 256 for step in range(self.length)]


def sgd(named_parameters, train) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=train.learning_rate, momentum=0.9)


class Report(Callback):
    """Every rank has its own, and calls it at the same moments."""

    def after_step(self, state) -> None:
        if state.ranks.is_first and state.step % 10 == 0:
            print(f"step {state.step}: loss {state.last_loss:.3f}")
