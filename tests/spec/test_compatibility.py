"""Which settings may change when a run goes on."""

import pytest

from windlass.errors import UserError
from windlass.plan import resolve
from windlass.spec import parse_run
from windlass.spec.compatibility import adopt, differences, must_match, steering


@pytest.fixture
def make_run():
    def make(**sections):
        values = {"name": "r", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}}
        values["train"] = {"steps": 20, **sections.pop("train", {})}
        return parse_run({**values, **sections})

    return make


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"steps": 40, "log_every": 1, "micro_batch": 2, "tensorboard": True}},
        {"checkpoint": {"every": 1, "export": True}},
        {"resources": {"processes_per_node": 1}},
        {"parallel": {"sharding": "ddp"}},
        {"target": {"max_restarts": 0, "port": 29500}},
    ],
)
def test_free_to_change(make_run, change):
    earlier = resolve(make_run())
    assert differences(earlier, resolve(adopt(make_run(**change), earlier))) == {}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train": {"seed": 3}}, "train.seed"),
        ({"train": {"precision": "fp32"}}, "train.precision"),
        ({"data": {"source": "corpus:austen", "sequence_length": 8}}, "data.sequence_length"),
        ({"model": {"preset": "llama-tiny", "config": {"hidden_size": 8}}}, "model.config.hidden_size"),
    ],
)
def test_not_free_to_change(make_run, change, key):
    earlier = resolve(make_run())
    asked = resolve(adopt(make_run(**change), earlier))
    assert key in differences(earlier, asked)
    with pytest.raises(UserError) as error:
        must_match(earlier, asked, folder="runs/r")
    assert key in error.value.evidence
    assert "name=OTHER" in error.value.fix
    assert "--fresh" in error.value.fix


def test_defaults_of_the_first_start_hold_when_the_run_grows(make_run):
    earlier = resolve(make_run(train={"steps": 100}))
    assert earlier.train.warmup_steps == 2
    grown = resolve(adopt(make_run(train={"steps": 1000}), earlier))
    assert (grown.train.warmup_steps, grown.train.steps) == (2, 1000)


def test_a_run_that_gets_shorter_than_its_warm_up_warms_up_anew(make_run):
    """Nobody asked for 40 steps of warm-up: a default must not make a valid run file fail."""
    earlier = resolve(make_run(train={"steps": 2000}))
    shorter = resolve(adopt(make_run(train={"steps": 39}), earlier))
    assert steering(earlier, shorter) == {"train.steps": (2000, 39), "train.warmup_steps": (40, 0)}
    assert resolve(adopt(make_run(train={"steps": 40}), earlier)).train.warmup_steps == 40  # the peak is reached


def test_a_run_may_be_steered_and_each_change_is_known(make_run):
    earlier = resolve(make_run(train={"learning_rate": 1e-3}))
    lower = resolve(adopt(make_run(train={"learning_rate": 1e-5, "grad_clip": 0.5}), earlier))
    assert differences(earlier, lower) == {}
    assert steering(earlier, lower) == {
        "train.grad_clip": (1.0, 0.5),
        "train.learning_rate": (1e-3, 1e-5),
        "train.min_learning_rate": (1e-4, pytest.approx(1e-6)),  # a tenth of the new peak, not above it
    }
    assert steering(earlier, resolve(adopt(make_run(train={"learning_rate": 1e-3}), earlier))) == {}
