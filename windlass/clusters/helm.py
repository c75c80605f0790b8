"""Helm releases by name and version, rendered to objects: shown, created and undone like any other."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from windlass.clusters.fixing import Proposal, objects_in
from windlass.errors import ExitCode, UserError

RELEASE = re.compile(r"([a-z0-9-]+)@v?(\d+\.\d+[-.+0-9A-Za-z]*)")
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Chart:
    """Where a release's chart is, and the namespace that its makers give it."""

    place: str  # oci://…, or a name in `repository`
    namespace: str
    repository: str | None = None
    settings: tuple[str, ...] = ()


# As their makers write them (2026-11): github.com/NVIDIA/k8s-device-plugin, github.com/aws/eks-charts,
# cert-manager.io/docs/installation/helm, github.com/kubernetes-sigs/jobset/tree/main/charts/jobset,
# kubeflow.org/docs/components/trainer/operator-guides/installation, kueue.sigs.k8s.io/docs/installation.
# OCI charts have versions without a v. Which versions there are is for helm to say.
CHARTS = {
    "nvidia-device-plugin": Chart(
        "nvidia-device-plugin", "nvidia-device-plugin", "https://nvidia.github.io/k8s-device-plugin"
    ),
    "aws-efa-k8s-device-plugin": Chart("aws-efa-k8s-device-plugin", "kube-system", "https://aws.github.io/eks-charts"),
    "cert-manager": Chart("cert-manager", "cert-manager", "https://charts.jetstack.io", ("crds.enabled=true",)),
    "jobset": Chart("oci://registry.k8s.io/jobset/charts/jobset", "jobset-system"),
    "kubeflow-trainer": Chart("oci://ghcr.io/kubeflow/charts/kubeflow-trainer", "kubeflow-system"),
    "kueue": Chart("oci://registry.k8s.io/kueue/charts/kueue", "kueue-system"),
}


def from_release(release: str) -> Proposal:
    """The objects of `NAME@VERSION`, as `helm template` writes them. Hooks, which test or clean up, are left out."""
    match = RELEASE.fullmatch(release)
    if match is None or match[1] not in CHARTS:
        raise UserError(
            f"--helm {release} is no release that windlass knows",
            evidence=f"known: {', '.join(CHARTS)}; with a version, cert-manager@1.19.1 say",
            fix="helm template … > release.yaml    and --manifest release.yaml for any other",
        )
    name, version, chart = match[1], match[2], CHARTS[match[1]]
    command = ["helm", "template", name, chart.place, "--version", version, "--namespace", chart.namespace]
    command += ["--repo", chart.repository] if chart.repository else []
    command += ["--include-crds", "--no-hooks", *(part for value in chart.settings for part in ("--set", value))]
    if shutil.which("helm") is None:
        raise UserError(
            "helm is not installed",
            evidence="no program of that name is in $PATH",
            fix=f"on a machine that has it:  {' '.join(command)} > {name}.yaml\n"
            f"windlass cluster fix --manifest {name}.yaml",
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        is_slow = isinstance(error, subprocess.TimeoutExpired)
        why = f"it did not end within {TIMEOUT_SECONDS:g} s" if is_slow else str(error)
        raise UserError("helm cannot be run", evidence=why, fix=" ".join(command), exit_code=ExitCode.FAILED) from None
    if done.returncode:
        raise UserError(f"helm cannot render {release}", evidence=done.stderr.strip()[-400:], fix=" ".join(command))
    objects = objects_in(done.stdout, "what helm rendered")
    if not objects:
        raise UserError(f"helm rendered nothing for {release}", evidence="its output is empty", fix=" ".join(command))
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": chart.namespace}}
    first = {"Namespace": 0, "CustomResourceDefinition": 1}
    ordered = sorted([namespace, *objects], key=lambda value: first.get(value["kind"], 2))
    return Proposal("helm", release, ordered, chart.namespace)
