"""Lean blocks with adapters compute what plain ones do, and keep and hold no more for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.campaign import campaign
from tests.trainer.test_lean import LORA, kept_for_backward, layout_of
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.spec import parse_run
from windlass.spec.training import LoraSection
from windlass.trainer.fast import lean_lora
from windlass.trainer.fast.attention import use_attention
from windlass.trainer.fast.lean import join_weights, use_lean_blocks
from windlass.trainer.fast.lean_lora import Beside, Joint, NormedBeside, SwigluBeside
from windlass.trainer.model.lora import LoraLinear, QuantizedLoraLinear, attach
from windlass.trainer.model.nf4 import NF4Weight
from windlass.trainer.model.structure import blocks

pytestmark = pytest.mark.torch_floor

RUN = resolve(parse_run({**LORA, "train": {"lean_blocks": True}}))


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """Each case compiles the same function otherwise, and torch gives up after eight."""
    torch._dynamo.reset()


TOKENS = torch.arange(32).reshape(2, 16) % 50


def adapted(*, rank: int = 4, four_bits: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A llama whose projections have adapters that are not zero."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.requires_grad_(False)
    lora = LoraSection(rank=rank, alpha=8)
    for block in blocks(model).values():
        for linear in [module for module in block.modules() if type(module) is torch.nn.Linear]:
            attach(linear, lora)
            torch.nn.init.normal_(linear.lora_a, std=0.1)
            torch.nn.init.normal_(linear.lora_b, std=0.1)
            if four_bits:
                linear.__class__ = QuantizedLoraLinear
                linear.nf4 = NF4Weight(linear.out_features, linear.in_features, dtype, device="cpu")
                linear.nf4.set(linear.weight)
                linear.register_parameter("weight", None)
    return model


def gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


KINDS = [(rank, four_bits) for rank in (4, 8) for four_bits in (False, True)]  # three of rank 4 are widened by zeros
COMPILED = [(4, True, True), (8, False, True), (4, False, True), (8, True, True)]


@pytest.mark.parametrize(
    ("rank", "four_bits", "compiled"),
    [*((*kind, False) for kind in KINDS), *campaign(COMPILED, always=2, marks=[pytest.mark.slow])],
)
def test_losses_and_gradients_are_those_of_plain_blocks(four_bits: bool, rank: int, compiled: bool) -> None:
    plain, lean = (adapted(rank=rank, four_bits=four_bits) for _ in range(2))
    use_attention(lean, layout_of(lean, RUN))
    names = [name for name, _ in lean.named_parameters()]
    assert layout_of(lean, RUN).lean
    use_lean_blocks(lean)
    join_weights(lean)
    assert [name for name, _ in lean.named_parameters()] == names
    if compiled:
        for block in blocks(lean).values():
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]
    for _ in range(2):  # the second time with adapters that have moved
        expected, theirs = gradients(plain)
        loss, ours = gradients(lean)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=name)
        for model in (plain, lean):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(parameter.grad, alpha=-0.5)


def test_in_bf16_it_is_as_near_to_fp64_as_the_plain_block() -> None:
    exact = gradients(adapted(dtype=torch.float64).double())[1]
    errors = []
    for lean in (False, True):
        model = adapted(dtype=torch.bfloat16)
        if lean:
            use_attention(model, layout_of(model, RUN))
            use_lean_blocks(model)
            join_weights(model)
        with torch.autocast("cpu", torch.bfloat16):
            ours = gradients(model)[1]
        errors.append(max(float((ours[name] - value).norm() / value.norm()) for name, value in exact.items()))
    assert errors[1] < 1.2 * errors[0] + 0.01, errors


def test_the_functions_gradients_in_fp64() -> None:
    torch.manual_seed(0)
    layers: list[Any] = [SimpleNamespace(in_features=4, lora_scale=0.7) for _ in range(2)]
    frozen = [torch.randn(outputs, 4, dtype=torch.float64) for outputs in (3, 2)]
    for layer, weight in zip(layers, frozen, strict=True):
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        layer.lora_a = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        layer.lora_b = torch.randn(weight.shape[0], 2, dtype=torch.float64, requires_grad=True)
    joint = Joint(*layers)
    joint.join()
    residual = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    scales = torch.randn(4, dtype=torch.float64)

    def ours(x: Tensor, kind: str) -> Tensor:
        joint.refresh()
        a_pi = joint.a(x)
        if kind == "normed":
            wide, handed_on = NormedBeside.apply(x, scales, 1e-5, a_pi)
            return joint.product(wide, a_pi).sum() + (handed_on**2).sum()
        wide = SwigluBeside.apply(x, a_pi) if kind == "swiglu" else Beside.apply(x, a_pi)
        return joint.product(wide, a_pi, residual).square().sum()

    def theirs(x: Tensor, kind: str) -> Tensor:
        inner = x
        if kind == "normed":
            inner = torch.nn.functional.rms_norm(x, (4,), scales, 1e-5)
        elif kind == "swiglu":
            inner = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
        parts = [inner @ one.T + 0.7 * inner @ layer.lora_a.T @ layer.lora_b.T for one, layer in zip(frozen, layers)]  # noqa: B905
        out = torch.cat(parts, dim=1)
        return out.sum() + (x**2).sum() if kind == "normed" else (out + residual).square().sum()

    variables = [one for layer in layers for one in (layer.lora_a, layer.lora_b)]
    for kind in ("plain", "swiglu", "normed"):
        x = torch.randn(5, 8 if kind == "swiglu" else 4, dtype=torch.float64, requires_grad=True)
        wanted = [x, *variables] + ([] if kind == "normed" else [residual])
        found = torch.autograd.grad(ours(x, kind), wanted)
        expected = torch.autograd.grad(theirs(x, kind), wanted)
        for one, other in zip(found, expected, strict=True):
            # an adapter's gradient goes through fp32, which is what its parameter is
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6, msg=kind)


def test_attention_gets_a_gradient_of_the_usual_layout() -> None:
    """Issue of the past: on GPUs cuDNN read one whose rows lie apart as if they did not."""
    attended, a = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    seen = []
    attended.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
    Beside.apply(attended, a).square().sum().backward()
    assert seen == [True]


def test_the_operators_are_what_they_say_to_the_compiler() -> None:
    x, a, weight = torch.randn(4, 8), torch.randn(8, 8), torch.randn(6, 16)
    torch.library.opcheck(lean_lora.beside, (x, a))
    torch.library.opcheck(lean_lora.norm_beside, (x, weight[0, :8], 1e-5, a))
    torch.library.opcheck(lean_lora.swiglu_beside, (torch.randn(4, 16), a))
    torch.library.opcheck(lean_lora.wide_backward, (torch.randn(4, 6), weight, a))
    held = NF4Weight(8, 8, torch.float32, device="cpu")
    held.set(torch.randn(8, 8))
    b = torch.randn(8, 8)
    torch.library.opcheck(lean_lora.nf4_wide, (torch.randn(4, 16), [held.packed], [held.scales], b, torch.randn(4, 8)))
    torch.library.opcheck(lean_lora.nf4_wide_backward, (torch.randn(4, 8), [held.packed], [held.scales], b, a))


def compiled_lean(*, four_bits: bool, lean: bool) -> Any:
    model = adapted(rank=8, four_bits=four_bits, dtype=torch.bfloat16)
    use_attention(model, layout_of(model, RUN))
    if lean:
        use_lean_blocks(model)
        join_weights(model)
    for block in blocks(model).values():  # the partitioner that inductor uses, without its code generation
        compiled = torch.compile(block.forward, fullgraph=True, backend="aot_eager_decomp_partition")
        block.forward = compiled  # type: ignore[method-assign]
    return model


def held(model: Any) -> int:
    """Bytes of frozen weights, in whatever form."""
    tensors = [*(parameter for parameter in model.parameters() if not parameter.requires_grad), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("lean", campaign([True, False], always=1))
def test_four_bits_hold_less_and_keep_no_more(lean: bool) -> None:
    """Issue of the past: both passes brought the same matrix back, and the compiler kept it from one to the other."""
    with torch.autocast("cpu", torch.bfloat16):
        whole, four = (compiled_lean(four_bits=four_bits, lean=lean) for four_bits in (False, True))
        kept = [kept_for_backward(model) for model in (whole, four)]
    projections = sum(
        module.in_features * module.out_features for module in whole.modules() if isinstance(module, LoraLinear)
    )
    saved = projections * (2 - 0.5 - 4 / 64)
    assert held(four) <= held(whole) - saved + 4096  # room for B beside bf16 weights, in lean blocks, is more
    beside = (
        2 * sum(module.out_features * 24 for module in four.modules() if isinstance(module, LoraLinear)) if lean else 0
    )
    more = kept[1] - kept[0]
    assert more <= beside, f"{more:,} bytes more are kept; B takes {beside:,}, the weights in bf16 {2 * projections:,}"


def test_what_adapters_cannot_be_lean_with() -> None:
    model = adapted()
    next(iter(blocks(model).values())).mlp.up_proj.lora_dropout = 0.1  # type: ignore[union-attr, assignment]
    with pytest.raises(UserError) as error:
        layout_of(model, RUN)
    assert "dropout" in str(error.value.evidence)
