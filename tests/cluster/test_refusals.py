"""What a namespace does not allow (quotas, PodSecurity, limit ranges, roles) is said before a job is made."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cluster.bench import EVERY, Bench
from tests.cluster.box.overlay import REPOSITORY
from tests.cluster.test_bad_input import everything, refused

pytestmark = pytest.mark.cluster

ONE_POD = ("resources.nodes=1", "train.global_batch=2")
ROLES = re.compile(r"```yaml\n(apiVersion: rbac.*?)```", re.DOTALL)
GROUPS = {
    "job": "batch",
    "pytorchjob": "kubeflow.org",
    "trainjob": "trainer.kubeflow.org",
    "hyperpod": "sagemaker.amazonaws.com",
}


@pytest.fixture
def bench(cluster, namespace, tmp_path):
    return Bench(cluster, namespace, tmp_path)


def quota(namespace, **hard):
    spec = {"hard": {key.replace("_", "."): value for key, value in hard.items()}}
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small", "namespace": namespace},
        "spec": spec,
    }


def limit_range(namespace):
    limits = [{"type": "Container", "max": {"cpu": "50m"}, "default": {"cpu": "50m"}}]
    metadata = {"name": "narrow", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": {"limits": limits}}


def test_pods_that_the_namespace_does_not_allow_are_refused_first(bench):
    label = "pod-security.kubernetes.io/enforce"
    bench.cluster.kubectl("label", "namespace", bench.namespace, f"{label}=baseline")
    said = refused(bench, "target.kubernetes.job=trainjob")
    assert 'violates PodSecurity "baseline' in said
    bench.cluster.kubectl("label", "namespace", bench.namespace, f"{label}-")
    bench.cluster.apply(limit_range(bench.namespace))
    said = refused(bench, "target.kubernetes.job=pytorchjob")
    assert "a limit range of the namespace" in said
    assert "50m" in said
    bench.cluster.kubectl("delete", "limitrange", "narrow", "-n", bench.namespace)
    bench.cluster.apply(quota(bench.namespace, pods="0"))
    bench.wait(lambda: bench.cluster.get("quota", "small", bench.namespace)["status"].get("used"), "a quota in force")
    said = refused(bench, "target.kubernetes.job=job")
    assert "exceeded quota: small" in said
    assert "describe quota" in said


def test_pods_that_a_quota_keeps_back_say_so(bench):
    """One of three pods fits: the preflight warns, and every kind shows the words of whoever makes its pods."""
    bench.cluster.apply(quota(bench.namespace, pods="1"))
    bench.wait(lambda: bench.cluster.get("quota", "small", bench.namespace)["status"].get("used"), "a quota in force")
    for kind in ("trainjob", "pytorchjob", "job"):
        name = f"kept-{kind}"
        answer = bench.windlass(
            "run", bench.file, f"name={name}", f"target.kubernetes.job={kind}", "--detach", "--no-retry"
        )
        assert answer.returncode == 0, answer.stderr
        assert "the quota small: pods: 3 pods ask for 1 each, 1 of 1 is left" in answer.stderr
        bench.wait(lambda name=name: "exceeded quota: small" in (bench.show(name)["reason"] or ""), "a reason", name)
        bench.must("stop", name, "--now")


def test_a_pod_that_runs_out_of_memory_gets_more(bench):
    """Once in place, where it is called so; then the job is submitted again with twice the memory."""
    asked = ("target.max_restarts=0", "target.kubernetes.memory=500Mi", "target.kubernetes.job=job", "train.steps=4")
    said = bench.must("run", bench.file, "name=short", *ONE_POD, *asked)
    assert "memory limit" in said
    assert "  - target.kubernetes.memory: '500Mi'\n  + target.kubernetes.memory: '1000Mi'" in said
    assert bench.show("short")["state"] == "finished"


@pytest.fixture
def as_user(bench, tmp_path):
    """Makes the bench act as somebody who has a role and nothing else."""
    bench.cluster.kubectl("create", "serviceaccount", "ann", "-n", bench.namespace)
    token = bench.cluster.kubectl("create", "token", "ann", "-n", bench.namespace).strip()
    view = json.loads(bench.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    view["users"][0]["user"] = {"token": token}
    path = tmp_path / "ann"
    path.write_text(yaml.safe_dump(view))

    def become(rules):
        about = {"name": "windlass", "namespace": bench.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "windlass"}
        ann = {"kind": "ServiceAccount", "name": "ann", "namespace": bench.namespace}
        version = "rbac.authorization.k8s.io/v1"
        bench.cluster.apply(
            {"apiVersion": version, "kind": "Role", "metadata": about, "rules": rules},
            {"apiVersion": version, "kind": "RoleBinding", "metadata": about, "roleRef": role, "subjects": [ann]},
        )
        bench.environment["KUBECONFIG"] = str(path)

    return become


def documented_rules(kind):
    """The role of docs/kubernetes.md, with the rule of one kind of job alone."""
    text = (Path(REPOSITORY) / "docs" / "kubernetes.md").read_text()
    rules = yaml.safe_load(ROLES.search(text)[1])["rules"]
    others = set(GROUPS.values()) - {GROUPS[kind]}
    kept = [rule for rule in rules if not others & set(rule["apiGroups"])]
    assert len(kept) == len(rules) - 3
    return kept


@pytest.mark.parametrize("kind", GROUPS)
def test_the_documented_role_is_enough(bench, as_user, kind):
    as_user(documented_rules(kind))
    asked = ("name=mine", *ONE_POD, "train.steps=100000", f"target.kubernetes.job={kind}")
    answer = bench.windlass("run", bench.file, *asked, "--detach", "--no-retry")
    assert answer.returncode == 0, answer.stderr
    if kind == "job":
        bench.wait_until_running("mine", step=EVERY)
        assert bench.json("ls")[0]["state"] == "running"
        assert f"step {EVERY} is saved" in bench.must("logs", "mine", "--rank", "0")
        assert bench.must("exec", "mine", "--", "echo", "here") == "here\n"
        assert bench.json("ckpt", "ls", "mine")
        again = bench.windlass("run", bench.file, *asked, "--detach", "--no-retry")
        assert "following it" in again.stderr
    else:
        assert bench.show("mine")["state"] in ("waiting", "running")
    stopped = bench.json("stop", "mine", "--now")
    assert stopped["state"] in ("stopped", "preempted"), stopped
    bench.environment["KUBECONFIG"] = str(bench.cluster.kubeconfig)
    left = "jobs,pytorchjobs,trainjobs,trainingruntimes,hyperpodpytorchjobs,pods,configmaps,services"
    listing = ("get", left, "-n", bench.namespace, "-l", "windlass.dev/run=mine", "-o", "name")
    bench.wait(lambda: bench.cluster.kubectl(*listing).split() == [], "an empty namespace", "mine")


def test_a_role_that_lacks_something_leaves_nothing_and_names_it(bench, as_user):
    """What fails after the first object was created is taken back, and exec names verb and fix."""
    rules = documented_rules("job")
    less = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "patch"]}
        if "configmaps" in rule["resources"]
        else rule
        for rule in rules
    ]
    before = everything(bench)
    as_user(less)
    answer = bench.windlass(
        "run", bench.file, "name=half", *ONE_POD, "target.kubernetes.job=job", "--detach", "--no-retry"
    )
    assert answer.returncode == 2
    assert "you may not patch configmaps" in answer.stderr
    assert "--verb=patch" in answer.stderr
    bench.wait(lambda: everything(bench) == before, "an empty namespace")
    assert not bench.run_folder("half").path.exists()
    as_user([rule if rule["resources"] != ["pods/exec"] else {**rule, "verbs": ["get"]} for rule in rules])
    bench.submit("whole", *ONE_POD, "train.steps=100000", "target.kubernetes.job=job")
    bench.wait_until_running("whole")
    refusal = bench.windlass("exec", "whole", "--", "true")
    assert refusal.returncode == 2, refusal
    assert "you may not create pods/exec" in refusal.stderr
    assert "--verb=create --resource=pods/exec" in refusal.stderr
    bench.must("stop", "whole", "--now")
