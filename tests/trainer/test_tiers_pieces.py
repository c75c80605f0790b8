"""Pieces by themselves: the file a rank writes, and which node doubles which."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.trainer.checkpointing.piece_tiers import Nodes
from windlass.trainer.checkpointing.pieces import Piece, read_piece, reserve, write_piece


def some_state() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "b.weight": torch.randn(7, 5, generator=draw),
        "a.flags": torch.tensor([True, False, True]),
        "a.half": torch.randn(3, generator=draw).to(torch.bfloat16),
        "step": torch.tensor(41, dtype=torch.int64),
        "nothing": torch.empty(0, 4),
        "turned": torch.randn(4, 6, generator=draw).t(),
        "eighth": torch.randn(9, generator=draw).to(torch.float8_e4m3fn),
    }


def test_a_piece_comes_back(tmp_path: Path) -> None:
    state = some_state()
    piece, path = Piece.of(state), tmp_path / "step" / "piece"
    reserve([(path, piece.size)])
    assert path.stat().st_size == piece.size
    record = write_piece(path, piece, sync=True)
    assert record.size == path.stat().st_size == piece.size
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read_piece(path, target)
    for name, tensor in state.items():
        assert torch.equal(target[name].float(), tensor.float()), name


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = some_state()
    buffer = io.BytesIO()
    Piece.of(state).write(buffer)
    found = safetensors.load(buffer.getvalue())
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name].float(), state[name].float()) for name in state)


@pytest.mark.parametrize("change", ["shape", "dtype", "name"])
def test_a_piece_of_something_else(change: str, tmp_path: Path) -> None:
    path, piece = tmp_path / "piece", Piece.of({"a": torch.zeros(4, 2)})
    reserve([(path, piece.size)])
    write_piece(path, piece, sync=False)
    other = {
        "shape": {"a": torch.zeros(2, 4)},
        "dtype": {"a": torch.zeros(4, 2, dtype=torch.bfloat16)},
        "name": {"b": torch.zeros(4, 2)},
    }[change]
    with pytest.raises(ValueError):
        read_piece(path, other)


def test_room_is_taken_at_once() -> None:
    with pytest.raises(OSError):
        reserve([(Path("/dev/shm/windlass-test-no-room"), 2**60)])
    Path("/dev/shm/windlass-test-no-room").unlink(missing_ok=True)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_piece_is_doubled_on_another_node(sizes: list[int]) -> None:
    """Whichever node is lost, each rank's piece is left on some other."""
    nodes = Nodes(tuple(node for node, count in enumerate(sizes) for _ in range(count)))
    transfers = nodes.replication()
    if nodes.count == 1:
        assert transfers == []
        return
    assert sorted(one.piece for one in transfers) == list(range(sum(sizes)))
    for one in transfers:
        assert one.sender == one.piece
        assert nodes.of_rank[one.sender] != nodes.of_rank[one.receiver]
    for lost in range(nodes.count):
        left = {rank for rank, node in enumerate(nodes.of_rank) if node != lost}
        left |= {one.piece for one in transfers if nodes.of_rank[one.receiver] != lost}
        assert left == set(range(sum(sizes)))


def test_the_load_is_spread_over_the_ranks_of_a_node() -> None:
    nodes = Nodes((0, 0, 0, 0, 1, 1, 1, 1))
    assert sorted(one.receiver for one in nodes.replication()) == list(range(8))
