"""Hours, dollars and the catalogue they come from."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.plan.runs import a_run
from windlass.catalog.gpus import gpu, gpu_of_device, gpus
from windlass.catalog.instances import instance, instances
from windlass.errors import UserError
from windlass.plan.cost import num_saves, num_validations
from windlass.plan.forecast import forecast
from windlass.plan.speed import Hardware

ROOT = Path(__file__).parents[2]
TABLE = """\
instance_type,gpu,gpu_count,nvlink,arch,vcpu,ram_gib,efa_interfaces,network_gbps,local_nvme_gb,usd_per_hour_on_demand,\
price_region,price_date,lowest_spot_usd_per_hour,lowest_spot_region,note
x1.large,A100,8,yes,amd64,96,1152,4,400.0,8000,21.9,us-east-1,2026-08-22,7.5,us-west-2,
x2.large,GB200 (B200),4,yes,arm64,144,960,16?,1600?,,,,,,,UNCERTAIN
"""


def on(kind, nodes=1):
    found = instance(kind)
    return Hardware(found.gpu, found.gpus, nodes, found)


def test_price_is_nodes_times_hours_times_price():
    run = a_run("resources.nodes=2", global_batch=64, steps=1000)
    expected = forecast(run, on("p5.48xlarge", 2))
    hours = (1000 * expected.speed.step_s + expected.cost.checkpoint_s) / 3600
    assert expected.cost.seconds / 3600 == pytest.approx(hours)
    assert expected.cost.usd == pytest.approx(2 * 55.04 * hours)
    assert expected.cost.spot_usd == pytest.approx(2 * 15.8082 * hours)
    assert any("us-east-1, 2026-08-22" in one for one in expected.assumptions)


def test_a_missing_price_is_not_zero():
    expected = forecast(a_run(global_batch=64), on("p5e.48xlarge"))
    assert expected.cost.usd is None
    assert expected.as_dict()["usd"] is None
    assert any("no on-demand price" in one for one in expected.assumptions)
    assert forecast(a_run(), Hardware(gpu("H200"), 1, 1)).cost.usd is None


def test_saves_and_validations_are_counted():
    run = a_run("checkpoint.every=300", "data.holdout=0.1", steps=1000, validate_every=250)
    assert num_saves(run) == 4
    assert num_saves(a_run("checkpoint.every=500", "checkpoint.at_end=false", steps=1000)) == 1
    assert num_validations(run) == 4
    assert num_validations(a_run("data.holdout=0.1")) == 1
    assert num_validations(a_run(validate_every=5)) == 0
    waits = forecast(a_run("checkpoint.background=false"), Hardware(gpu("H200"), 1, 1)).cost
    assert waits.checkpoint_s > forecast(a_run(), Hardware(gpu("H200"), 1, 1)).cost.checkpoint_s > 0


def test_offload_is_checked_against_the_nodes_memory():
    run = a_run("parallel.cpu_offload=true", "resources.gpus_per_node=1", preset="llama3.1-8b", global_batch=8)
    small = instance("p5.4xlarge")
    assert forecast(run, Hardware(small.gpu, 1, 1, small)).memory.host_bytes
    smaller = instance("g6e.xlarge")
    with pytest.raises(UserError, match="offloaded state does not fit"):
        forecast(
            run.model_copy(update={"data": run.data.model_copy(update={"sequence_length": 512})}),
            Hardware(smaller.gpu, 1, 1, smaller),
        )


def test_an_unknown_instance_names_the_nearest():
    with pytest.raises(UserError) as raised:
        instance("p5.48xlarg")
    assert raised.value.fix == "resources.instance=p5.48xlarge    or --instance p5.48xlarge"
    assert instance("ml.p5.48xlarge") is instance("p5.48xlarge")
    with pytest.raises(UserError, match="no GPU instance type"):
        instance("m5.large")


def test_every_instance_has_a_known_gpu_and_no_price_is_zero():
    assert len(instances()) >= 54
    for one in instances().values():
        assert one.gpu.name in gpus()
        for price in (one.on_demand, one.spot):
            assert price is None or price.usd_per_hour > 0
    assert instance("p6e-gb200.36xlarge").uncertain


def test_the_catalogue_is_what_its_tool_makes(tmp_path):
    spec = importlib.util.spec_from_file_location("make_instances", ROOT / "tools" / "make_instances.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    (tmp_path / "table.csv").write_text(TABLE)
    first, second = json.loads(tool.table(tmp_path / "table.csv"))
    assert first["gpu"] == "A100-40GB"
    assert first["on_demand"] == {"usd_per_hour": 21.9, "region": "us-east-1", "date": "2026-08-22"}
    assert (second["on_demand"], second["spot"], second["nvme_gb"]) == (None, None, None)
    assert second["uncertain"] == ["efa", "network_gbps"]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("Tesla T4", "T4"),
    ],
)
def test_gpus_by_the_name_cuda_reports(device, name):
    assert gpu_of_device(device) is gpu(name)


def test_gpus_that_are_not_there():
    assert gpu_of_device("NVIDIA GeForce RTX 3090") is None
    assert gpu("rtx pro 6000") is gpu("RTX PRO 6000")
    with pytest.raises(UserError) as raised:
        gpu("A100")
    assert raised.value.fix == "--gpu A100-40GB or --gpu A100-80GB"
