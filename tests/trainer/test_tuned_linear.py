"""Linear layers that choose their algorithm: the same numbers as torch's, whatever is chosen."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.trainer.kernels.cublas import CublasError, Problem, Shape, _library, _Offer
from windlass.trainer.tuned_linear import TunedLinear, product

pytestmark = pytest.mark.torch_floor


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_a_product_takes_either_side_transposed(a_transposed: bool, b_transposed: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    stored = [one.T.contiguous() if turned else one for one, turned in ((a, a_transposed), (b, b_transposed))]
    torch.testing.assert_close(product(*stored, a_transposed, b_transposed), a @ b)
    assert Shape.of(*stored, a_transposed, b_transposed) == Shape(5, 3, 7, a_transposed, b_transposed)
    torch.library.opcheck(product, (*stored, a_transposed, b_transposed))


def test_a_tuned_layer_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 24, bias=False).bfloat16()
    tuned = nn.Linear(16, 24, bias=False).bfloat16()
    tuned.load_state_dict(plain.state_dict())
    tuned.__class__ = TunedLinear
    x = torch.randn(2, 9, 16).bfloat16()
    grad = torch.randn(2, 9, 24).bfloat16()
    results = []
    for layer in (plain, tuned):
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.backward(grad)
        results.append((out, inputs.grad, layer.weight.grad))
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_other_types_than_bf16_compute_as_ever() -> None:
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(3, 8)
    expected = layer(x)
    layer.__class__ = TunedLinear
    assert torch.equal(layer(x), expected)


def test_the_library_takes_our_descriptions() -> None:
    """cuBLASLt is real here, and describes shapes without a GPU; only its advice needs one."""
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA library")
    _library()
    assert ctypes.sizeof(_Offer) == 96  # cublasLtMatmulHeuristicResult_t
    problem = Problem(Shape(32, 64, 16, True, False), torch.device("cuda", 0))
    assert all(one.value for one in (problem.operation, problem.a, problem.b, problem.out))
    if not torch.cuda.is_available():
        with pytest.raises(CublasError, match="status"):
            list(problem.algorithms())


@pytest.mark.train
def test_a_run_with_tuned_products_is_the_same_run(tmp_path: Path, corpus: Path) -> None:
    losses = {}
    for tuned in (False, True):
        run = tiny_run(corpus, train__steps=8, train__precision="bf16", train__tune_products=tuned)
        result = train(tmp_path / str(tuned), run)
        assert result.codes == [0], result.output
        losses[tuned] = list(result.losses.values())
    assert losses[True] == losses[False]
