"""The retry loop that --detach leaves in a cluster: what it is made of, what it carries, and whose word counts."""

import base64
import json

import pytest

from tests.cli.test_notify import Hook
from tests.kubernetes.golden import SERVED
from windlass.api.preparation import Prepared
from windlass.api.submission import watcher_of
from windlass.cli.runs.attempts import Attempts
from windlass.cli.runs.retry import Decider
from windlass.clusters.checks.namespace import _insecure
from windlass.common.files import read_json_lines
from windlass.diagnose.decision import Policy, spent
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.spec.run import NotifySection
from windlass.targets.kubernetes.client import Gathered, KubernetesTarget
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.loop import (
    ENDED,
    LoopNotices,
    LoopRecords,
    ReplacedError,
    check,
    is_active,
    is_marked,
    pull,
    records_for_loop,
    start,
    trouble,
)
from windlass.targets.kubernetes.manifests import code
from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, JobKind
from windlass.targets.kubernetes.manifests.code import Carried, config_maps
from windlass.targets.kubernetes.manifests.loop import render_loop
from windlass.targets.kubernetes.manifests.render import layout_of
from windlass.targets.launch.notifications import carried
from windlass.targets.protocol import LOOP_VARIABLE, JobStatus

OVERLAY = {
    "containers": [
        {
            "name": "trainer",
            "env": [
                {"name": "PROXY", "value": "http://proxy"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "late", "key": "token"}}},
            ],
            "resources": {"limits": {"nvidia.com/gpu": "8"}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tools", "mountPath": "/tools"}],
        }
    ],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "unbound"}},
        {"name": "tools", "hostPath": {"path": "/opt/tools"}},
    ],
}


def run_with(**options):
    target = {"kind": "kubernetes", "kubernetes": {"image": "registry/llm:1", "context": "mine", **options}}
    return parse_run(
        {"name": "r", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}, "target": target}
    )


def loop_of(run, kind=JobKind.INDEXED, pod_security=None, notify=None, **values):
    facts = ClusterFacts(SERVED, namespace="team", pod_security=pod_security)
    return render_loop(run, run, kind, facts, Carried(**values), patience=60, faults=None, history="", notify=notify)


def test_its_pod_starts_where_those_of_the_run_cannot():
    loop = loop_of(run_with(pod=OVERLAY))
    spec = loop.job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "TOKEN" not in str(container), "a secret that may be missing"
    assert "unbound" not in str(spec), "a claim that may be"
    assert "gpu" not in str(spec)
    assert {"PROXY", "WINDLASS_LOOP"} <= {variable["name"] for variable in container["env"]}
    assert {"name": "tools", "mountPath": "/tools"} in container["volumeMounts"]
    assert "windlass.dev/run" not in str(loop.job), "it is no rank"


def test_a_restricted_namespace_lets_its_pod_in():
    """Its Job would be taken without a word, and no pod would ever come."""
    (container,) = loop_of(run_with(), pod_security="restricted").job["spec"]["template"]["spec"]["containers"]
    assert list(_insecure(container.get("securityContext") or {}, "restricted")) == []


@pytest.mark.parametrize("kind", JobKind)
def test_its_role_is_of_its_namespace_and_of_the_kind_that_it_submits(kind):
    loop = loop_of(run_with(), kind)
    role = next(manifest for manifest in loop.objects if manifest["kind"] == "Role")
    assert all("*" not in str(rule) for rule in role["rules"])
    kinds = {name for rule in role["rules"] for name in rule["resources"] if name.endswith("jobs")}
    assert kinds == {"jobs", SERVED.kinds[kind].plural}
    of_cluster = [rule for for_node in loop.for_nodes for rule in for_node.get("rules", ())]
    assert of_cluster == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]


def test_secrets_are_sent_and_not_shown():
    loop = loop_of(run_with(secrets=["HF_TOKEN"]), secret_values={"HF_TOKEN": "correct-horse"})
    assert loop.secret_values == {"HF_TOKEN": "correct-horse"}
    assert "correct-horse" not in str(loop) + repr(loop)


def test_the_loop_submits_the_very_bytes_that_were_carried(tmp_path, monkeypatch):
    """Not those of its own pod: the code's folder is on another machine."""
    archive = bytes(range(256)) * 8000
    for part in config_maps("r-loop", Carried({"code": archive})):
        for key, data in part["binaryData"].items():
            (tmp_path / key).write_bytes(base64.b64decode(data))
    monkeypatch.setattr(code, "CARRIED", str(tmp_path))
    run = run_with(code="/home/me/code", secrets=["KEY=file:/home/me/key"])
    carried = code.gather(run, {LOOP_VARIABLE: "r", "KEY": "value"})
    assert carried.archives == {"code": archive}
    assert carried.secret_values == {"KEY": "value"}


@pytest.fixture
def config_map(server):
    """One ConfigMap of an API server, which takes a change of its newest version alone."""
    value = {"metadata": {"name": "r-loop", "resourceVersion": "1"}, "data": {"history.jsonl": ""}}

    def answer(handler):
        if handler.command == "PATCH":
            change = json.loads(handler.body)
            if change["metadata"].pop("resourceVersion") != value["metadata"]["resourceVersion"]:
                handler.status(409, "Conflict", "the object has been modified")
                return
            value["metadata"] |= change["metadata"]
            value["metadata"]["resourceVersion"] += "1"
            value["data"] |= change.get("data") or {}
        handler.json(value)

    server.on("/api/v1/namespaces/team/configmaps/r-loop", answer)
    return value


def test_a_loop_that_was_replaced_decides_nothing(api, config_map, tmp_path):
    first, second = (LoopRecords(api, RunFolder(tmp_path / pod), "r-loop", pod) for pod in ("a", "b"))
    first.claim()
    first.record("retry", why="gone")
    first.folder.record("checkpoint", step=3)  # as it came from a pod
    first.folder.record("submitted", job="r")
    first.push()
    second.claim()
    assert [record["event"] for record in read_json_lines(second.folder.history)] == [
        "retry",
        "checkpoint",
        "submitted",
    ]
    with pytest.raises(ReplacedError):
        first.record("retry", why="again")
    assert len(list(read_json_lines(first.folder.history))) == 3, "and it wrote down nothing"
    second.record("waits", why="a secret is missing")
    assert config_map["data"]["history.jsonl"].count("\n") == 4


def test_records_that_no_longer_fit_do_not_come_back_behind_newer_ones(api, config_map, tmp_path):
    loop = LoopRecords(api, RunFolder(tmp_path / "pod"), "r-loop", "a")
    loop.claim()
    for number in range(9):
        loop.record("waits", number=number, why="x" * 100_000)
    loop.record("retry", number=9)
    kept = [json.loads(line)["number"] for line in config_map["data"]["history.jsonl"].splitlines()]
    assert kept == list(range(kept[0], 10)), "the last one says what the next pod does"


def test_another_machine_takes_over_what_the_loop_did(api, server, config_map, tmp_path):
    run = run_with()
    folder = RunFolder(tmp_path / "r")
    folder.create(run)
    folder.record("submitted", job="r")
    loop = LoopRecords(api, RunFolder(tmp_path / "pod"), "r-loop", "a")
    config_map["data"]["history.jsonl"] = records_for_loop(folder)
    loop.claim()
    loop.folder.create(run_with(memory="7Gi", context=None, namespace="team"))
    loop.record("retry", why="too much memory", edit={"target.kubernetes.memory": ["500Gi", "7Gi"]})
    server.on(
        "/apis/batch/v1/namespaces/team/jobs/r",
        lambda handler: handler.json({"metadata": {"name": "r", "uid": "second", "annotations": {}}}),
    )
    layout = layout_of(JobKind.INDEXED, run)
    job = ClusterJob("mine", "team", JobKind.INDEXED, "batch/v1", "jobs", "r", "first", "d", "s", layout, ended=True)
    for _ in range(2):
        job = pull(api, folder, job)
    assert (job.uid, job.ended, ClusterJob.of(folder)) == ("second", False, job)
    assert [record["event"] for record in read_json_lines(folder.history)] == ["submitted", "retry"]
    options = folder.load_run().target.kubernetes
    assert (options.memory, options.context) == ("7Gi", "mine")


def test_a_loop_that_was_replaced_finds_out_after_its_back_off(api, config_map, tmp_path):
    first, second = (LoopRecords(api, RunFolder(tmp_path / pod), "r-loop", pod) for pod in ("a", "b"))
    first.claim()
    first.record("retry", why="gone", backoff=300)
    second.claim()
    with pytest.raises(ReplacedError):
        Attempts("no-such-file.yaml", [], None, 60.0, records=first).prepare()


def test_budgets_that_were_filled_up_are_so_for_the_loop(api, config_map, tmp_path):
    policy = Policy(record="retry")
    folder, pod = RunFolder(tmp_path / "r"), RunFolder(tmp_path / "pod")
    folder.create(run_with())
    for step in (10, 20, 30):
        folder.record("checkpoint", step=step - 5)
        folder.record("checkpoint", step=step)
        folder.record("retry", **{"class": "node_lost"})
        folder.record("submitted", job="r")
    assert spent(read_json_lines(folder.history), policy, "node_lost") == 1
    config_map["data"]["history.jsonl"] = records_for_loop(folder)
    LoopRecords(api, pod, "r-loop", "a").claim()
    assert spent(read_json_lines(pod.history), policy, "node_lost") == 1
    loop = LoopRecords(api, pod, "r-loop", "b")
    loop.claim()
    pod.record("checkpoint", step=40)  # as it came from a pod
    loop.record("retry", **{"class": "node_lost"})
    loop.claim()
    assert spent(read_json_lines(pod.history), policy, "node_lost") == 1


@pytest.fixture
def left(api, server, cluster_of_objects, tmp_path):
    """A run whose loop is in the cluster, left there by another machine."""
    server.on("/api/v1/namespaces/team/pods", lambda handler: handler.json({"metadata": {}, "items": []}))
    run, folder = run_with(), RunFolder(tmp_path / "r")
    folder.create(run)
    start(api, folder, loop_of(run))
    return run, folder


def test_a_loop_whose_end_was_interrupted_decides_nothing_and_makes_way(api, cluster_of_objects, left):
    there, _ = cluster_of_objects
    run, folder = left
    job = ClusterJob(
        "here", "team", JobKind.INDEXED, "batch/v1", "jobs", "r", "u", "d", "s", layout_of(JobKind.INDEXED, run)
    )
    assert is_active(api, job)
    there["jobs", "r-loop"]["metadata"]["annotations"] |= {ENDED: "true"}  # as `stop` does first
    assert not is_active(api, job), "or the run would wait for its decision for ever"
    start(api, folder, loop_of(run))
    assert ENDED not in there["jobs", "r-loop"]["metadata"]["annotations"]


def test_a_loop_that_kueue_holds_decides_later_and_says_so(api, server, cluster_of_objects, tmp_path):
    """Where Kueue manages every Job, those in no queue never run: the loop joins that of its run, or one is told."""
    there, _ = cluster_of_objects
    (create,) = server.answers["/apis/batch/v1/namespaces/team/jobs"]

    def held(handler):
        value = json.loads(handler.body)
        value["spec"]["suspend"] = True
        handler.body = json.dumps(value).encode()
        create(handler)

    server.on("/apis/batch/v1/namespaces/team/jobs", held)
    server.on("/api/v1/namespaces/team/pods", lambda handler: handler.json({"metadata": {}, "items": []}))
    folder, run = RunFolder(tmp_path / "r"), run_with(queue="research")
    folder.create(run)
    assert "holds every Job that is in no queue" in check(api, loop_of(run_with()))[0]
    assert check(api, loop_of(run)) == []
    start(api, folder, loop_of(run))
    job = ClusterJob(
        "here", "team", JobKind.INDEXED, "batch/v1", "jobs", "r", "u", "d", "s", layout_of(JobKind.INDEXED, run)
    )
    assert there["jobs", "r-loop"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert is_active(api, job), "it will decide once it is admitted"
    assert "Kueue holds its Job r-loop until it is admitted by the queue research" in trouble(api, job)


def test_a_loop_that_was_half_made_is_made_whole(api, cluster_of_objects, left):
    """Whoever left it was killed behind its Job: the pod waits for a ConfigMap."""
    there, _ = cluster_of_objects
    run, folder = left
    there["roles", "r-loop"]["rules"] = "as it was"
    del there["configmaps", "r-loop"]
    start(api, folder, loop_of(run))
    assert there["configmaps", "r-loop"]["metadata"]["ownerReferences"][0]["uid"] == "uid-r-loop"
    assert there["roles", "r-loop"]["rules"] == "as it was"


def test_a_loop_starts_no_watcher_beside_the_one_that_is_there(tmp_path, monkeypatch):
    run = parse_run({**run_with().model_dump(mode="json"), "notify": {"webhook": "HOOK"}})
    with pytest.raises(UserError, match="HOOK"):
        watcher_of(run, RunFolder(tmp_path))
    monkeypatch.setenv(LOOP_VARIABLE, "r")
    watcher_of(run, RunFolder(tmp_path))()


def test_the_loop_tells_people_each_event_once_though_its_pod_is_replaced(
    api, cluster_of_objects, left, tmp_path, monkeypatch
):
    run, _ = left
    hook = Hook()
    notify = carried(NotifySection(webhook="HOOK", events=("end", "retry")), {"HOOK": hook.url})
    loop = loop_of(run, notify=notify)
    assert hook.url not in str(loop) + repr(loop)
    assert loop.secret_values == notify, "in its Secret alone"
    for name, value in loop.secret_values.items():
        monkeypatch.setenv(name, value)
    there, _ = cluster_of_objects
    there["secrets", "r-loop"]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    old, kept = '{"time":1.0,"event":"restart"}\n', ""
    for pod, event in (("a", "restart"), ("b", "hang"), ("c", "exit")):
        folder = RunFolder(tmp_path / pod / "r")
        folder.path.mkdir(parents=True)
        folder.history.write_text(old + kept)
        notices = LoopNotices(api, folder, "r-loop")
        folder.record(event, state="finished", seconds=9)
        kept = folder.history.read_text().removeprefix(old)
        notices.finish()
    assert [told["text"] for told in hook.received] == ["r starts again", "r is finished"]


def test_who_submits_the_same_name_elsewhere_follows_the_loop_or_is_refused(
    server, cluster_of_objects, left, tmp_path, monkeypatch
):
    """The loop would take a new job back as the one that it decided about."""
    there, _ = cluster_of_objects
    monkeypatch.setenv("WINDLASS_RUNS", str(tmp_path / "elsewhere"))
    run = run_with(context="here", job="job")
    target = KubernetesTarget(_facts={("here", None, "job"): ClusterFacts(SERVED, namespace="team")})
    gathered = Gathered(target.facts(run), Carried(), "s")
    request = target.render(run, gathered)
    with pytest.raises(UserError, match="a retry loop in the cluster decides for the run r"):
        target.submit(run, request)
    with pytest.raises(UserError, match="a retry loop in the cluster decides for the run r"):
        target.start_afresh(run, request)
    assert ("jobs", "r") not in there
    monkeypatch.setenv(LOOP_VARIABLE, "r")
    target.submit(run, request)
    assert not is_marked(RunFolder.of(run)), "the loop does not wait for itself"
    monkeypatch.delenv(LOOP_VARIABLE)
    job = target.submit(run, request)
    assert is_marked(job.folder)
    prepared = Prepared(run, job.folder, target, gathered=None, request=None, rows=[])
    decider = Decider(prepared, {}, job, Policy(), print, job.folder.record, _looked=0.0)  # of a command from before
    server.requests.clear()
    assert not decider.is_held(JobStatus("waiting"))
    assert not any("/events" in path for _, path, _ in server.requests), "it diagnoses what the loop decides about"
