"""The seeds' functions and scripts: every example of their guides, parsed; and run against clusters over HTTP."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.clusters.conftest import aws, cluster, moto  # noqa: F401  (fixtures)
from tests.clusters.test_fix import keeping  # noqa: F401
from tests.clusters.test_listing import make_eks
from tests.kubernetes.conftest import api, cluster_of_objects, connect, server  # noqa: F401
from windlass import agent
from windlass.agent.scripts import main, parser_of
from windlass.errors import UserError

REPOSITORY = Path(__file__).parents[2]
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/fsdp:llama32-1b-v1"
SCRIPTS = {
    "build_image.py": agent.build_docker_image,
    "deploy_training_job.py": agent.deploy_training_job,
    "manage_eks_cluster.py": agent.manage_eks_cluster,
    "manage_pytorchjob.py": agent.manage_pytorchjob,
    "monitor_training.py": agent.monitor_training,
    "test_image.py": agent.test_docker_image,
}
# Every command of the quick starts and step-by-step guides, as they stand there.
EXAMPLES = (
    rf"""
python claude-commands/build_image.py --auto_fix
python claude-commands/build_image.py --dockerfile Dockerfile --tag llama32-1b-v1 --auto_fix --max_attempts 3
python claude-commands/manage_eks_cluster.py --cluster_name sagemaker-test-cluster --validate_components --auto_fix
python claude-commands/deploy_training_job.py --cluster_name your-cluster --num_nodes 4 --job_name llama32-1b-training
python claude-commands/deploy_training_job.py --job_name llama32-1b-training --image_uri {IMAGE} \
  --num_nodes 4 --gpu_per_node 1 --cluster_name sagemaker-test-cluster --monitor
python claude-commands/deploy_training_job.py --cluster_name my-cluster --image_uri my-image:latest \
  --num_nodes 8 --job_name llama-training
python claude-commands/monitor_training.py --job-name training --action stall \
  --stagnation-threshold 300 --check-interval 30
""".replace("\\\n", "")
    .strip()
    .splitlines()
)
# The calls of the guides, by function.
CALLS = [
    (agent.build_docker_image, {"auto_fix": True}),
    (
        agent.build_docker_image,
        {"dockerfile": "Dockerfile", "tag": "llama32-1b-v1", "auto_fix": True, "max_attempts": 3},
    ),
    (agent.build_docker_image, {"base_image": "pytorch/pytorch:2.5.1-cuda12.4-runtime"}),
    (agent.manage_eks_cluster, {"cluster_name": "c", "validate_components": True, "auto_fix": True}),
    (agent.deploy_training_job, {"cluster_name": "c", "num_nodes": 4, "job_name": "j", "monitor": True}),
    (
        agent.deploy_training_job,
        {
            "job_name": "llama3-8b-training",
            "image_uri": IMAGE,
            "num_nodes": 8,
            "gpu_per_node": 2,
            "instance_type": "ml.g5.12xlarge",
            "cluster_name": "my-cluster",
            "max_steps": 1000,
            "monitor": True,
            "auto_retry": True,
        },
    ),
    (agent.deploy_training_job, {"hf_token": "hf_x", "tokenizer": "meta-llama/Llama-3.2-1B", "cluster_name": "c"}),
    (agent.deploy_training_job, {"torchrun_path": "/usr/local/bin/torchrun"}),
]


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_command_of_the_guides_parses(line):
    _, script, *arguments = shlex.split(line)
    given = parser_of(SCRIPTS[Path(script).name]).parse_args(arguments)
    for flag in (word.removeprefix("--").replace("-", "_") for word in arguments if word.startswith("--")):
        assert getattr(given, flag) is not None
    assert (REPOSITORY / script).is_file()


def test_every_call_of_the_guides_fits_the_signature():
    import inspect

    for function, arguments in CALLS:
        inspect.signature(function).bind(**arguments)


def test_a_boolean_flag_is_true_alone_and_takes_a_value():
    parse = parser_of(agent.build_docker_image).parse_args
    assert parse(["--force_local"]).force_local is True
    assert parse(["--auto_fix", "false"]).auto_fix is False
    assert parse(["--auto-fix"]).auto_fix is True
    with pytest.raises(SystemExit):
        parse(["--auto_fix", "perhaps"])


def run_script(line, **variables):
    import os

    _, script, *arguments = shlex.split(line)
    command = [sys.executable, str(REPOSITORY / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_the_quick_start_deploys(server, api, cluster_of_objects, tmp_path, monkeypatch):  # noqa: F811
    """The objects of the run are in the cluster, made from a run file that was not there before."""
    there, _ = cluster_of_objects
    gpu_node = {
        "metadata": {"name": "n1"},
        "status": {
            "allocatable": {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "1"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    nodes = [{**gpu_node, "metadata": {"name": f"n{number}"}} for number in range(4)]
    team = "/api/v1/namespaces/team"
    server.on("/apis", lambda handler: handler.json({"groups": []}))
    server.on("/version", lambda handler: handler.json({"major": "1", "minor": "36"}))
    server.on(team, lambda handler: handler.json({"metadata": {"name": "team"}}))
    server.on("/api/v1/nodes", lambda handler: handler.json({"metadata": {}, "items": nodes}))
    server.on(f"{team}/resourcequotas", lambda handler: handler.json({"metadata": {}, "items": []}))

    def pods(handler):
        handler.json({}, 201) if handler.command == "POST" else handler.json({"metadata": {}, "items": []})

    server.on(f"{team}/pods", pods)
    claim = {"metadata": {"name": "work"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    server.on(f"{team}/persistentvolumeclaims/work", lambda handler: handler.json(claim))
    server.on(f"{team}/persistentvolumeclaims", lambda handler: handler.json({"metadata": {}, "items": [claim]}))
    monkeypatch.chdir(tmp_path)
    # what JOB_NAME.yaml says goes: here a model and data that are there without a hub
    (tmp_path / "key").write_text("abc")
    (tmp_path / "llama32-1b-training.yaml").write_text(
        "model: {preset: llama-tiny}\ndata: {source: 'corpus:austen', sequence_length: 32}\n"
        "train: {steps: 6, global_batch: 4}\nimage: {name: 'registry/image:1'}\n"
        "target: {kubernetes: {storage: 'pvc:work', secrets: ['WANDB_API_KEY=file:key']}}\n"
    )
    result = agent.deploy_training_job(
        cluster_name="here", num_nodes=4, gpu_per_node=1, job_name="llama32-1b-training", monitor=False, verbose=False,
        hf_token="hf_x",
    )  # fmt: skip
    container = there["jobs", "llama32-1b-training"]["spec"]["template"]["spec"]["containers"][0]
    assert {"HF_TOKEN", "WANDB_API_KEY"} <= {variable["name"] for variable in container["env"]}
    assert ("jobs", "llama32-1b-training") in there
    assert there["jobs", "llama32-1b-training"]["spec"]["completions"] == 4
    assert (result.context, result.run.name, result.run.state) == ("here", "llama32-1b-training", "waiting")


@pytest.mark.slow
def test_a_new_run_file_says_what_the_seeds_trained(server, api, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="none was pushed from this folder"):
        agent.deploy_training_job(cluster_name="here", job_name="first")
    assert not Path("first.yaml").exists()
    with pytest.raises(UserError, match="cannot be a job's name"):
        agent.deploy_training_job(cluster_name="here", job_name="../first", image_uri=IMAGE)
    assert not Path("../first.yaml").exists()
    with pytest.raises(UserError):  # the server answers nothing: the file is what is looked at
        agent.deploy_training_job(
            cluster_name="here", job_name="first", image_uri=IMAGE, instance_type="ml.g5.8xlarge", max_steps=7,
            checkpoint_dir="pvc:fsx-claim", verbose=False,
        )  # fmt: skip
    values = yaml.safe_load(Path("first.yaml").read_text())
    assert values["model"] == {"preset": "llama3.2-1b"}
    assert values["data"] == {"source": "hf:allenai/c4"}
    assert values["train"]["steps"] == 7
    assert values["resources"] == {"nodes": 4, "gpus_per_node": 1, "instance": "ml.g5.8xlarge"}
    assert values["target"]["kubernetes"] == {"job": "pytorchjob", "storage": "pvc:fsx-claim"}


@pytest.mark.slow
def test_a_cluster_is_checked_and_mended(cluster, keeping, tmp_path, monkeypatch):  # noqa: F811
    """`--validate_components --auto_fix` as a process, of a cluster whose user may not read logs."""
    monkeypatch.chdir(tmp_path)
    keeping.forbidden = {("get", "pods/log")}
    keeping.serve_keeping()
    done = run_script(
        "python claude-commands/manage_eks_cluster.py --cluster_name here --validate_components --auto_fix"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "created" in {outcome["result"] for outcome in result["fix"]["outcomes"]}
    assert any("/roles/" in path for path in keeping.kept)
    assert {row["check"]: row["status"] for row in result["check"]["results"]}["operators"] == "pass"


@pytest.mark.slow
def test_an_eks_cluster_gets_its_context_and_all_are_listed(aws, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    make_eks(aws, "training")
    listed = agent.manage_eks_cluster()
    assert [row.name for row in listed.clusters.clusters] == ["training"]
    used = agent.manage_eks_cluster("training", validate_components=False)
    assert used.context.endswith(":cluster/training")
    assert yaml.safe_load((tmp_path / "config").read_text())["current-context"] == used.context
    with pytest.raises(UserError) as caught:
        agent.manage_eks_cluster("trainin")
    assert caught.value.error_code == "no-such-cluster"


def test_what_cannot_be_meant_is_refused_with_the_reason(capsys):
    assert main(agent.deploy_training_job, ["--use_ray"]) == 2
    assert "torchrun, not with Ray" in capsys.readouterr().err
    assert main(agent.monitor_training, ["--job-name", "a", "--head-pod", "ray-head", "--json"]) == 2
    assert "leave head_pod out" in capsys.readouterr().err
    with pytest.raises(UserError, match="terraform"):
        agent.manage_eks_cluster("c", infrastructure_type="terraform")


def test_a_run_is_stalled_by_its_own_attempt_alone(tmp_path, monkeypatch):
    """A run that goes on has the steps of an earlier attempt; one that never made a step is counted from its start."""
    import os
    import time

    from windlass.agent.seeds import _stalled
    from windlass.api.schemas.runs import ShownRun

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("name: a\n")

    def run(seconds):
        history = [{"event": "launched", "time": time.time() - seconds}, {"event": "waits", "time": time.time()}]
        return ShownRun.model_construct(name="a", state="running", history=history)

    assert _stalled(run(1000), 300)
    assert not _stalled(run(10), 300)
    (folder / "metrics.jsonl").touch()
    os.utime(folder / "metrics.jsonl", (time.time() - 5000,) * 2)
    assert not _stalled(run(10), 300)
    assert _stalled(run(1000), 300)


def test_pytorchjobs_of_anybody_are_listed_made_read_and_deleted(server, api):  # noqa: F811
    jobs, path = {}, "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
    group = {"groupVersion": "kubeflow.org/v1", "version": "v1"}
    groups = [{"name": "kubeflow.org", "versions": [group], "preferredVersion": group}]
    server.on("/apis", lambda handler: handler.json({"groups": groups}))
    server.on("/version", lambda handler: handler.json({"major": "1", "minor": "36"}))
    kinds = {"resources": [{"name": "pytorchjobs", "kind": "PyTorchJob"}]}
    server.on("/apis/kubeflow.org/v1", lambda handler: handler.json(kinds))
    server.on("/api/v1/namespaces/team", lambda handler: handler.json({"metadata": {"name": "team"}}))
    server.on(
        "/api/v1/namespaces/team/pods",
        lambda handler: handler.json({"metadata": {}, "items": [{"metadata": {"name": "mine-master-0"}}]}),
    )
    server.on("/api/v1/namespaces/team/pods/mine-master-0/log", lambda handler: handler.stream(b"hello\nloss 3\n"))

    def collection(handler):
        if handler.command == "POST":
            job = json.loads(handler.body)
            jobs[job["metadata"]["name"]] = job
            handler.json(job, 201)
        else:
            handler.json({"metadata": {}, "items": list(jobs.values())})

    def single(handler):
        handler.json(jobs.pop("mine") if handler.command == "DELETE" else jobs["mine"])

    server.on(path, collection)
    server.on(f"{path}/mine", single)
    with pytest.raises(UserError, match="needs an image and a command"):
        agent.manage_pytorchjob("create", "mine")
    made = agent.manage_pytorchjob("create", "mine", image="i:1", num_workers=3, command="train.py --max_steps 5")
    assert (made.served, made.jobs[0].workers) == (True, 3)
    container = jobs["mine"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["torchrun", "train.py", "--max_steps", "5"]
    jobs["mine"]["status"] = {
        "conditions": [{"type": "Created", "status": "True"}, {"type": "Running", "status": "True"}]
    }
    assert agent.manage_pytorchjob("status", "mine").jobs[0].state == "Running"
    assert agent.manage_pytorchjob("logs", "mine").logs == ["[mine-master-0] hello", "[mine-master-0] loss 3"]
    agent.manage_pytorchjob("delete", "mine")
    assert agent.manage_pytorchjob("list").jobs == []
