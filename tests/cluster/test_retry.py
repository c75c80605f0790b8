"""Three planted faults in a row: the run finishes by itself, also when its client is killed in between."""

import contextlib
import json
import re
import time

import pytest
import yaml

from tests.campaign import campaign
from tests.cluster.bench import HELD_STEP, STEPS, Bench, events, hold, losses
from tests.cluster.test_survival import pod_on_expendable_node

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
    story = bench.must("show", NAME, "--history")
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
