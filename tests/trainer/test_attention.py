"""Attention by flash-attn-4: when it is taken, that it computes attention, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.plan.layout import Facts, Layout, has_window
from windlass.runfolder import RunFolder
from windlass.spec import Run, parse_run
from windlass.trainer.fast.attention import (
    attend,
    attend_within_documents,
    attention_kernels,
    flash4_bhtd,
    naming_attention,
    obstacle_to_flash4,
    use_attention,
)
from windlass.trainer.fast.kernels.flash4 import flash4, flash4_documents

pytestmark = pytest.mark.torch_floor


def asked(attention: str, precision: str = "bf16", *, document_mask: bool | None = None) -> Run:
    model, data = {"preset": "llama-tiny", "attention": attention}, {"document_mask": document_mask}
    return resolve(
        parse_run({"model": model, "train": {"precision": precision}, "data": {**data, "sequence_length": 1024}})
    )


class Model:
    """What use_attention needs of a transformers model."""

    implementation = "sdpa"

    def set_attn_implementation(self, name: str) -> None:
        self.implementation = name


def layout_without_gpu(run: Run, **config: Any) -> Layout:
    """Of a model with this configuration."""
    values = {"model_type": "llama", "head_dim": 64, "num_attention_heads": 4, **config}
    cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    obstacle = obstacle_to_flash4(None, cpu, asked_by_name=run.model.attention == "flash4", documents=False)
    return Layout.resolve(run, 1, 1, Facts.of(values, cuda=False, flash4_obstacle=obstacle))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_output_and_gradients_are_those_of_torchs_own_attention(heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, count, 33, 16, requires_grad=True) for count in (heads[0], heads[1], heads[1]))
    twins = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    grad = torch.randn(2, heads[0], 33, 16)

    out = flash4_bhtd(q, k, v, 0.2)
    out.backward(grad)
    expected = F.scaled_dot_product_attention(*twins, is_causal=True, scale=0.2, enable_gqa=True)
    expected.backward(grad)

    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip((q, k, v), twins, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("starts", [[0], [0, 1, 2, 30, 35, 64], [0, 33]])
def test_packed_documents_are_those_of_a_mask_in_fp64(starts: list[int]) -> None:
    """Two sequences of 33 tokens; documents of one token, and one that ends where a sequence does."""
    torch.manual_seed(0)
    starts = sorted({*starts, 33})  # no document goes on in the next sequence
    q, k, v = (torch.randn(2, count, 33, 16, dtype=torch.float64, requires_grad=True) for count in (4, 2, 2))
    grad = torch.randn(2, 4, 33, 16, dtype=torch.float64)
    number = torch.bucketize(torch.arange(66), torch.tensor(starts), right=True).view(2, 1, 33)
    mask = (number.transpose(1, 2) == number) & torch.ones(33, 33, dtype=torch.bool).tril()

    def computed(out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]

    ours = computed(flash4_bhtd(q, k, v, 0.2, torch.tensor([*starts, 66], dtype=torch.int32)))
    theirs = computed(F.scaled_dot_product_attention(q, k, v, mask[:, None], scale=0.2, enable_gqa=True))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # log-sums are fp32 in between


@pytest.mark.slow
def test_the_operators_keep_torchs_rules_for_operators() -> None:
    q, k, v = (torch.randn(1, 8, count, 16, requires_grad=True) for count in (4, 2, 2))
    torch.library.opcheck(flash4, (q, k, v, 0.25))
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    torch.library.opcheck(flash4_documents, (q[0], k[0], v[0], bounds, 8, 0.25))


def test_attention_that_is_not_told_of_documents_does_not_pass_for_attention_within_them() -> None:
    q, k, v = (torch.randn(1, count, 8, 16) for count in (4, 2, 2))
    with pytest.raises(RuntimeError, match="one document would see another"):
        attend_within_documents(None, q, k, v, None)


def test_no_mask_and_no_dropout_is_passed_over() -> None:
    q, k, v = (torch.randn(1, count, 8, 16).bfloat16() for count in (4, 2, 2))
    with pytest.raises(RuntimeError, match="no mask"):
        attend(torch.nn.Module(), q, k, v, torch.ones(1, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="no dropout"):
        attend(torch.nn.Module(), q, k, v, None, dropout=0.1)


def test_under_autocast_it_casts_as_torchs_own_does() -> None:
    """Rotated queries and keys are fp32 there: DDP and LoRA runs would otherwise never have it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, count, 8, 16) for count in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attend(torch.nn.Module(), q, k, v.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.float(), expected.transpose(1, 2), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("attention", "config", "document_mask", "name"),
    [
        ("auto", {}, None, "windlass_sdpa_causal"),
        ("sdpa", {}, False, "windlass_sdpa_causal"),
        ("flash4", {}, None, "windlass_fa4_causal"),
        ("flash4", {}, True, "windlass_fa4_documents"),
        ("sdpa", {}, True, "windlass_sdpa_masked"),
        ("auto", {"sliding_window": 512}, None, "windlass_sdpa_masked"),
        ("auto", {"model_type": "gpt2"}, None, "sdpa"),  # left as transformers has it
        ("eager", {}, None, "sdpa"),
    ],
)
def test_what_is_taken_without_a_gpu(
    attention: str, config: dict[str, Any], document_mask: bool | None, name: str
) -> None:
    model = Model()
    use_attention(model, layout_without_gpu(asked(attention, document_mask=document_mask), **config))
    assert model.implementation == name


@pytest.mark.parametrize(("window", "expected"), [(None, False), (4096, False), (1024, False), (1023, True)])
def test_a_window_matters_where_it_is_shorter_than_the_sequences(window: int | None, expected: bool) -> None:
    assert has_window(asked("auto"), Facts.of({"sliding_window": window})) is expected


def test_plain_causal_batches_are_not_looked_into() -> None:
    """What transformers does with a batch's positions would make the host wait for the GPU in every step."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9
    )
    looked = []
    for attention, document_mask in (("sdpa", False), ("sdpa", True)):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        use_attention(model, layout_without_gpu(asked(attention, document_mask=document_mask)))
        with pytest.MonkeyPatch.context() as patch:
            seen: list[int] = []
            real = transformers.masking_utils.find_packed_sequence_indices

            def noted(positions: Any, real: Any = real, seen: list[int] = seen) -> Any:
                seen.append(1)
                return real(positions)

            patch.setattr(transformers.masking_utils, "find_packed_sequence_indices", noted)
            model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
        looked.append(bool(seen))
    assert looked == [False, True]


@pytest.mark.parametrize(
    ("config", "run", "reason"),
    [
        ({}, asked("flash4", "fp32"), "train.precision is fp32"),
        ({"model_type": "gpt2"}, asked("flash4"), "gpt2 models"),
        ({"sliding_window": 512}, asked("flash4"), "512 tokens back"),
        ({"attention_dropout": 0.1}, asked("flash4"), "attention_dropout is 0.1"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(config: dict[str, Any], run: Run, reason: str) -> None:
    with pytest.raises(UserError) as error:
        layout_without_gpu(run, **config)
    assert reason in str(error.value.evidence)
    assert error.value.fix == "model.attention=auto"


def test_kernels_are_told_by_their_names_on_the_device() -> None:
    found = attention_kernels(
        [
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__0",
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
            "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN",
            "_adamw_kernel",
        ]
    )
    assert list(found) == ["cuDNN", "torch's memory-efficient", "flash-attn-4", "torch's flash"]
    assert all(len(names) == 1 for names in found.values())


@pytest.mark.train
@pytest.mark.parametrize("bf16_weights", campaign([True, False], always=1))  # or fp32 weights under autocast
def test_training_with_it_follows_training_with_torchs_own(tmp_path: Path, corpus: Path, bf16_weights: bool) -> None:
    losses = {}
    for attention in ("sdpa", "flash4"):
        changes = {"train__precision": "bf16", "train__bf16_weights": bf16_weights, "model__attention": attention}
        run = tiny_run(corpus, train__steps=12, **changes)
        result = train(tmp_path / attention, run)
        assert result.codes == [0], result.output
        losses[attention] = list(result.losses.values())
    assert losses["flash4"] != losses["sdpa"]  # rounded otherwise, so it did compute
    assert max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True)) < 0.01


COMPILED_FOR_HOPPER = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from windlass.trainer.fast.kernels.flash4 import flash4, flash4_backward
with FakeTensorMode():
    for size in (SIZE,):
        q, k, v, grad = (torch.empty(2, 1024, n, size, dtype=torch.bfloat16, device="cuda") for n in (32, 8, 8, 32))
        out, log_sum = flash4._init_fn(q, k, v, 0.125)
        print(size, tuple(out.shape), tuple(log_sum.shape), log_sum.dtype)
        grads = flash4_backward._init_fn(grad, q, k, v, out, log_sum, 0.125)
        print([tuple(one.shape) for one in grads])
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", campaign([128, 64], always=1))
def test_the_packages_kernels_compile_for_hopper_as_we_call_them(size: int, tmp_path: Path) -> None:
    """Without a GPU the package compiles and does not launch: what a changed version of it breaks shows here."""
    pytest.importorskip("nvidia_cutlass_dsl", reason="the flash extra is not installed")
    target = {"FLASH_ATTENTION_ARCH": "sm_90a", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED_FOR_HOPPER.replace("SIZE", str(size))],
        env={**os.environ, **target, "WINDLASS_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        f"{size} (2, 1024, 32, {size}) (2, 32, 1024) torch.float32",
        f"[(2, 1024, 32, {size}), (2, 1024, 8, {size}), (2, 1024, 8, {size})]",
    ]
    compiled = list((tmp_path / "flash-attn-4").rglob("*.o"))
    assert len(compiled) >= 2  # kept for the next start


class LockedProfiler:
    """A profiler that cannot start."""

    def __init__(self, **_options: Any) -> None:
        pass

    def start(self) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


def test_training_goes_on_where_the_gpu_cannot_be_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.profiler, "profile", LockedProfiler)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), is_first=True)
    steps = 0
    with naming_attention(RunFolder(tmp_path), gpu):
        steps += 1
    assert steps == 1
    assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in caplog.text
