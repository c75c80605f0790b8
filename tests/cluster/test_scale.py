"""A thousand nodes and a job of a thousand workers: show and follow ask little and stay small."""

import json
import subprocess
import sys

import pytest

from tests.cluster.bench import Bench

pytestmark = pytest.mark.cluster

NODES = 1000
MOST_MEGABYTES = 300
SHOW_REQUESTS = 16  # the job, four pages of pods, node 0's log, and what says why it waits: events, nodes, pods
FOLLOW_REQUESTS = 24  # three lists in pages, three watches, and the same reasons; however long it is followed

MEASURED = """
import json, resource, sys, time
from windlass.cli.main import run_command
from windlass.targets.kubernetes.api.http import Api

asked, count = [], Api._count
Api._count = lambda self: (asked.append(1), count(self))[1]
if sys.argv[2] == "show":
    code = run_command(["show", sys.argv[1], "--json"])
    text = run_command(["show", sys.argv[1]])
else:
    from windlass.api.lookup import find
    target, job = find(sys.argv[1])
    with target.following(job):
        end = time.monotonic() + float(sys.argv[3])
        while time.monotonic() < end:
            status, pods = target.status(job), target.pods(job)
            time.sleep(0.2)
    print(json.dumps({"state": status.state, "pods": len(pods)}))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"requests": len(asked), "megabytes": usage.ru_maxrss / 1024}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def bench(cluster, tmp_path_factory):
    cluster.need_box("creates nodes that do not exist")
    with cluster.namespace("scale") as namespace:
        yield Bench(cluster, namespace, tmp_path_factory.mktemp("scale"))


def measured(bench, *arguments):
    answer = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        cwd=bench.folder,
        env=bench.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return answer.stdout, json.loads(answer.stderr.splitlines()[-1])


def test_a_thousand_workers(bench, cluster, capsys):
    selector = 'target.kubernetes.node_selector={"windlass.test/fake": "true"}'
    asked = (f"resources.nodes={NODES}", f"train.global_batch={NODES}", "target.kubernetes.job=job", selector)
    with cluster.fake_nodes(NODES):
        bench.submit("wide", *asked)
        try:
            bench.wait(lambda: len(bench.show("wide")["pods"]) == NODES, "a thousand pods", "wide", 900)
            shown, show = measured(bench, "wide", "show")
            assert json.JSONDecoder().raw_decode(shown)[0]["state"] == "waiting"
            assert f"and {NODES - 32} more" in shown
            said, follow = measured(bench, "wide", "follow", 10)
            assert json.loads(said) == {"state": "waiting", "pods": NODES}
            longer, again = measured(bench, "wide", "follow", 30)
            assert json.loads(longer)["pods"] == NODES
        finally:  # no kubelet would ever end these pods: they go with their nodes
            cluster.kubectl("delete", "job", "wide", "-n", bench.namespace, "--wait=false")
    with capsys.disabled():
        print(
            f"\n{NODES} workers: show {show['requests']} requests, {show['megabytes']:.0f} MB; "
            f"follow 10 s {follow['requests']} requests, 30 s {again['requests']}, {again['megabytes']:.0f} MB"
        )
    assert show["requests"] <= 2 * SHOW_REQUESTS  # it was shown twice
    assert follow["requests"] <= FOLLOW_REQUESTS
    assert again["requests"] <= 2 * FOLLOW_REQUESTS
    assert max(show["megabytes"], follow["megabytes"], again["megabytes"]) < MOST_MEGABYTES
