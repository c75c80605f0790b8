"""Rows for tokens that were added to a frozen model: only they train, in the embedding and in the head.

Shapes: D model width, K new tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.errors import UserError

ROWS = "new_rows"  # the parameter's name in both modules; tied modules share it


class RowsEmbedding(nn.Embedding):
    """An embedding whose rows [first_new, first_new + K) are a parameter of their own."""

    new_rows: nn.Parameter
    first_new: int

    def forward(self, ids: Tensor) -> Tensor:
        known = F.embedding(ids, self.weight, self.padding_idx)
        index = ids - self.first_new
        count = self.new_rows.shape[0]
        added = F.embedding(index.clamp(0, count - 1), self.new_rows).to(known.dtype)
        return torch.where(((index >= 0) & (index < count))[..., None], added, known)


class RowsHead(nn.Linear):
    """A head with the same rows of its own."""

    new_rows: nn.Parameter
    first_new: int

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole_weight(), self.bias)

    def whole_weight(self) -> Tensor:
        first, count = self.first_new, self.new_rows.shape[0]
        rows = self.new_rows.to(self.weight.dtype)
        return torch.cat([self.weight[:first], rows, self.weight[first + count :]])


def add_rows(model: nn.Module, first: int, count: int) -> None:
    """Let the rows of `count` tokens from id `first` on train in an otherwise frozen meta model."""
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        kinds = f"{type(embedding).__name__} and {type(head).__name__}"
        raise UserError(
            f"rows of new tokens cannot be trained beside the frozen weights of {type(model).__name__}",
            evidence=f"its embedding and head are {kinds}, not a plain Embedding and Linear",
            fix="full fine-tuning: drop model.lora",
        )
    tied = head.weight is embedding.weight
    embedding.__class__, head.__class__ = RowsEmbedding, RowsHead
    for module in (embedding, head):
        setattr(module, ROWS, nn.Parameter(torch.empty(count, module.weight.shape[1], device=module.weight.device)))
        module.first_new = first  # type: ignore[assignment]
    if tied:
        setattr(head, ROWS, getattr(embedding, ROWS))


def rows_modules(model: nn.Module) -> dict[str, RowsEmbedding | RowsHead]:
    return {name: module for name, module in model.named_modules() if isinstance(module, RowsEmbedding | RowsHead)}
