"""Lean blocks compute what transformers' own do, from the same parameters under the same names."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.plan.layout import Layout
from windlass.spec import Run, parse_run
from windlass.trainer.fast import fp8, lean_parts
from windlass.trainer.fast.attention import use_attention
from windlass.trainer.fast.kernels.cublas import CublasError, Product, _library, _Offer, check_equal, product_plus
from windlass.trainer.fast.lean import join_weights, use_lean_blocks
from windlass.trainer.fast.lean_parts import (
    AddedProduct,
    GatheredProduct,
    JoinedProduct,
    Normed,
    Rotated,
    Swiglu,
    gathered_product,
    gathered_product_backward,
    norm,
    norm_backward,
    rotate_backward,
    swiglu_backward,
)
from windlass.trainer.model.structure import blocks
from windlass.trainer.preparation import model_facts

pytestmark = pytest.mark.torch_floor


def asked(
    *,
    lean: bool | None = True,
    fp8: bool = False,
    attention: str = "sdpa",
    masked: bool = False,
    bf16_weights: bool | None = None,
    sharding: str = "none",
) -> Run:
    return resolve(
        parse_run(
            {
                "model": {"preset": "llama-tiny", "attention": attention},
                "train": {"lean_blocks": lean, "fp8": fp8, "bf16_weights": bf16_weights},
                "data": {"document_mask": masked, "sequence_length": 16},
                "parallel": {"sharding": sharding},
            }
        )
    )


def layout_of(model: Any, run: Run, *, cuda: bool = False) -> Layout:
    known = replace(model_facts(run, model, model.config, cuda=cuda), flash4_obstacle="not here")
    return Layout.resolve(run, 1, 2, known)


def small_model(family: str = "llama", **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(family, **shape | heads | changes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def loss_and_gradients(model: Any, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.arange(32).reshape(2, 16) % 50
    loss = model(input_ids=tokens, labels=tokens, use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


KINDS = [("llama", True), ("mistral", False), ("llama", False), ("mistral", True)]


@pytest.mark.parametrize(
    ("family", "masked", "compiled"),
    [
        *((*kind, False) for kind in KINDS),
        *campaign([(*kind, True) for kind in KINDS], always=2, marks=[pytest.mark.slow]),
    ],
)
def test_losses_and_gradients_are_those_of_transformers_block(family: str, masked: bool, compiled: bool) -> None:
    inputs = {"position_ids": torch.arange(8).repeat(2)[None].expand(2, 16)} if masked else {}
    plain, lean = small_model(family), small_model(family)
    layout = layout_of(lean, asked(masked=masked))
    assert layout.lean
    use_attention(lean, layout)
    use_lean_blocks(lean)
    join_weights(lean)
    if compiled:
        for block in blocks(lean).values():
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]
    expected, theirs = loss_and_gradients(plain, **inputs)
    loss, ours = loss_and_gradients(lean, **inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert list(ours) == list(theirs)  # names do not change
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_fp8_in_lean_blocks_is_as_near_as_in_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined layers share a scale; they are one product where their outputs together are wide enough."""
    monkeypatch.setattr(fp8, "SMALLEST", 64)
    exact, plain, lean = (small_model() for _ in range(3))
    layouts = [replace(layout_of(lean, asked(fp8=True)), lean=is_lean, precision="bf16") for is_lean in (False, True)]
    # keys and values, 32 wide, are in fp8 beside their queries alone
    assert [
        fp8.use_fp8(model, value, torch.device("cpu")) for model, value in zip((plain, lean), layouts, strict=True)
    ] == [10, 14]
    use_lean_blocks(lean)
    join_weights(lean)
    (expected, true), (_, apart), (loss, joined) = map(loss_and_gradients, (exact, plain, lean))
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    for name, gradient in true.items():
        errors = [float((found[name] - gradient).norm() / gradient.norm()) for found in (joined, apart)]
        assert errors[0] < 1.3 * errors[1] + 0.02, (name, errors)


def kept_for_backward(model: Any) -> int:
    """Bytes that one forward pass keeps alive, parameters and buffers aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(512).reshape(2, 256) % 50
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss  # held: its graph keeps what it saved
    assert loss.requires_grad
    return sum(kept.values())


def test_no_more_is_kept_for_the_backward_pass() -> None:
    """A value that is a view of its joined product would keep queries and keys alive with it."""
    plain, lean = small_model(), small_model()
    for model in (plain, lean):
        use_attention(model, layout_of(model, asked()))
    use_lean_blocks(lean)
    join_weights(lean)
    assert kept_for_backward(lean) <= kept_for_backward(plain)


def test_joined_weights_are_the_parameters_themselves() -> None:
    model = small_model()
    use_lean_blocks(model)
    join_weights(model)
    block: Any = next(iter(blocks(model).values()))
    with torch.no_grad():
        block.mlp.up_proj.weight.fill_(7.0)
        block.self_attn.k_proj.weight.fill_(5.0)
    assert (block.joined_gate_up[96:] == 7.0).all()
    assert (block.joined_gate_up[:96] != 7.0).all()
    assert (block.joined_qkv[64:96] == 5.0).all()
    assert "joined" not in " ".join(model.state_dict())


LORA = {"model": {"preset": "llama-tiny", "init": "pretrained", "lora": {"rank": 4, "alpha": 8}}, "data": {}}


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (("qwen3", {}), {}, "qwen3 blocks"),
        (("llama", {}), {"bf16_weights": False}, "train.bf16_weights is off"),
        (("llama", {}), {"sharding": "ddp"}, "sharding is ddp"),
        (("llama", {}), {"attention": "eager"}, "model.attention is eager"),
        (("llama", {"mlp_bias": True}), {}, "biases"),
        (("llama", {}), LORA, "leaves out some"),
        (("llama", {}), {**LORA, "parallel": {"sharding": "full"}}, "sharded"),
        (("llama", {"hidden_act": "gelu"}), {}, "the activation is gelu"),
    ],
)
def test_what_cannot_be_lean_is_refused_by_name_and_left_alone_by_default(
    model: tuple[str, dict[str, Any]], options: dict[str, Any], reason: str
) -> None:
    def run_of(lean: bool | None) -> Run:
        return (
            resolve(parse_run({**options, "train": {"lean_blocks": lean}}))
            if "model" in options
            else asked(lean=lean, **options)
        )

    built = small_model(model[0], **model[1])
    with pytest.raises(UserError) as error:
        layout_of(built, run_of(True))
    assert reason in str(error.value.evidence)
    assert not layout_of(built, run_of(None), cuda=True).lean


def test_the_functions_gradients_in_fp64() -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    first, second = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    square = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    joined = torch.cat([first, second]).detach()
    # The parts are given apart from what is computed with, so their numeric gradients have to move both.
    out = JoinedProduct.apply(x, joined, first, second)
    grads = torch.autograd.grad(out.square().sum(), (x, first, second))
    expected = torch.autograd.grad((x @ torch.cat([first, second]).T).square().sum(), (x, first, second))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(GatheredProduct.apply, (x, first, second))  # narrow: one product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean_parts, "NARROW", 0)
        assert torch.autograd.gradcheck(GatheredProduct.apply, (x, first, second))  # wide: one each
    assert torch.autograd.gradcheck(AddedProduct.apply, (x, square, residual))
    assert torch.autograd.gradcheck(lambda *both: sum(Normed.apply(*both, 1e-5)), (x, square[0]))
    assert torch.autograd.gradcheck(Swiglu.apply, (x,))
    heads = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)  # two of queries, one each of keys, values
    angles = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda joined: Rotated.apply(joined, 1, *angles), (heads,))


def test_the_operators_are_what_they_say_to_the_compiler() -> None:
    x, added, square = (torch.randn(4, 4) for _ in range(3))
    q, k, v = (torch.randn(1, 2, heads, 6) for heads in (2, 1, 1))
    angles = torch.randn(2, 1, 2, 6)
    torch.library.opcheck(product_plus, (x, square, added))
    torch.library.opcheck(gathered_product, (x, [square, added[:2]]))
    torch.library.opcheck(gathered_product_backward, (torch.randn(4, 6), x, [square, added[:2]]))
    torch.library.opcheck(norm, (x, square[0], 1e-5))
    torch.library.opcheck(norm_backward, (x, added, x, square[0], 1e-5))
    torch.library.opcheck(swiglu_backward, (x, torch.randn(4, 8)))
    torch.library.opcheck(rotate_backward, (q, k, v, *angles))


def test_the_library_takes_our_descriptions() -> None:
    """cuBLASLt is real here, and describes products without a GPU; only its advice needs one."""
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA library")
    _library()
    assert ctypes.sizeof(_Offer) == 96  # cublasLtMatmulHeuristicResult_t
    product = Product(32, 64, 16)
    assert all(one.value for one in (product._operation, product._weight, product._a, product._out))
    if not torch.cuda.is_available():
        with pytest.raises(CublasError, match="status"):
            product.advised(torch.device("cuda", 0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0])
def test_a_product_that_computes_something_else_is_found(value: float) -> None:
    right = torch.ones(4, 4)
    check_equal(right * 1.001, right)
    with pytest.raises(CublasError, match="differs"):
        check_equal(torch.full((4, 4), value), right)


@pytest.mark.train
def test_training_with_lean_blocks_follows_training_without_and_resumes(tmp_path: Path, corpus: Path) -> None:
    changes = {"train__steps": 12, "train__precision": "bf16", "train__global_batch": 4, "train__micro_batch": 2}
    plain = train(tmp_path / "plain", tiny_run(corpus, **changes, train__lean_blocks=False))
    lean = train(tmp_path / "lean", tiny_run(corpus, **changes, train__lean_blocks=True, checkpoint__every=5))
    assert plain.codes == lean.codes == [0], plain.output + lean.output
    assert lean.losses != plain.losses  # rounded otherwise, so they did compute
    assert max(abs(a - b) / b for a, b in zip(lean.losses.values(), plain.losses.values(), strict=True)) < 0.01
    # What they leave behind is what any run leaves behind: weights under their own names.
    broken = tiny_run(corpus, **changes, train__lean_blocks=True, checkpoint__every=5)
    killed = train(tmp_path / "again", broken, faults="kill:step=8,point=step.end")
    assert killed.codes != [0]
    resumed = train(tmp_path / "again", broken)
    assert resumed.codes == [0], resumed.output
    assert list(resumed.losses.values())[-1] == list(lean.losses.values())[-1]
