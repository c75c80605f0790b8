"""Three planted faults in a row: the run finishes by itself, also when its client is killed in between."""

import contextlib
import json
import re
import time

import pytest
import yaml

from tests.campaign import campaign
from tests.cli.test_notify import SECRET, Hook
from tests.cluster.bench import HELD_STEP, STEPS, Bench, events, hold, losses
from tests.cluster.box.layout import HOST
from tests.cluster.test_survival import pod_on_expendable_node
from windlass.runfolder import RunFolder, steps_of

pytestmark = pytest.mark.cluster
NAME = "unlucky"
TRACEBACK = re.compile(
    r'transformers.py", line 1, in <module>\n.*\nModuleNotFoundError: No module named .no_such_module.'
)


@pytest.fixture
def bench(cluster, namespace, tmp_path):
    cluster.need_box("cuts a node's power")
    return Bench(cluster, namespace, tmp_path)


def plant(bench):
    """A variable from a Secret that is not there yet, and more memory than any node has."""
    value = yaml.safe_load(bench.file.read_text())
    options = value["target"]["kubernetes"]
    late = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "late", "key": "token"}}}
    options["pod"]["containers"][0]["env"].append(late)
    options |= {"memory": "500Gi", "job": "job", "node_lost_seconds": 4, "max_pod_failures": 0}
    value["resources"]["nodes"] = 2
    bench.file.write_text(yaml.safe_dump(value))


def is_over(bench, job):
    return any(one["status"] == "True" for one in job_status(bench, job).get("conditions", ()))


def job_status(bench, name):
    return bench.cluster.get("job", name, bench.namespace)["status"]


def decided(bench, event):
    """Whether the loop has written this down, asked without any help of windlass."""
    records = bench.cluster.get("configmap", f"{NAME}-loop", bench.namespace)["data"]["history.jsonl"]
    return any(json.loads(line)["event"] == event for line in records.splitlines())


@pytest.mark.campaign
@pytest.mark.campaign_only
def test_three_faults_in_a_row_with_nobody_there(bench):
    """`--detach`: the client leaves after the submission, and looks again when all is over; the loop tells people."""
    plant(bench)
    hook = Hook(HOST)
    bench.environment["HOOK"] = hook.url
    bench.must("run", bench.file, f"name={NAME}", "notify.webhook=HOOK", "--detach", *hold(30))
    assert SECRET not in bench.cluster.kubectl("get", "jobs,configmaps,pods", "-n", bench.namespace, "-o", "json")
    for event in ("retry", "waits"):
        bench.wait(lambda event=event: decided(bench, event), f"the loop's decision {event}", NAME)
    bench.cluster.kubectl("create", "secret", "generic", "late", "-n", bench.namespace, "--from-literal=token=x")
    there = RunFolder(bench.cluster.storage(bench.namespace) / NAME)
    bench.wait(lambda: max(steps_of(there), default=0) >= HELD_STEP - 1, "the held step", NAME, 600)
    _, node = pod_on_expendable_node(bench, NAME)
    bench.cluster.cut_power(node)
    try:
        bench.wait(lambda: is_over(bench, f"{NAME}-loop"), "the end of the loop", NAME, 600)
    finally:
        bench.cluster.restart_node(node)
    assert not events(bench.run_folder(NAME), "retry"), "the client was gone"
    titles = [told["text"] for told in hook.received]
    assert (titles[0], titles[-1]) == (f"{NAME} starts again", f"{NAME} is finished"), titles
    assert any("Insufficient memory" in told["attachments"][0]["text"] for told in hook.received), hook.received
    must_tell_the_story(bench)
    assert bench.show(NAME)["state"] == "finished"
    assert bench.json("why", NAME)["class"] == "succeeded"
    bench.must("stop", NAME)
    kinds = "jobs,configmaps,secrets,roles,rolebindings"
    left = bench.cluster.kubectl("get", kinds, "-n", bench.namespace, "-l", "windlass.dev/loop", "-o", "name")
    assert left == ""


@pytest.mark.parametrize("kills", campaign([2, 0], always=1))
def test_three_faults_in_a_row(bench, kills):
    plant(bench)
    folder = bench.run_folder(NAME)
    command = ("run", bench.file, f"name={NAME}", *hold(30))
    with contextlib.ExitStack() as stack:
        follower = stack.enter_context(bench.following(*command))
        for number, what in enumerate(("retry", "waits")):
            bench.wait(lambda what=what: events(folder, what), f"the decision {what}", NAME)
            if number < kills:  # it is written down, and perhaps not acted upon
                follower.kill()
                follower.wait()
                follower = stack.enter_context(bench.following(*command))
        bench.cluster.kubectl("create", "secret", "generic", "late", "-n", bench.namespace, "--from-literal=token=x")
        bench.wait_for_step(NAME, HELD_STEP - 1)
        _, node = pod_on_expendable_node(bench, NAME)
        bench.cluster.cut_power(node)
        stack.callback(bench.cluster.restart_node, node)
        assert follower.wait(timeout=600) == 0, bench.said() + bench.evidence(NAME)
    must_tell_the_story(bench)


def must_tell_the_story(bench):
    story, folder = bench.must("show", NAME, "--history"), bench.run_folder(NAME)
    told = [
        "Insufficient memory",
        "+ target.kubernetes.memory",
        'secret "late" not found',
        "restarting",
        "trained to step",
    ]
    assert sorted(told, key=story.index) == told, story
    assert [one["class"] for one in events(folder, "retry")] == ["cpu_memory_request"], "one decision, taken once"
    assert len(events(folder, "submitted")) == 2
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))


def test_a_user_error_is_on_the_screen_at_once_and_not_tried_again(bench):
    code = bench.folder / "code"
    code.mkdir()
    (code / "transformers.py").write_text("import no_such_module\n")
    asked = ("resources.nodes=1", "train.global_batch=2", "target.kubernetes.job=job", f"target.kubernetes.code={code}")
    with bench.following("run", bench.file, "name=wrong", *asked) as follower:
        bench.wait(lambda: TRACEBACK.search(bench.said()), "the traceback on the screen", "wrong")
        shown = time.time()
        assert follower.wait(timeout=120) == 1, bench.said()
    assert "error: ModuleNotFoundError: No module named 'no_such_module'\n  evidence  Traceback" in bench.said()
    folder = bench.run_folder("wrong")
    assert shown - json.loads(folder.rank_error(0).read_text())["time"] < 10
    assert [one["event"] for one in events(folder, "launched", "retry", "restart")] == ["launched"]
    assert events(folder, "gave-up")[0]["class"] == "user_import"
