"""`windlass plan` as a user types it."""

import json

import pytest

from windlass.cli.main import run_command

FILE = """
model: {preset: llama3.2-1b}
data: {sequence_length: 8192}
train: {global_batch: 64, steps: 1000}
"""


@pytest.fixture
def plan(tmp_path, capfd):
    path = tmp_path / "my.yaml"
    path.write_text(FILE)

    def call(*arguments):
        code = run_command(["plan", str(path), *arguments])
        out, err = capfd.readouterr()
        return int(code), out, err

    return call


def test_json(plan):
    code, out, _ = plan("--instance", "p5en.48xlarge", "--nodes", "2", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["ranks"] == 16
    assert answer["hardware"] == {"gpu": "H200", "instance": "p5en.48xlarge", "nodes": 2, "gpus_per_node": 8}
    assert answer["micro_batch"] * answer["micro_batches"] == 4
    assert answer["memory"]["peak_gib"] == pytest.approx(sum(answer["memory"]["items_gib"].values()))
    assert answer["memory"]["peak_gib"] < answer["memory"]["gpu_gib"]
    assert answer["speed"]["step_s"] == pytest.approx(sum(answer["speed"]["parts_s"].values()))
    assert answer["usd"] == pytest.approx(2 * 63.296 * answer["hours"])
    assert answer["price_region"] == "us-east-1"
    assert answer["assumptions"]
    assert answer["resolved"]["resources"]["instance"] == "p5en.48xlarge"


def test_text(plan):
    code, out, _ = plan("--gpu", "h200", "train.steps=10")
    assert code == 0
    for word in ("memory", "of 139.8 GiB per GPU", "tokens/s", "MFU", "cost", "unknown", "assumes: no failures"):
        assert word in out


def test_a_gpu_alone_is_one_on_each_node_and_that_is_said(plan):
    code, _, err = plan("--gpu", "H200", "--nodes", "4")
    assert code == 0
    assert "4 GPUs, 1 on each of 4 nodes" in err
    assert "GPUs, 1 on each" not in plan("--gpu", "H200", "--nodes", "4", "gpus_per_node=8")[2]


def test_what_does_not_fit_says_what_does(plan):
    code, out, err = plan("--gpu", "H200", "micro_batch=32")
    assert code == 2
    assert out == ""
    assert "139.8 GiB" in err
    assert "fix       train.micro_batch=8" in err
    assert plan("--gpu", "H200", "micro_batch=8")[0] == 0
    code, out, _ = plan("--gpu", "H200", "micro_batch=32", "--json")
    assert code == 2
    assert json.loads(out)["fix"].startswith("train.micro_batch=8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--instance", "p5.48xlarg"], "resources.instance=p5.48xlarge"),
        (["--gpu", "H300"], "--gpu"),
        (["--gpu", "H200", "--instance", "p5.48xlarge"], "not both"),
        (["--instance", "p5.4xlarge", "gpus_per_node=8"], "resources.gpus_per_node=1"),
        (["--gpu", "H200", "gpus_per_node=0"], "CPUs"),
        (["--instance", "p5.48xlarge", "--nodes", "9"], "train.global_batch=72"),
    ],
)
def test_what_cannot_work(plan, arguments, words):
    code, _, err = plan(*arguments)
    assert code == 2
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["gpus_per_node=0"],
        ["--instance", "p5.48xlarge"],
        ["--instance", "p5.48xlarge", "--nodes", "16"],
        ["--instance", "p5.48xlarge", "--nodes", "16", "train.global_batch=8"],
    ],
    ids=str,
)
def test_the_fix_of_the_first_refusal_is_a_plan(plan, arguments):
    """Of a model that needs many nodes, on CPUs too, and where too few sequences are refused as well."""
    model = ["model.preset=llama3.1-405b", "data.source=corpus:austen", *arguments]
    code, out, _ = plan(*model, "--json")
    assert code == 2
    fix = json.loads(out)["fix"].partition("    ")[0].split()
    code, out, err = plan(*model, *fix, "--json")
    assert code == 0, err
    assert json.loads(out)["ranks"] == 128


def test_without_a_gpu_the_rest_is_still_said(plan):
    code, out, _ = plan("gpus_per_node=0", "processes_per_node=2")
    assert code == 0
    assert "not estimated" in out
    code, out, _ = plan("gpus_per_node=0", "--json")
    assert json.loads(out)["unknown"]


def test_a_model_whose_layout_is_not_known(plan):
    code, out, _ = plan("model={path: someone/model}", "--gpu", "H200", "--json")
    assert code == 0
    assert "not known before" in json.loads(out)["unknown"]


def test_a_model_too_small_for_a_gpu_gets_no_promise(plan):
    code, out, _ = plan("model.preset=llama-tiny", "data.source=corpus:austen", "sequence_length=64", "--gpu", "H200")
    assert code == 0
    assert "bound by the host" in out
    assert "tokens/s" not in out
    assert " 0.0 " not in out
