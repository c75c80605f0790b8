"""The micro-batch that is chosen, and changes that make a run fit."""

import pytest

from tests.plan.runs import a_run
from windlass.catalog.gpus import gpu
from windlass.catalog.models import known_config
from windlass.errors import UserError
from windlass.plan import check, resolve
from windlass.plan.fitting import apply, batch_shape, choose_micro_batch, comfortable_bytes, find_change
from windlass.plan.forecast import forecast
from windlass.plan.layout import Layout
from windlass.plan.memory import estimate_memory
from windlass.plan.shape import ModelShape
from windlass.plan.speed import Hardware


def peak(run, ranks, micro):
    shape = ModelShape.of(known_config(run.model))
    return estimate_memory(shape, Layout.planned(run, ranks, micro, shape)).peak_bytes


@pytest.mark.parametrize("name", ["A100-80GB", "H100", "H200", "B200"])
@pytest.mark.parametrize("batch", [7, 24, 64])
def test_the_largest_micro_batch_that_fits(name, batch):
    run, card = a_run(global_batch=batch), gpu(name)
    micro = choose_micro_batch(run, 1, card)
    assert batch % micro == 0
    assert peak(run, 1, micro) <= comfortable_bytes(card)
    larger = [one for one in range(micro + 1, batch + 1) if batch % one == 0]
    assert all(peak(run, 1, one) > comfortable_bytes(card) for one in larger)


def test_batch_shape_asks_only_where_the_gpu_is_known():
    run = a_run(global_batch=64)
    assert batch_shape(run, 1) == (8, 8)
    assert batch_shape(run, 4) == (8, 2)
    chosen = choose_micro_batch(run, 1, gpu("B300"))
    assert chosen > 8
    assert batch_shape(run, 1, gpu("B300")) == (chosen, 64 // chosen)
    assert batch_shape(a_run(global_batch=64, micro_batch=3), 1, gpu("B300")) == (3, 22)
    assert batch_shape(a_run(global_batch=3), 1) == (3, 1)
    assert choose_micro_batch(a_run(preset="llama3.1-70b"), 1, gpu("T4")) == 1


DOES_NOT_FIT = [
    (a_run(global_batch=64, micro_batch=32), Hardware(gpu("H200"), 1, 1), "train.micro_batch=8"),
    (a_run(global_batch=8), Hardware(gpu("A10G"), 1, 1), "resources.gpus_per_node"),
    (
        a_run("data.sequence_length=32768", preset="llama3.1-8b", global_batch=64),
        Hardware(gpu("H100"), 8, 1),
        "activation_checkpointing",
    ),
    (a_run(preset="llama3.1-8b", global_batch=64), Hardware(gpu("H200"), 1, 1), "gpus_per_node"),
    (a_run("parallel.sharding=ddp", preset="llama3.1-8b", global_batch=64), Hardware(gpu("H200"), 8, 1), "sharding"),
    (a_run(preset="llama3.1-70b", global_batch=512), Hardware(gpu("H200"), 8, 1), "resources.nodes"),
]


@pytest.mark.parametrize(("run", "hardware", "word"), DOES_NOT_FIT, ids=lambda value: str(getattr(value, "ranks", "")))
def test_the_proposed_change_fits(run, hardware, word):
    with pytest.raises(UserError) as raised:
        forecast(run, hardware)
    error = raised.value
    assert error.exit_code == 2
    assert f"{hardware.gpu.memory_gib:.1f} GiB" in error.what
    assert word in error.fix
    change = find_change(run, hardware, ModelShape.of(known_config(run.model)))
    assert error.fix.startswith(str(change))
    changed = resolve(apply(run, change.overrides))
    after = Hardware(hardware.gpu, changed.resources.gpus_per_node or hardware.gpus_per_node, changed.resources.nodes)
    assert after.ranks == change.hardware.ranks
    check(changed, after.ranks)
    fitting = forecast(changed, after)
    assert fitting.memory.peak_gib == pytest.approx(change.peak_gib)
    assert fitting.memory.peak_bytes <= comfortable_bytes(hardware.gpu)


def test_nothing_that_fits_is_said_as_such():
    with pytest.raises(UserError) as raised:
        forecast(a_run("train.precision=fp32", preset="llama3.1-405b", global_batch=1), Hardware(gpu("T4"), 1, 1))
    assert raised.value.fix is None
    assert "was tried" in raised.value.cause


def test_a_gpu_without_bf16_is_refused():
    with pytest.raises(UserError, match="no bf16") as raised:
        forecast(a_run(), Hardware(gpu("T4"), 1, 1))
    assert "train.precision=fp32" in raised.value.fix
    assert forecast(a_run("train.precision=fp32", preset="llama-tiny"), Hardware(gpu("T4"), 1, 1))


def test_nearly_full_is_a_warning():
    run = a_run("data.sequence_length=6144", global_batch=64, micro_batch=2)
    warned = forecast(run, Hardware(gpu("A10G"), 4, 1))
    assert any("may not fit" in one for one in warned.warnings)
