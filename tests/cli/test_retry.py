"""`windlass run` answers a failure: by an edit of the run, by another job, or not at all."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml

import windlass as windlass_api
from tests.commands import run_forked
from tests.trainer.harness import train
from windlass.cli.runs.retry import overrides_of_decisions, wait_before
from windlass.common.files import read_json_lines
from windlass.diagnose.decision import verdict_of
from windlass.diagnose.facts import Facts
from windlass.diagnose.remedies import amount, may_edit, remedy_for
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import load_run, parse_run
from windlass.targets.launch.torchrun import Place
from windlass.targets.local.client import LocalTarget
from windlass.targets.protocol import Detached


def run_with(**sections):
    values = {"name": "r", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}, **sections}
    return parse_run(values)


def on_kubernetes(**options):
    return run_with(target={"kind": "kubernetes", "kubernetes": options})


EFA_NODES = [{"metadata": {"name": "n1"}, "status": {"allocatable": {"vpc.amazonaws.com/efa": "4"}}}]
NODES = [{"metadata": {"name": "n1"}, "status": {"allocatable": {"memory": "8Gi", "cpu": "4"}}}]


def asks_for(**requests):
    resources = {"containers": [{"name": "trainer", "resources": {"requests": requests}}]}
    return Facts.read({"nodes": NODES, "pods": [{"metadata": {"name": "p"}, "spec": resources}]})


@pytest.mark.parametrize(
    ("name", "run", "facts", "edit"),
    [
        ("cuda_oom", run_with(train={"micro_batch": 6}), Facts(), {"train.micro_batch": 3}),
        ("cuda_oom", run_with(train={"micro_batch": 5}), Facts(), {"train.micro_batch": 1}),
        ("cuda_oom_fragmentation", run_with(train={"micro_batch": 1}), Facts(),
         {"parallel.activation_checkpointing": "full"}),
        ("cuda_oom", run_with(train={"micro_batch": 1}, parallel={"activation_checkpointing": "full"}), Facts(), None),
        ("cpu_memory_request", on_kubernetes(), asks_for(memory="64Gi", cpu="1"),
         {"target.kubernetes.memory": "7372Mi"}),
        ("cpu_memory_request", on_kubernetes(), asks_for(cpu="9"), {"target.kubernetes.cpu": "3600m"}),
        ("cpu_memory_request", on_kubernetes(), asks_for(memory="4Gi", cpu="2"), None),  # others use what there is
        ("host_oom", on_kubernetes(memory="2Gi"), asks_for(), {"target.kubernetes.memory": "4096Mi"}),
        ("host_oom", on_kubernetes(memory="6Gi"), asks_for(), {"target.kubernetes.memory": "7372Mi"}),
        ("host_oom", on_kubernetes(memory="8Gi"), asks_for(), None),
        ("host_oom", run_with(), Facts(), None),
        ("efa_unavailable", on_kubernetes(), asks_for(), None),  # none at all: TCP is nobody's wish
        ("efa_unavailable", on_kubernetes(), Facts.read({"nodes": EFA_NODES}), {"target.kubernetes.efa": 4}),
        ("shm", on_kubernetes(shm="64Mi"), asks_for(), {"target.kubernetes.shm": "128Mi"}),
        ("taint", on_kubernetes(), asks_for(), None),
        ("image_missing", on_kubernetes(), asks_for(), None),
        ("user_code", run_with(), Facts(), None),
    ],
)  # fmt: skip
def test_remedies(name, run, facts, edit):
    remedy = remedy_for(verdict_of(name, "evidence"), run, facts)
    assert (dict(remedy.edit) if remedy else None) == edit
    assert edit is None or may_edit(edit)


def test_what_a_run_computes_is_nobodys_to_edit():
    for key in ("data.source", "image.name", "model.path", "target.kubernetes.image", "train.global_batch"):
        assert not may_edit([key, "train.micro_batch"])
    assert may_edit(["train.micro_batch"])
    assert [amount(one) for one in ("2", "500m", "64Gi", "1k", "much", None)] == [2, 0.5, 64 * 2**30, 1000, 0, 0]


def test_decisions_hold_until_somebody_changes_the_run_file(windlass, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\ntrain: {micro_batch: 8}\n"
        "resources: {gpus_per_node: 0, processes_per_node: 1}\n"
        "target: {kind: kubernetes, kubernetes: {memory: 500Gi, image: 'i:1'}}\n"
    )
    assert overrides_of_decisions(str(file), []) == []
    folder = RunFolder.of(load_run(file))
    folder.path.mkdir(parents=True)
    folder.record("retry", edit={"target.kubernetes.memory": ["500Gi", "7Gi"]})
    folder.record("retry", edit={"train.micro_batch": [8, 4]}, exclude=["node2"])
    folder.record("retry", edit={"train.micro_batch": [4, 2]}, backoff=100.0)
    folder.record("retry", edit={"train.global_batch": [32, 16]})
    folder.record("retry", edit={"train.micro_batch": "nonsense"}, exclude=7)
    found = overrides_of_decisions(str(file), [])
    assert found == [
        'target.kubernetes.memory="7Gi"',
        "train.micro_batch=2",
        'target.kubernetes.exclude_nodes=["node2"]',
    ]
    rendered = windlass("run", file, *found, "--dry-run", "--offline")
    assert "matchFields:\n" in rendered.out, rendered
    assert "key: metadata.name" in rendered.out, rendered
    assert "- node2" in rendered.out, rendered
    assert "train.micro_batch=2" not in overrides_of_decisions(str(file), ["train.micro_batch=16"])
    assert wait_before(list(read_json_lines(folder.history))[:3]) == pytest.approx(100, abs=60)


@pytest.fixture
def really(tmp_path, monkeypatch):
    """`windlass` as a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)

    def run(*arguments):
        return run_forked(arguments, cwd=tmp_path, env=os.environ, timeout=600)

    return run


def losses(folder):
    return [record["loss"] for _, record in sorted(steps_of(folder).items())]


@pytest.mark.train
@pytest.mark.slow
def test_a_full_gpu_is_answered_by_edits_that_keep_the_losses(really, run_file, tmp_path):
    """Twice out of memory: first fewer sequences at once, then recomputed activations."""
    asked = ("train.micro_batch=2", "resources.processes_per_node=1", "checkpoint.background=false")
    undisturbed = train(tmp_path / "undisturbed", yaml.safe_load(run_file.read_text()), overrides=asked)
    assert undisturbed.codes == [0], undisturbed.output
    answer = really("run", run_file, "name=full", *asked, "--inject", "oom:rank=0,step=3;oom:rank=0,step=4")
    assert answer.returncode == 0, answer
    assert "  - train.micro_batch: 2\n  + train.micro_batch: 1\n" in answer.stdout
    assert "  + parallel.activation_checkpointing: 'full'" in answer.stdout
    folder, whole = RunFolder(tmp_path / "runs" / "full"), undisturbed.folder
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-6)
    decisions = [one for one in read_json_lines(folder.history) if one["event"] == "retry"]
    assert [(one["class"], one["edit"]) for one in decisions] == [
        ("cuda_oom", {"train.micro_batch": [2, 1]}),
        ("cuda_oom", {"parallel.activation_checkpointing": ["none", "full"]}),
    ]
    story = really("show", "full", "--history").stdout
    assert story.index("micro_batch: 1") < story.index("resumed") < story.index("trained to step 6")
    assert folder.load_run().train.global_batch == whole.load_run().train.global_batch


def test_what_only_a_full_gpu_needs_is_left_on_this_machine(run_file):
    """`--detach`: the supervisor does everything else."""
    place = Place(Path("/runs"), Path("/work"), "python")
    for gpus, is_left in ((0, False), (1, True)):
        run = load_run(run_file, [f"resources.gpus_per_node={gpus}", "resources.processes_per_node=1"])
        loop = LocalTarget().render_loop(run, place, Detached(str(run_file), (), 60.0, None, run))
        assert (loop is not None) == is_left


@pytest.mark.train
@pytest.mark.slow
def test_from_python_a_full_gpu_is_answered_with_nobody_there(run_file, tmp_path, monkeypatch):
    """As `run --detach`: a process that outlives whoever submitted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)
    run = windlass_api.load(run_file, "name=full", "train.micro_batch=2", "resources.processes_per_node=1")
    submitted = windlass_api.submit(run, faults="oom:rank=0,step=3")
    ended = submitted.wait(timeout=300)
    assert ended.state == "finished", ended
    history = list(read_json_lines(RunFolder(submitted.folder).history))
    assert [one["edit"] for one in history if one["event"] == "retry"] == [{"train.micro_batch": [2, 1]}]


@pytest.mark.train
@pytest.mark.slow
def test_a_user_error_is_shown_at_once_and_not_tried_again(really, run_file, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "transformers.py").write_text("import no_such_module\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=":")
    answer = really("run", run_file)
    ended = time.time()
    assert answer.returncode == 1
    folder = RunFolder(tmp_path / "runs" / "small")
    crashed = json.loads(folder.rank_error(0).read_text())
    assert ended - crashed["time"] < 10, "the traceback is on the screen within 10 s"
    assert 'code/transformers.py", line 1, in <module>' in answer.stderr
    assert "ModuleNotFoundError: No module named 'no_such_module'" in answer.stderr
    history = list(read_json_lines(folder.history))
    assert [one["event"] for one in history if one["event"] in ("launched", "retry", "restart")] == ["launched"]
    assert next(one["class"] for one in history if one["event"] == "gave-up") == "user_import"
