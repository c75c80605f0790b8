"""The functions of the AWS samples that came before windlass, under their names and parameters.

Each does its work through the commands of windlass, raises a UserError where it cannot, and returns what happened as
a typed result. What a parameter cannot mean here is refused with the reason, never passed over.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml

from windlass.agent.calling import call
from windlass.agent.results import Deployment, ManagedCluster, PyTorchJobs, TrainingHealth
from windlass.api.schemas.clusters import CheckedCluster, CreatedCluster, FixedCluster, ListedClusters, UsedCluster
from windlass.api.schemas.data import ListedCheckpoint
from windlass.api.schemas.images import BuiltImage, ImageReport, PushedImage
from windlass.api.schemas.runs import LogLine, RunResult, ShownRun, Use, WhyResult
from windlass.api.summary import LAUNCHES
from windlass.common.aws import account_of
from windlass.errors import UserError
from windlass.image.build.records import FOLDER, Records
from windlass.runfolder import RunFolder
from windlass.spec import load_run
from windlass.spec.run import RUN_NAME
from windlass.targets.kubernetes.api.kubeconfig import access, kubeconfig_files, read_all

MONITOR_SECONDS = 300  # how long a deployment is watched before it is left to itself


def build_docker_image(
    dockerfile: str = "Dockerfile",
    context: str = ".",
    tag: str = "auto",
    auto_fix: bool = True,
    max_attempts: int = 3,
    base_image: str | None = None,
    verbose: bool = True,
    image_name: str | None = None,
    image_tag: str | None = None,
    force_local: bool = False,
    force_codebuild: bool = False,
    codebuild_project: str = "windlass-image",
    region: str | None = None,
    smoke_test: bool = True,
    wait: bool = True,
    timeout: int = 3600,
    repository: str | None = None,
) -> BuiltImage:
    """Build an image, heal what is wrong with it, and prove it from inside.

    With a repository (default: $ECR_REPOSITORY) the image is pushed too: a name such as `fsdp` is one of your ECR
    registry, anything with a slash a full name.
    """
    if force_local and force_codebuild:
        raise UserError("an image is built here or by CodeBuild, not both", fix="leave one of the two out")
    wanted = image_tag or (None if tag == "auto" else tag)
    _refuse("an image counts as built when its tests have passed: that is waited for", wait=not wait)
    _refuse("CodeBuild gives its images tags of their own, made of their contents", tag=force_codebuild and wanted)
    repository = repository or os.environ.get("ECR_REPOSITORY")
    registry_name = _registry_name(repository, region) if repository else None
    on_line = _print_line if verbose else None
    with _with_base(Path(dockerfile), base_image) as recipe:
        name = image_name or registry_name or Path(context).resolve().name.lower()
        built = call(
            BuiltImage,
            *("image", "build", "--dockerfile", recipe, "--context", context, "--name", name),
            *("--attempts", max_attempts, "--test", "quick" if smoke_test else "none"),
            *(["--auto-fix"] if auto_fix else []),
            *(["--builder", "codebuild", "--project", codebuild_project] if force_codebuild else []),
            *(_region(region) if force_codebuild else []),
            timeout=timeout,
            on_line=on_line,
        )
    if wanted:
        tagged = f"{built.image.rpartition(':')[0]}:{wanted}"
        subprocess.run([built.builder, "tag", built.image, tagged], check=True)
        built = built.model_copy(update={"image": tagged})
    if registry_name and not built.pushed:
        where = ["--to", registry_name, *(["--tag", wanted] if wanted else [])]
        pushed = call(PushedImage, "image", "push", built.tag, *where, on_line=on_line)
        built = built.model_copy(update={"pushed": pushed.pinned})
    return built


def test_docker_image(
    image: str,
    level: Literal["quick", "standard", "full"] = "standard",
    codebuild_project: str | None = None,
    region: str | None = None,
    use_codebuild: bool = False,
    wait: bool = True,
    timeout: int = 600,
    verbose: bool = True,
) -> ImageReport:
    """Test an image from inside: what it loads, whether a model trains in it, with `full` a whole smoke run."""
    _refuse(
        "an image is tested where it can be run: here; CodeBuild tests what it builds, in the same build",
        use_codebuild=use_codebuild,
        codebuild_project=codebuild_project,
        region=region,
        wait=not wait,
    )
    return call(
        ImageReport, "image", "test", image, "--level", level, timeout=timeout, on_line=_print_line if verbose else None
    )


test_docker_image.__test__ = False  # type: ignore[attr-defined]  # its name is the seeds'; pytest is not meant


def deploy_training_job(
    cluster_name: str | None = None,
    job_name: str = "fsdp-training",
    image_uri: str | None = None,
    instance_type: str | None = None,
    num_nodes: int | None = None,
    gpu_per_node: int | None = None,
    torchrun_path: str | None = None,
    use_hyperpod_cli: bool | None = None,
    monitor: bool = True,
    auto_retry: bool = True,
    hf_token: str | None = None,
    use_ray: bool = False,
    use_pytorchjob: bool | None = None,
    auto_monitor: bool | None = None,
    max_retries: int | None = None,
    checkpoint_dir: str | None = None,
    storage_size: str | None = None,
    storage_class: str | None = None,
    model_path: str | None = None,
    tokenizer: str | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    save_freq: int | None = None,
    use_efia: bool | None = None,
    skip_validation: bool = False,
    namespace: str | None = None,
    region: str | None = None,
    verbose: bool = True,
) -> Deployment:
    """Train on an EKS or HyperPod cluster, or on any context of the kubeconfig.

    JOB_NAME.yaml is the run file. Where there is none it is written: Llama 3.2 1B on C4, four nodes with one GPU, a
    PyTorchJob, checkpoints on the claim `fsx-claim`. Parameters that are given win over it. The cluster's checks come
    first and take seconds. `monitor` prints the logs for five minutes; the job goes on after that. `checkpoint_dir`:
    `pvc:CLAIM/FOLDER`, `s3://…`, or a folder that every node mounts. `batch_size`: sequences of a step, over all ranks.
    """
    _refuse("windlass starts ranks with torchrun, not with Ray", use_ray=use_ray)
    _refuse("the size of a claim follows from the checkpoints of the run", storage_size=storage_size)
    _refuse("the checks take seconds, and what they find would cost more", skip_validation=skip_validation)
    if not RUN_NAME.fullmatch(job_name):  # a path would write its run file elsewhere
        raise UserError(f"{job_name!r} cannot be a job's name", fix="letters, digits, . _ and - only, at most 63")
    on_line = _print_line if verbose else None
    run_file = Path(f"{job_name}.yaml")
    context = _context_of(cluster_name, region)
    job_kind = "hyperpod" if use_hyperpod_cli else "pytorchjob" if use_pytorchjob else None
    given = {
        **_storage(checkpoint_dir),
        "model.path": model_path,
        "data.tokenizer": tokenizer,
        "train.steps": max_steps,
        "train.global_batch": batch_size,
        "checkpoint.every": save_freq,
        "resources.nodes": num_nodes,
        "resources.gpus_per_node": gpu_per_node,
        "resources.instance": instance_type,
        "image.name": image_uri,
        "target.max_restarts": max_retries,
        "target.kubernetes.namespace": namespace,
        "target.kubernetes.job": job_kind,
        "target.kubernetes.python": str(Path(torchrun_path).with_name("python")) if torchrun_path else None,
        "target.kubernetes.efa": 0 if use_efia is False else None,
        "target.kubernetes.secrets": _with_token(run_file) if hf_token else None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if not run_file.exists():
        _write_run_file(run_file, {"image.name": image_uri or _newest_pushed_image(), **given})
    changes = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
    changes += ["model.preset=null"] if model_path else []
    if storage_class:
        place = ["--context", context, "--storage-class", storage_class, "--yes"]
        call(FixedCluster, "cluster", "fix", run_file, *changes, *place, on_line=on_line)
    started = call(
        RunResult,
        *("run", run_file, *changes, f"name={job_name}", "--on", f"kubernetes:{context}", "--detach"),
        "--retry" if auto_retry else "--no-retry",
        environment={"HF_TOKEN": hf_token} if hf_token else None,
        on_line=on_line,
    )
    if monitor if auto_monitor is None else auto_monitor:
        _watch(job_name, on_line)
    run = call(ShownRun, "show", job_name)
    return Deployment(run_file=str(run_file), context=context, run=run, warnings=started.warnings)


def deploy_with_checkpoints(
    cluster_name: str | None = None,
    image_uri: str | None = None,
    job_name: str = "fsdp-training",
    num_nodes: int = 4,
    namespace: str | None = None,
    storage_class: str = "fsx-sc",
    claim: str = "checkpoints",
) -> Deployment:
    """`deploy_training_job` with checkpoints on a claim, which is made if it is not there."""
    return deploy_training_job(
        cluster_name,
        job_name,
        image_uri,
        num_nodes=num_nodes,
        namespace=namespace,
        storage_class=storage_class,
        checkpoint_dir=f"pvc:{claim}",
    )


def manage_eks_cluster(
    cluster_name: str | None = None,
    region: str | None = None,
    validate_components: bool = True,
    auto_fix: bool = False,
    create_if_missing: bool = False,
    infrastructure_type: str = "cloudformation",
    run_file: str | None = None,
    verbose: bool = True,
) -> ManagedCluster:
    """Check a cluster, make what is missing in it, or make the cluster itself; without a name, list all.

    With `run_file` the checks are against what that run needs. `create_if_missing` costs money from then on.
    """
    if infrastructure_type != "cloudformation":
        raise UserError(
            f"windlass cannot make a cluster with {infrastructure_type}",
            cause="eksctl makes it, through CloudFormation",
            fix="infrastructure_type=cloudformation",
        )
    cluster_name = cluster_name or os.environ.get("EKS_CLUSTER_NAME")
    if cluster_name is None:
        return ManagedCluster(clusters=call(ListedClusters, "cluster", "ls", *_region(region)))
    on_line = _print_line if verbose else None
    created = None
    try:
        context = _context_of(cluster_name, region)
    except UserError as error:
        if not create_if_missing or error.error_code != "no-such-cluster":
            raise
        where = ["--region", region or _default_region(), "--yes"]
        created = call(CreatedCluster, "cluster", "create", cluster_name, *where, on_line=on_line)
        context = _context_of(cluster_name, region)
    about = [*([run_file] if run_file else []), "--context", context]
    fixed = call(FixedCluster, "cluster", "fix", *about, "--yes", on_line=on_line) if auto_fix else None
    checked = call(CheckedCluster, "cluster", "check", *about, on_line=on_line) if validate_components else None
    return ManagedCluster(context=context, created=created, check=checked, fix=fixed)


def manage_pytorchjob(
    action: Literal["create", "delete", "list", "status", "logs", "check_crd"],
    name: str | None = None,
    namespace: str | None = None,
    image: str | None = None,
    num_workers: int = 2,
    num_gpus_per_worker: int = 1,
    command: str | None = None,
    cluster_name: str | None = None,
) -> PyTorchJobs:
    """Make, delete, list or look at PyTorchJobs, also those that windlass did not launch. They live in the cluster.

    `command` is what each worker runs under `torchrun`, such as `/fsdp/train.py --max_steps 100`.
    """
    from windlass.agent import pytorchjobs

    return pytorchjobs.manage(
        action, name, namespace, image, num_workers, num_gpus_per_worker, command, _context_of(cluster_name, None)
    )


def monitor_training(
    job_name: str,
    action: Literal[
        "monitor", "status", "step", "stall", "gpu", "resources", "logs", "health", "efa", "checkpoints"
    ] = "monitor",
    stagnation_threshold: float = 300,
    check_interval: float = 30,
    tail: int = 100,
    verbose: bool = True,
    head_pod: str | None = None,
    job_id: str | None = None,
    checkpoint_dir: str | None = None,
    max_retries: int | None = None,
    retry_delay: float | None = None,
    namespace: str | None = None,
) -> TrainingHealth:
    """Look at a run on any target; `monitor` waits until it has ended or makes no step for too long."""
    _refuse("a run is known by its name; there is no Ray head to ask", head_pod=head_pod, job_id=job_id)
    _refuse("its run file says where a run is", checkpoint_dir=checkpoint_dir, namespace=namespace)
    _refuse(
        "`windlass run` decides about retries, with a budget for each kind of failure (target.max_restarts)",
        max_retries=max_retries,
        retry_delay=retry_delay,
    )
    on_line = _print_line if verbose else None
    run = call(ShownRun, "show", job_name)
    while action == "monitor" and run.state in ("waiting", "running") and not _stalled(run, stagnation_threshold):
        if on_line:
            on_line(f"{job_name}: {run.state}, step {run.step} of {run.steps}, loss {run.loss}")
        time.sleep(check_interval)
        run = call(ShownRun, "show", job_name)
    health = TrainingHealth(run=run)
    if action in ("monitor", "stall", "health"):
        health.seconds_since_step = _seconds_since_step(run)
        health.stalled = _stalled(run, stagnation_threshold)
    if action == "health" or (action == "monitor" and (run.state == "failed" or health.stalled)):
        health.why = call(WhyResult, "why", job_name)
    if action in ("gpu", "resources"):
        health.use = call(Use, "top", job_name)
    if action in ("logs", "efa"):
        lines = call(list[LogLine], "logs", job_name, *(["--tail", tail] if action == "logs" else []))
        health.logs = lines if action == "logs" else None
        health.transport = _transport(lines) if action == "efa" else None
    if action == "checkpoints":
        health.checkpoints = call(list[ListedCheckpoint], "ckpt", "ls", job_name)
    return health


def _refuse(reason: str, **given: object) -> None:
    """A parameter of the seeds that means nothing here is an error where it is set, and not passed over."""
    names = [name for name, value in given.items() if value]
    if names:
        raise UserError(f"{', '.join(names)}: {reason}", fix=f"leave {', '.join(names)} out")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _region(region: str | None) -> list[str]:
    return ["--region", region] if region else []


def _default_region() -> str:
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise UserError("in which region is not said", fix="region=us-west-2    or AWS_REGION")
    return region


def _context_of(cluster_name: str | None, region: str | None) -> str:
    """The kubeconfig context of a cluster; an entry is written for an EKS or HyperPod cluster that has none."""
    name = cluster_name or os.environ.get("EKS_CLUSTER_NAME")
    if name is None:
        return access().context
    contexts = read_all(kubeconfig_files()).contexts
    for context in contexts:
        if context == name or context.endswith(f":cluster/{name}"):
            return context
    return call(UsedCluster, "cluster", "use", name, *_region(region)).context


def _registry_name(repository: str, region: str | None) -> str:
    if "/" in repository:
        return repository
    where = region or _default_region()
    return f"{account_of(where)}.dkr.ecr.{where}.amazonaws.com/{repository}"


def _newest_pushed_image() -> str:
    image = next((record.pushed for record in Records(Path(FOLDER)).newest_first() if record.pushed), None)
    if image is None:
        raise UserError(
            "which image the pods run is not said, and none was pushed from this folder",
            evidence=f"{FOLDER}/ has no image that was pushed",
            fix="image_uri=REGISTRY/REPOSITORY:TAG    or build_docker_image(repository=…) first",
        )
    return image


@contextmanager
def _with_base(dockerfile: Path, base_image: str | None) -> Iterator[Path]:
    """The Dockerfile, or a copy of it that begins with another base image."""
    if base_image is None:
        yield dockerfile
        return
    text, count = re.subn(
        r"(?im)^(FROM\s+(?:--platform=\S+\s+)?)\S+", rf"\g<1>{base_image}", dockerfile.read_text(), count=1
    )
    if not count:
        raise UserError(
            f"{dockerfile} has no FROM that base_image could replace", fix="a Dockerfile that begins with FROM IMAGE"
        )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / dockerfile.name
        copy.write_text(text)
        yield copy


def _storage(checkpoint_dir: str | None) -> dict[str, str]:
    if not checkpoint_dir:
        return {}
    if checkpoint_dir.startswith("s3://"):
        return {"checkpoint.store": checkpoint_dir}
    place = f"hostpath:{checkpoint_dir}" if checkpoint_dir.startswith("/") else checkpoint_dir
    return {"target.kubernetes.storage": place}


def _with_token(run_file: Path) -> list[str]:
    """The secrets of a run file with HF_TOKEN from the environment among them."""
    known = load_run(run_file).target.kubernetes.secrets if run_file.exists() else ()
    return [*(secret for secret in known if secret.partition("=")[0] != "HF_TOKEN"), "HF_TOKEN"]


def _write_run_file(path: Path, given: dict[str, Any]) -> None:
    """What the seeds trained by default, with what is given in place of it."""
    keys = {
        "model.preset": "llama3.2-1b",
        "data.source": "hf:allenai/c4",
        "train.steps": 100,
        "train.global_batch": 8,
        "resources.nodes": 4,
        "resources.gpus_per_node": 1,
        "target.kind": "kubernetes",
        "target.kubernetes.job": "pytorchjob",
        "target.kubernetes.storage": "pvc:fsx-claim",  # the claim of the seeds' own manifests
        **given,
    }
    if "model.path" in given:
        del keys["model.preset"]
    values: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def _watch(job_name: str, on_line: Callable[[str], None] | None) -> None:
    """Print the logs of a run while it runs, for some time at most."""
    command = [sys.executable, "-m", "windlass.cli.main", "logs", job_name, "--follow"]
    output = sys.stderr if on_line else subprocess.DEVNULL
    try:
        subprocess.run(command, stdout=output, stderr=output, timeout=MONITOR_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        if on_line:
            on_line(f"{job_name} goes on; windlass logs {job_name} --follow watches it")


def _seconds_since_step(run: ShownRun) -> float | None:
    """Since the newest record of a step, of a run that is under way; before the first one, since its last launch."""
    if run.state != "running":
        return None
    metrics = RunFolder.find(run.name).metrics
    moments = [record["time"] for record in run.history if record.get("event") in LAUNCHES and "time" in record]
    moments += [metrics.stat().st_mtime] if metrics.exists() else []
    return time.time() - max(moments) if moments else None


def _stalled(run: ShownRun, threshold: float) -> bool:
    return (_seconds_since_step(run) or 0) > threshold


def _transport(lines: list[LogLine]) -> Literal["efa", "tcp"] | None:
    """What NCCL's own lines say; NCCL_DEBUG=INFO makes it print them."""
    if any("NET/OFI" in line.text and "Selected" in line.text for line in lines):
        return "efa"
    return "tcp" if any("NET/Socket" in line.text for line in lines) else None
