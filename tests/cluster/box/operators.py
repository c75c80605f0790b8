"""Operators from the manifests in their own Go modules: JobSet, Kubeflow Trainer, the training operator, Kueue."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.cluster.box import addons, build, certificates
from tests.cluster.box.addons import Object
from tests.cluster.box.api import Api, patiently
from tests.cluster.box.host import BoxError, wait
from tests.cluster.box.images import SYSTEM_IMAGE
from tests.cluster.box.layout import ROOT, TRAINER_IMAGE

# What a worker does first. The stock one asks nslookup, and busybox's fails when any search domain lacks the name.
WAIT_FOR_MASTER = f"""\
- name: init-pytorch
  image: {TRAINER_IMAGE}
  imagePullPolicy: IfNotPresent
  command: [sh, -c, "until ping -c 1 -w 2 {{{{.MasterAddr}}}}; do sleep 0.2; done"]
"""


@dataclass(frozen=True)
class Operator:
    manifests: build.Manifests
    overlay: str  # what kustomize is pointed at
    program: str
    namespace: str
    deployment: str
    service: str  # its webhooks are called by this name
    secret: str
    authority: str  # the name it expects of the authority that signed its certificate
    without: tuple[str, ...] = ()  # resources of the overlay that are left out: they are on the internet
    skipped_kinds: tuple[str, ...] = ("Secret",)  # objects that are left out
    configuration: dict[str, Any] = field(default_factory=dict)  # in place of what its configuration file says
    arguments: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)  # files in /settings
    definitions: tuple[str, ...] = ()  # only these; empty: all


OPERATORS = (
    Operator(
        build.JOBSET,
        "default",
        "jobset",
        "jobset-system",
        "jobset-controller-manager",
        "jobset-webhook-service",
        "jobset-webhook-server-cert",
        "jobset-ca",
    ),
    Operator(
        build.TRAINER,
        "overlays/manager",
        "trainer-controller-manager",
        "kubeflow-system",
        "kubeflow-trainer-controller-manager",
        "kubeflow-trainer-controller-manager",
        "kubeflow-trainer-webhook-cert",
        "kubeflow-trainer-ca",
        without=("../../third-party/jobset",),
    ),
    Operator(
        build.TRAINING_OPERATOR,
        "overlays/standalone",
        "training-operator",
        "kubeflow",
        "training-operator",
        "training-operator",
        "training-operator-webhook-cert",
        "training-operator-ca",
        arguments=("--enable-scheme=pytorchjob", "--pytorch-init-container-template-file=/settings/wait.yaml"),
        settings={"wait.yaml": WAIT_FOR_MASTER},
        definitions=("pytorchjobs.kubeflow.org",),  # five others are as large
    ),
)
# Installed and removed again by the tests that need it: its webhooks see every pod and job of the cluster.
KUEUE = Operator(
    build.KUEUE,
    "default",
    "kueue",
    "kueue-system",
    "kueue-controller-manager",
    "kueue-webhook-service",
    "kueue-webhook-server-cert",
    "kueue-ca",
    skipped_kinds=(
        "Secret",
        "APIService",
    ),  # a late API of a pod keeps namespaces from going
    configuration={
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {
            "frameworks": [
                "batch/job",
                "jobset.x-k8s.io/jobset",
                "kubeflow.org/pytorchjob",
                "trainer.kubeflow.org/trainjob",
            ]
        },
    },
)
SETTINGS = "box-settings"
DEPLOYMENTS = tuple((one.namespace, one.deployment) for one in OPERATORS)


def manifests(operators: Sequence[Operator] = OPERATORS) -> list[Object]:
    """Everything of these operators, with their programs mounted instead of pulled."""
    objects = [prepared for operator in operators for prepared in _prepared(operator)]
    # namespaces and definitions first: the rest needs them
    return sorted(objects, key=lambda o: ("Namespace", "CustomResourceDefinition", o["kind"]).index(o["kind"]))


def runtimes(api: Api) -> list[Object]:
    """What only a working webhook lets in: the runtime that TrainJobs refer to."""
    wait_for_webhooks(api)
    runtime = build.manifest_folder(build.TRAINER) / "base" / "runtimes" / "torch_distributed.yaml"
    return [one for one in yaml.safe_load_all(runtime.read_text()) if one]


def wait_for_webhooks(api: Api) -> None:
    wait(lambda: patiently(lambda: _bundles(api)), "webhooks trust their operators", 120)


def _bundles(api: Api) -> bool:
    group = "/apis/admissionregistration.k8s.io/v1"
    for kind in ("validatingwebhookconfigurations", "mutatingwebhookconfigurations"):
        for item in api.get(f"{group}/{kind}")["items"]:
            if not all(hook["clientConfig"].get("caBundle") for hook in item.get("webhooks", [])):
                return False
    return True


def _prepared(operator: Operator) -> list[Object]:
    objects = []
    for one in _kustomized(operator):
        if one["kind"] in operator.skipped_kinds:
            continue
        definition = one["kind"] == "CustomResourceDefinition"
        if definition and operator.definitions and one["metadata"]["name"] not in operator.definitions:
            continue
        if one["kind"] == "Deployment":
            _run_mounted(one, operator)
        if one["kind"] == "ConfigMap":
            _configure(one, operator)
        objects.append(one)
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "data": operator.settings}
    return [*objects, settings | {"metadata": addons.metadata(SETTINGS, operator.namespace)}, _certificate(operator)]


def _kustomized(operator: Operator) -> list[Object]:
    """What kustomize makes of the overlay; kept beside the programs, because it is a megabyte that never changes."""
    asked = hashlib.sha256(repr((operator.overlay, operator.without)).encode()).hexdigest()[:8]
    rendered = build.folder(operator.manifests.module) / f"{operator.program}-{asked}.json"
    if not rendered.exists():
        unfinished = rendered.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(_kustomize(operator)))
        unfinished.rename(rendered)
    return list(json.loads(rendered.read_text()))


def _kustomize(operator: Operator) -> list[Object]:
    folder = ROOT / "manifests" / operator.program
    shutil.copytree(build.manifest_folder(operator.manifests), folder)
    path = folder / operator.overlay / "kustomization.yaml"
    if operator.without:
        settings = yaml.safe_load(path.read_text())
        settings["resources"] = [one for one in settings["resources"] if one not in operator.without]
        path.write_text(yaml.safe_dump(settings))
    command = [str(build.binary("kubectl")), "kustomize", str(path.parent)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if result.returncode != 0:
        raise BoxError(f"{' '.join(command)}: {result.stderr[-2000:]}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # definitions have a megabyte
    return [one for one in yaml.load_all(result.stdout, Loader=loader) if one]


def _run_mounted(deployment: Object, operator: Operator) -> None:
    volume, mount = addons.program(operator.program)
    pod = deployment["spec"]["template"]["spec"]
    pod |= addons.on_system_node()
    pod.setdefault("volumes", []).extend([volume, {"name": SETTINGS, "configMap": {"name": SETTINGS}}])
    container = pod["containers"][0]
    container |= {"image": SYSTEM_IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["/program"]}
    container["args"] = [*container.get("args", []), *operator.arguments]
    container.pop("resources", None)
    container.setdefault("volumeMounts", []).extend([mount, {"name": SETTINGS, "mountPath": "/settings"}])
    # A busy machine is not a dead one: nobody ends an operator that answers late, or stops asking it.
    container["readinessProbe"] |= {"initialDelaySeconds": 0, "periodSeconds": 1, "timeoutSeconds": 30}
    container["readinessProbe"]["failureThreshold"] = 60
    container.pop("livenessProbe", None)


def _configure(settings: Object, operator: Operator) -> None:
    """The only replica leads: it need not give up when a lease was renewed late."""
    for name, text in settings.get("data", {}).items():
        configuration = yaml.safe_load(text)
        if isinstance(configuration, dict) and "leaderElection" in configuration:
            configuration |= {"leaderElection": {"leaderElect": False}} | operator.configuration
            settings["data"][name] = yaml.safe_dump(configuration)


def _certificate(operator: Operator) -> Object:
    """The webhook's certificate, there before the operator looks: else it makes one and waits until it is mounted."""
    name, server = f"{operator.program}-ca", f"{operator.service}.{operator.namespace}.svc"
    certificates.operator_authority(name, operator.authority)
    extension = f"subjectAltName=DNS:{server}\nextendedKeyUsage=serverAuth"
    certificates.sign(f"{operator.program}-webhook", f"/CN={server[:60]}", extension, by=name, days=certificates.YEARS)
    files = {"ca.crt": f"{name}.crt", "ca.key": f"{name}.key"}
    files |= {f"tls.{part}": f"{operator.program}-webhook.{part}" for part in ("crt", "key")}
    data = {key: base64.b64encode((certificates.FOLDER / file).read_bytes()).decode() for key, file in files.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": addons.metadata(operator.secret, operator.namespace),
        "data": data,
    }
