"""Why a job waits, who is asked for it and how often, and what is done about pods that are stuck."""

import json
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.kubernetes.golden import request_of, run_of
from tests.kubernetes.test_client_state import INDEX, pod_value
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.targets.kubernetes import checks, stopping, submission
from windlass.targets.kubernetes.api import errors as refusals
from windlass.targets.kubernetes.client import KubernetesTarget
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.manifests.cluster_facts import ALWAYS, JobKind
from windlass.targets.kubernetes.manifests.request import PodLayout
from windlass.targets.kubernetes.stopping import remove
from windlass.targets.kubernetes.watch import recovery as recovery_module
from windlass.targets.kubernetes.watch.job_watch import JobSnapshot
from windlass.targets.kubernetes.watch.pods import Pod, pod_of
from windlass.targets.kubernetes.watch.recovery import Recovery
from windlass.targets.kubernetes.watch.waiting import Waiting

EVENTS, PODS = "/api/v1/namespaces/team/events", "/api/v1/namespaces/team/pods"
LAYOUT = PodLayout("windlass.dev/run=llama", (INDEX,), None, num_pods=4, ranks_per_pod=8, container="trainer")
KINDS = {
    JobKind.TRAINJOB: ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
    JobKind.PYTORCHJOB: ("kubeflow.org/v1", "pytorchjobs"),
    JobKind.INDEXED: ("batch/v1", "jobs"),
}
ALIVE = {"metadata": {"uid": "u1"}, "status": {}}


def cluster_job(kind=JobKind.INDEXED, **more):
    version, plural = KINDS[kind]
    return ClusterJob("here", "team", kind, version, plural, "llama", "u1", "d", "s", LAYOUT, **more)


def serve_events(server, *events):
    def answer(handler):
        asked = dict(item.split("=") for item in handler.params["fieldSelector"].split(","))
        found = [
            {"metadata": {}, "type": "Warning", "lastTimestamp": "2026-11-15T06:00:00Z", **event}
            for event in events
            if event["involvedObject"]["name"] == asked["involvedObject.name"]
        ]
        handler.json({"metadata": {}, "items": found})

    server.on(EVENTS, answer)


CHILD = {"involvedObject": {"kind": "Job", "name": "llama-node-0"}, "reason": "FailedCreate"}
OWN = {"involvedObject": {"kind": "PyTorchJob", "name": "llama"}, "reason": "FailedCreatePod"}
QUOTA = 'pods "llama-node-0-0-" is forbidden: exceeded quota: gpu'


@pytest.mark.parametrize(
    ("kind", "event"), [(JobKind.TRAINJOB, CHILD), (JobKind.PYTORCHJOB, OWN)], ids=["trainjob", "pytorchjob"]
)
def test_pods_that_are_refused_are_explained_by_the_events_of_whoever_makes_them(server, api, kind, event):
    serve_events(server, {**event, "message": QUOTA})
    told = Waiting(api, cluster_job(kind)).explain(JobSnapshot(job=ALIVE))
    assert told == f"no pods yet: {event['reason']}: {QUOTA}"
    there = pod_of(pod_value("llama-0", state={"running": {}}), LAYOUT)
    told = Waiting(api, cluster_job(kind)).explain(JobSnapshot(job=ALIVE, pods={"a": there}))
    assert told.startswith("1 of 4 pods: 1 Running; the others are not made: ")
    assert QUOTA in told


def test_pods_that_have_ended_are_waited_for_in_the_shape_of_others(server, api):
    serve_events(server)
    ended = {"state": {"terminated": {"exitCode": 143}}, "phase": "Failed"}
    killed = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "phase": "Failed"}
    pods = [pod_value(f"llama-{i}", i, **item) for i, item in enumerate((ended, killed, ended, ended))]
    seen = {pod["metadata"]["uid"]: pod_of(pod, LAYOUT) for pod in pods}
    told = Waiting(api, cluster_job()).explain(JobSnapshot(job=ALIVE, pods=seen))
    assert told.startswith(
        "4 of 4 pods: 4 Failed; llama-1 ended with code 137 (OOMKilled): its memory limit was reached"
    )
    assert told.endswith("new pods take their place")


def serve_pages(server, path, make, total):
    def answer(handler):
        begin = int(handler.params.get("continue") or 0)
        end = min(total, begin + 250)
        handler.json(
            {"metadata": {"continue": str(end) if end < total else ""}, "items": [make(i) for i in range(begin, end)]}
        )

    server.on(path, answer)


def a_pod(number, phase="Pending", reason="ContainerCreating"):
    running = phase == "Running"
    return Pod(
        f"llama-{number}", str(number), number, phase, "" if running else reason, "", "", 0.0, 0, running, running,
        None, None, False,
    )  # fmt: skip


def test_a_cluster_is_counted_now_and_then_and_not_at_every_change_of_a_pod(server, api):
    """A thousand nodes, five thousand pods, and pods of the run that start one after the other."""
    ready = {"allocatable": {"cpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
    serve_pages(server, "/api/v1/nodes", lambda i: {"metadata": {"name": f"n{i}"}, "status": ready}, 1000)
    serve_pages(
        server,
        "/api/v1/pods",
        lambda i: {
            "metadata": {"name": f"p{i}", "namespace": "x"},
            "spec": {"nodeName": f"n{i % 1000}", "containers": []},
            "status": {"phase": "Running"},
        },
        5000,
    )
    asking = {"containers": [{"resources": {"requests": {"cpu": "64"}}}]}
    server.on(f"{PODS}/llama-999", lambda handler: handler.json({"metadata": {"name": "llama-999"}, "spec": asking}))
    waiting, told = Waiting(api, cluster_job()), ""
    for number in range(20):
        pods = {str(i): a_pod(i, "Running" if i < number else "Pending") for i in range(999)}
        told = waiting.explain(JobSnapshot(job=ALIVE, pods={**pods, "999": a_pod(999, reason="Unschedulable")}))
        assert f"{number} Running" in told or number == 0
    assert "cpu: 64 asked, 8 is the most one node has" in told
    asked = Counter(path for _, path, _ in server.requests)
    assert asked == {"/api/v1/nodes": 4, "/api/v1/pods": 20, f"{PODS}/llama-999": 1}


# -- pods on dead nodes


def leaving(name="llama-0", node="n1", uid="dead", deadline="2026-11-15T06:05:00Z"):
    value = pod_value(name, state={"running": {}}, deleting=True)
    value["metadata"] |= {"uid": uid, "deletionTimestamp": deadline}
    value["spec"]["nodeName"] = node
    return pod_of(value, LAYOUT)


def serve_node(server, name, ready):
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    server.on(f"/api/v1/nodes/{name}", lambda handler: handler.json({"metadata": {"name": name}, "status": status}))


def serve_stuck_pod(server, finalizers=("batch.kubernetes.io/job-tracking",)):
    """A pod that stays until nobody holds it any more; what is done to it is written down."""
    bodies, held = [], list(finalizers)

    def answer(handler):
        body = json.loads(handler.body) if handler.body else None
        bodies.append((handler.command, body))
        if handler.command == "PATCH":
            held.clear()
        if (handler.command == "GET" and not held) or handler.params.get("gone"):
            handler.status(404, "NotFound", "gone")
        else:
            handler.json({"metadata": {"name": "llama-0", "uid": "dead", "finalizers": list(held)}})

    server.on(f"{PODS}/llama-0", answer)
    return bodies


def tend(api, *pods, job=ALIVE, kind=JobKind.INDEXED):
    recovery = Recovery(api, cluster_job(kind))
    return recovery, recovery.tend(JobSnapshot(job=job, pods={pod.uid: pod for pod in pods}))


def test_a_pod_on_a_dead_node_is_taken_out(server, api):
    serve_node(server, "n1", "Unknown")
    bodies = serve_stuck_pod(server)
    recovery, removed = tend(api, leaving())
    assert [(pod.name, pod.node) for pod in removed] == [("llama-0", "n1")]
    (deletion,) = [body for command, body in bodies if command == "DELETE"]
    assert deletion["gracePeriodSeconds"] == 0
    assert deletion["preconditions"] == {"uid": "dead"}  # its successor may have its name
    assert ("PATCH", {"metadata": {"uid": "dead", "finalizers": None}}) in bodies
    assert recovery.tend(JobSnapshot(job=ALIVE, pods={"dead": leaving()})) == []  # once


def test_a_pod_of_an_operator_is_only_deleted(server, api):
    serve_node(server, "n1", "Unknown")
    bodies = serve_stuck_pod(server, finalizers=())
    _, removed = tend(api, leaving(), kind=JobKind.PYTORCHJOB)
    assert len(removed) == 1
    assert [command for command, _ in bodies] == ["DELETE", "GET"]


@pytest.mark.parametrize("ready", ["True", "False"])
def test_a_node_that_answers_ends_its_pods_itself(server, api, ready):
    serve_node(server, "n1", ready)
    bodies = serve_stuck_pod(server)
    assert tend(api, leaving())[1] == []
    assert bodies == []


def test_a_node_that_is_gone_is_dead(server, api):
    serve_stuck_pod(server)
    assert len(tend(api, leaving())[1]) == 1


@pytest.mark.parametrize("job", [None, {"metadata": {"uid": "u1", "deletionTimestamp": "2026-11-15T06:00:00Z"}}])
def test_pods_of_a_job_that_goes_are_let_alone(server, api, job):
    assert tend(api, leaving(), job=job)[1] == []
    assert server.requests == []


def test_without_a_look_at_nodes_a_pod_is_stuck_when_its_grace_is_over(server, api):
    server.on("/api/v1/nodes/n1", lambda handler: handler.status(403, "Forbidden", "nodes is forbidden"))
    serve_stuck_pod(server)
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
    assert tend(api, leaving(deadline=soon))[1] == []
    assert len(tend(api, leaving(deadline="2020-01-01T00:00:00Z"))[1]) == 1


def test_who_may_not_take_a_pod_out_is_told_how_it_is_done(server, api):
    serve_node(server, "n1", "Unknown")
    message = (
        'pods "llama-0" is forbidden: User "ann" cannot delete resource "pods" in API group "" in the namespace "team"'
    )
    server.on(f"{PODS}/llama-0", lambda handler: handler.status(403, "Forbidden", message))
    recovery, removed = tend(api, leaving())
    assert removed == []
    assert "llama-0 is stuck on n1, which does not answer, and you may not delete pods" in recovery.trouble
    assert "kubectl -n team delete pod llama-0 --force --grace-period=0" in recovery.trouble


def test_nodes_of_pods_that_leave_are_asked_for_now_and_then(server, api, monkeypatch):
    serve_node(server, "n1", "True")
    recovery, _ = tend(api, leaving())
    for _ in range(20):
        recovery.tend(JobSnapshot(job=ALIVE, pods={"dead": leaving()}))
    assert len(server.requests) == 1
    monkeypatch.setattr(recovery_module, "LOOK_SECONDS", 0.0)
    recovery.tend(JobSnapshot(job=ALIVE, pods={"dead": leaving()}))
    assert len(server.requests) == 2


def test_a_replaced_pod_that_runs_makes_the_next_wait_short_again(server, api):
    value = pod_value("llama-0", state={"running": {}})
    value["metadata"]["annotations"] = {"batch.kubernetes.io/job-index-ignored-failure-count": "3"}
    bodies = []
    server.on(f"{PODS}/llama-0", lambda handler: (bodies.append(json.loads(handler.body)), handler.json({}))[1])
    pod = pod_of(value, LAYOUT)
    recovery, _ = tend(api, pod)
    recovery.tend(JobSnapshot(job=ALIVE, pods={pod.uid: pod}))
    change = {"batch.kubernetes.io/job-index-ignored-failure-count": "0"}
    assert bodies == [{"metadata": {"uid": "llama-0", "annotations": change}}]


# -- stop


def test_stopping_a_thousand_pods_asks_little(server, api, monkeypatch):
    """It asks whether any pod is left, not for all of them, and `--now` ends them with one request."""
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(stopping, "KILL_SECONDS", 60)  # a slow machine is no lost node
    left = [1000, 1000, 600, 0]

    def pods(handler):
        if handler.command == "DELETE":
            handler.json({})
            return
        number = left.pop(0) if len(left) > 1 else left[0]
        shown = [{"metadata": {"name": f"llama-{i}"}} for i in range(min(number, int(handler.params["limit"])))]
        handler.json({"metadata": {"remainingItemCount": number - len(shown)}, "items": shown})

    server.on(PODS, pods)
    for plural in ("configmaps", "secrets", "services"):
        server.on(f"/api/v1/namespaces/team/{plural}", lambda handler: handler.json({"metadata": {}, "items": []}))
    remove(api, cluster_job(), name="llama", grace=60.0, save_first=False)
    deleted = [(path, params) for command, path, params in server.requests if command == "DELETE"]
    assert deleted == [
        ("/apis/batch/v1/namespaces/team/jobs/llama", {}),
        (PODS, {"labelSelector": "windlass.dev/run=llama"}),
    ]
    assert all(params["limit"] == "1" for command, path, params in server.requests if path == PODS and command == "GET")


def test_who_may_not_delete_collections_deletes_one_by_one(server, api, monkeypatch):
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.01)
    message = 'pods is forbidden: User "ann" cannot deletecollection resource "pods" in API group ""'
    there = {"llama-0", "llama-1"}

    def pods(handler):
        if handler.command == "DELETE":
            handler.status(403, "Forbidden", message)
        else:
            handler.json({"metadata": {}, "items": [{"metadata": {"name": name}} for name in sorted(there)]})

    def one_pod(handler):
        there.discard(handler.path.split("?")[0].rpartition("/")[2])
        handler.json({})

    server.on(PODS, pods)
    for name in sorted(there):
        server.on(f"{PODS}/{name}", one_pod)
    for plural in ("configmaps", "secrets", "services"):
        server.on(f"/api/v1/namespaces/team/{plural}", lambda handler: handler.json({"metadata": {}, "items": []}))
    remove(api, cluster_job(), name="llama", grace=60.0, save_first=False)
    assert there == set()


# -- submit


NOT_ALLOWED = 'configmaps "x" is forbidden: User "ann" cannot {} resource "{}" in API group "" in the namespace "team"'


def submitted(api):
    request = request_of("llama-tiny", JobKind.INDEXED)
    return submission.submit(api, request, ALWAYS, lambda: None)


def test_everything_that_goes_with_a_job_belongs_to_it(api, cluster_of_objects):
    there, _ = cluster_of_objects
    made, _ = submitted(api)
    assert sorted(there) == [
        ("configmaps", "llama-tiny-run"),
        ("jobs", "llama-tiny"),
        ("secrets", "llama-tiny-secrets"),
        ("services", "llama-tiny-host"),
    ]
    for plural in ("configmaps", "secrets", "services"):
        (value,) = [value for (kind, _), value in there.items() if kind == plural]
        assert [owner["uid"] for owner in value["metadata"]["ownerReferences"]] == [made.uid]


@pytest.mark.parametrize(("verb", "plural"), [("PATCH", "configmaps"), ("PATCH", "services"), ("POST", "jobs")])
def test_a_submission_that_fails_half_way_leaves_nothing(api, cluster_of_objects, verb, plural):
    there, refuse = cluster_of_objects
    word = "patch" if verb == "PATCH" else "create"
    refuse[verb, plural] = NOT_ALLOWED.format(word, plural)
    with pytest.raises(UserError, match=f"you may not {word} {plural}"):
        submitted(api)
    assert there == {}


def test_a_webhook_that_has_not_seen_what_was_just_created_is_asked_again(api, cluster_of_objects, monkeypatch):
    there, refuse = cluster_of_objects
    late = 'admission webhook "v.example" denied the request: ConfigMap "llama-tiny-run" not found'
    refuse["POST", "jobs"] = late
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            del refuse["POST", "jobs"]

    monkeypatch.setattr(submission.time, "sleep", sleep)
    submitted(api)
    assert ("jobs", "llama-tiny") in there
    assert len(naps) == 3


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("admission webhook \"vtrainjob.kb.io\" denied the request: runtime 'llama-tiny' not found", True),
        ('admission webhook "v" denied the request: TrainingRuntime "llama-tiny" not found', True),
        ("admission webhook \"vtrainjob.kb.io\" denied the request: runtime 'other' not found", False),
        ("runtime 'llama-tiny' not found", False),
    ],
)
def test_kueue_and_trainer_miss_a_runtime_that_comes_with_the_job(message, missing):
    runtime = {"kind": "TrainingRuntime", "metadata": {"name": "llama-tiny"}}
    assert checks.misses(refusals.RefusedError(403, "Forbidden", message, "no"), runtime) == missing


def test_a_second_submission_completes_what_a_killed_one_began(api, cluster_of_objects):
    there, _ = cluster_of_objects
    made, _ = submitted(api)
    del there["configmaps", "llama-tiny-run"]["metadata"]["ownerReferences"]
    again, take_back = submitted(api)
    assert again.uid == made.uid
    assert there["configmaps", "llama-tiny-run"]["metadata"]["ownerReferences"][0]["uid"] == made.uid
    take_back()
    assert ("jobs", "llama-tiny") in there  # it was not made by this submission


def test_the_same_run_attaches_though_another_node_has_joined(server, api, cluster_of_objects):
    """Threads come from the smallest node: a smaller one that joins must not make it `other settings`."""
    there, _ = cluster_of_objects
    nodes = [16]

    def listed(handler):
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        items = [
            {"metadata": {"name": f"n{i}"}, "status": {**ready, "allocatable": {"cpu": str(cpus)}}}
            for i, cpus in enumerate(nodes)
        ]
        handler.json({"metadata": {}, "items": items})

    server.on("/apis", lambda handler: handler.json({"groups": []}))
    server.on("/version", lambda handler: handler.json({"major": "1", "minor": "36"}))
    server.on("/api/v1/namespaces/team", lambda handler: handler.json({"metadata": {"name": "team"}, "status": {}}))
    server.on("/api/v1/nodes", listed)
    asked = run_of("llama-tiny", JobKind.INDEXED)
    asked = asked.model_copy(update={"resources": asked.resources.model_copy(update={"threads_per_process": None})})

    def prepared(run=asked):
        target = KubernetesTarget()
        settled = resolve(target.settle(run))
        return settled.resources.threads_per_process, target.render(settled, target.gather(settled))

    threads, request = prepared()
    submission.submit(api, request, ALWAYS, lambda: None)
    nodes.append(4)
    again, same = prepared()
    assert (again, same.digest) == (threads, request.digest)
    assert submission.under_way(api, same, ALWAYS) is not None
    other = asked.model_copy(update={"resources": asked.resources.model_copy(update={"threads_per_process": 2})})
    with pytest.raises(UserError, match="with other settings"):
        submission.under_way(api, prepared(other)[1], ALWAYS)
    del there["jobs", "llama-tiny"]
    assert prepared()[0] < threads  # what is there now, where no job is


# -- checks before anything is created

FORBIDDEN_POD = 'pods "llama-tiny-0" is forbidden: '
REFUSALS = {
    "quota": (FORBIDDEN_POD + "exceeded quota: gpus, requested: pods=1, used: pods=2, limited: pods=2", "the quota of"),
    "unsaid": (FORBIDDEN_POD + "failed quota: gpus: must specify memory for: trainer", "say how much it needs"),
    "security": (
        FORBIDDEN_POD + 'violates PodSecurity "restricted:latest": unrestricted capabilities',
        "does not allow",
    ),
    "range": (FORBIDDEN_POD + "maximum cpu usage per Container is 1, but limit is 8", "a limit range of"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_pods_that_would_be_refused_are_refused_before_anything_is_created(server, api, what):
    message, words = REFUSALS[what]
    server.on(PODS, lambda handler: handler.status(403, "Forbidden", message))
    with pytest.raises(UserError, match=words) as error:
        checks.pods_would_be_accepted(api, request_of("llama-tiny", JobKind.INDEXED))
    assert message in error.value.evidence
    assert error.value.fix
    ((command, _, params),) = server.requests
    assert (command, params["dryRun"]) == ("POST", "All")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, 'pods is forbidden: User "ann" cannot create resource "pods" in API group "" in the namespace "team"'),
        (400, 'admission webhook "x.example" does not support dry run'),
    ],
)
def test_pods_that_cannot_be_checked_are_no_obstacle(server, api, code, message):
    server.on(PODS, lambda handler: handler.status(code, "Forbidden", message))
    checks.pods_would_be_accepted(api, request_of("llama-tiny", JobKind.INDEXED))


def test_a_quota_that_takes_some_of_the_pods_is_told(server, api):
    quota = {"metadata": {"name": "two"}, "status": {"hard": {"pods": "3"}, "used": {"pods": "1"}}}
    server.on(
        "/api/v1/namespaces/team/resourcequotas", lambda handler: handler.json({"metadata": {}, "items": [quota]})
    )
    (warning,) = checks.quotas_have_room(api, request_of("llama-tiny", JobKind.INDEXED))
    assert warning == "the quota two: pods: 3 pods ask for 1 each, 2 of 3 is left; the others will wait"


def explained(api, kind, code, message):
    request = request_of("llama-tiny", JobKind.TRAINJOB)
    manifest = next(manifest for manifest in request.objects if manifest["kind"] == kind)
    error = refusals.from_status(api.access, {"code": code, "reason": "Forbidden", "message": message}, "x")
    return checks.explain(api, error, manifest, request)


def test_who_may_not_make_runtimes_is_told_what_needs_none(api):
    message = (
        'trainingruntimes.trainer.kubeflow.org is forbidden: User "ann" cannot create resource "trainingruntimes" '
        'in API group "trainer.kubeflow.org" in the namespace "team"'
    )
    error = explained(api, "TrainingRuntime", 403, message)
    assert "target.kubernetes.runtime=NAME" in error.fix
    assert "target.kubernetes.job=job" in error.fix
    assert "--verb=create" in error.fix


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (422, 'ConfigMap "x" is invalid: []: Too long: may not be more than 1048576 bytes'),
        (413, "Request entity too large: limit is 3145728"),
        (500, "etcdserver: request is too large"),
    ],
)
def test_what_is_too_large_for_a_cluster_is_called_so(api, code, message):
    error = explained(api, "ConfigMap", code, message)
    assert "is too large for the cluster" in error.what
    assert "target.kubernetes.pod" in error.cause


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_queues_are_looked_for_in_the_version_that_kueue_has(server, api, version):
    group = f"kueue.x-k8s.io/{version}"
    server.on("/apis/kueue.x-k8s.io", lambda handler: handler.json({"preferredVersion": {"groupVersion": group}}))
    server.on(f"/apis/{group}/namespaces/team/localqueues/research", lambda handler: handler.json({"metadata": {}}))
    checks.queue_is_there(api, "research", "team")
    with pytest.raises(UserError, match="there is no Kueue queue other"):
        checks.queue_is_there(api, "other", "team")


def test_a_queue_without_kueue(api):
    with pytest.raises(UserError, match="the cluster has no Kueue"):
        checks.queue_is_there(api, "research", "team")


QUOTA_SHORT = "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor p5"


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ([{"type": "QuotaReserved", "status": "False", "message": QUOTA_SHORT}], QUOTA_SHORT),
        ([{"type": "Evicted", "status": "True", "message": "Preempted to accommodate a workload"}], "Preempted to"),
        ([{"type": "Admitted", "status": "False", "reason": "NoReservation"}], "NoReservation"),
        ([], "has not looked at it yet"),
    ],
)
def test_a_job_in_a_queue_says_what_kueue_says(server, api, conditions, words):
    group = "kueue.x-k8s.io/v1beta2"
    server.on("/apis/kueue.x-k8s.io", lambda handler: handler.json({"preferredVersion": {"groupVersion": group}}))
    workload = {"metadata": {}, "spec": {"queueName": "research"}, "status": {"conditions": conditions}}
    path = f"/apis/{group}/namespaces/team/workloads"
    server.on(path, lambda handler: handler.json({"metadata": {}, "items": [workload]}))
    suspended = {"type": "Suspended", "status": "True", "message": "Job suspended"}
    held = {"metadata": {"uid": "u1"}, "status": {"conditions": [suspended]}}
    told = Waiting(api, cluster_job()).explain(JobSnapshot(job=held))
    assert told.startswith("it is held back: Job suspended; Kueue's queue research")
    assert words in told
    assert {"labelSelector": "kueue.x-k8s.io/job-uid=u1", "limit": "250"} in [request[2] for request in server.requests]
    leaving = replace(a_pod(0, "Running"), deleting=True)  # it saves first
    told = Waiting(api, cluster_job()).explain(JobSnapshot(job=held, pods={"0": leaving}))
    assert told.startswith("it is held back: Job suspended; 1 pods leave; Kueue's queue research")


def test_who_may_not_exec_is_told_the_verb(server, api):
    """As Kubernetes 1.36 answers, without a reason."""
    path = f"{PODS}/llama-0/exec"
    server.on(path, lambda handler: handler.status(403, "Forbidden", 'pods "llama-0" is forbidden: '))
    with pytest.raises(UserError, match="you may not create pods/exec in the namespace team") as error:
        api.get(path)
    assert "--verb=create --resource=pods/exec -n team" in error.value.fix
    assert "kubectl auth can-i create pods --subresource=exec" in error.value.fix
