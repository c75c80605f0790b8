"""Following a job on a bad day: plugins that fail, streams that are cut, an API that is silent, disks that are full."""

import contextlib
import json
import resource
import signal
import threading
import time

import pytest

from windlass.cli.runs.follow import Follower, Reporter
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.targets.kubernetes.api import credentials as credentials_module
from windlass.targets.kubernetes.api.http import Halt
from windlass.targets.kubernetes.client import KubernetesTarget
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.request import PodLayout
from windlass.targets.kubernetes.watch import job_watch as job_watch_module
from windlass.targets.kubernetes.watch import logs as logs_module
from windlass.targets.kubernetes.watch.archive import opened
from windlass.targets.kubernetes.watch.job_watch import JobWatch, Watched
from windlass.targets.kubernetes.watch.logs import Collector
from windlass.targets.protocol import JobRef

JOBS, PODS = "/apis/batch/v1/namespaces/team/jobs", "/api/v1/namespaces/team/pods"
EVENTS = "/api/v1/namespaces/team/events"
PATIENCE = 30.0


@pytest.fixture
def quick(monkeypatch):
    """The same waits, shorter."""
    monkeypatch.setattr(job_watch_module, "RETRY_SECONDS", (0.1, 0.2, 0.4, 0.8))
    monkeypatch.setattr(job_watch_module, "BLINK_SECONDS", 0.3)
    monkeypatch.setattr(credentials_module, "PAUSE_SECONDS", 0.3)
    monkeypatch.setattr(logs_module, "LAG_SECONDS", 2.0)


class Plugin:
    """A credential plugin that writes down its calls, and fails while it is told to."""

    def __init__(self, folder, seconds=0.0, expires="2000-01-01T00:00:00Z"):
        self.calls, self.offline = folder / "calls", folder / "offline"
        self.path = folder / "aws"
        answer = {"kind": "ExecCredential", "status": {"token": "t", "expirationTimestamp": expires}}
        self.path.write_text(
            f"#!/bin/sh\necho x >> {self.calls}\nsleep {seconds}\n"
            f"if [ -e {self.offline} ]; then echo 'Could not connect to the endpoint URL' >&2; exit 255; fi\n"
            f"echo '{json.dumps(answer)}'\n"
        )
        self.path.chmod(0o755)
        self.user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": str(self.path)}}

    @property
    def num_calls(self):
        return self.calls.read_text().count("x") if self.calls.exists() else 0


class Cluster:
    """A job that trains, and its watches."""

    def __init__(self, server, watch_seconds=1.05):
        self.finished, self.server, self.watch_seconds = False, server, watch_seconds
        self.running_pods, self.restarts = [], {}
        server.on(JOBS, self.jobs)
        server.on(PODS, self.pods)
        server.on(EVENTS, self.nothing)
        server.on("/version", lambda handler: handler.json({"major": "1"}))

    def jobs(self, handler):
        if self.watches(handler):
            return
        done = {"conditions": [{"type": "Complete", "status": "True"}]} if self.finished else {}
        value = {"metadata": {"name": "run", "uid": "u1", "resourceVersion": "5"}, "status": done}
        handler.json({"metadata": {"resourceVersion": "5"}, "items": [value]})

    def pods(self, handler):
        if not self.watches(handler):
            restarts = self.restarts
            items = [running_pod(node, self.finished, restarts.get(node, 0)) for node in self.running_pods]
            handler.json({"metadata": {"resourceVersion": "5"}, "items": items})

    def nothing(self, handler):
        if not self.watches(handler):
            handler.json({"metadata": {"resourceVersion": "5"}, "items": []})

    def watches(self, handler):
        if "watch" not in handler.params:
            return False
        if self.finished:
            handler.status(410, "Expired", "list it again")
            return True
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.flush()
        time.sleep(self.watch_seconds)
        with contextlib.suppress(OSError):
            handler.wfile.write(b"0\r\n\r\n")
        return True


def running_pod(node, ended=False, restarts=0):
    state = {"terminated": {"exitCode": 0}} if ended else {"running": {}}
    return {
        "metadata": {
            "name": f"run-{node}",
            "uid": f"pod-{node}",
            "resourceVersion": "5",
            "labels": {"batch.kubernetes.io/job-completion-index": str(node)},
        },
        "status": {
            "phase": "Succeeded" if ended else "Running",
            "containerStatuses": [{"name": "trainer", "state": state, "restartCount": restarts}],
        },
    }


def cluster_job(nodes=1):
    index = ("batch.kubernetes.io/job-completion-index",)
    layout = PodLayout("windlass.dev/run=run", index, None, nodes, 1, "trainer")
    return ClusterJob("here", "team", JobKind.INDEXED, "batch/v1", "jobs", "run", "u1", "d", "s", layout)


def wait_until(condition, what, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)


def is_finished(snapshot):
    conditions = ((snapshot.job or {}).get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Complete" for condition in conditions)


def test_a_plugin_that_fails_for_a_while_is_reported_and_the_watches_go_on(server, connect, quick, tmp_path):
    plugin, cluster = Plugin(tmp_path), Cluster(server)
    with JobWatch(connect(plugin.user), cluster_job()) as live:
        assert live.wait_until_known(PATIENCE)
        plugin.offline.touch()
        wait_until(lambda: live.read().trouble, "the trouble")
        assert "gave no credentials" in live.read().trouble
        assert "Could not connect to the endpoint URL" in live.read().trouble
        assert " since " in live.read().trouble
        cluster.finished = True
        plugin.offline.unlink()
        wait_until(lambda: is_finished(live.read()), "the end of the job")
        wait_until(lambda: live.read().trouble is None, "the end of the trouble")
        assert live._job.thread.is_alive()
        assert live._pods.thread.is_alive()


BROKEN_LINES = [
    b'{"type":"MODIFIED","object":{"metadata":{"resourceVe',  # cut by a proxy, and ended cleanly
    b"<html>please log in</html>\n",
    b"[1, 2]\n",
    b'{"type":"MODIFIED"}\n',
    b'{"type":"MODIFIED","object":{"metadata":{"resourceVersion":7}}}\n',
    b'{"type":"ERROR","object":{"code":"no number"}}\n',
    b'{"type":"ERROR","object":[]}\n',
    b"[" * 100_000 + b"\n",
    b"\xff\xfe\n",
]


@pytest.mark.parametrize("line", BROKEN_LINES)
def test_a_broken_line_does_not_end_a_watch(server, connect, line):
    listed = lambda handler: handler.json({"metadata": {"resourceVersion": "1"}, "items": []})  # noqa: E731
    good = b'{"type":"ADDED","object":{"metadata":{"name":"b","resourceVersion":"2"}}}\n'
    blocked = threading.Event()

    def answer(handler):
        if "watch" not in handler.params:
            listed(handler)
        elif sum("watch" in params for _, _, params in server.requests) == 1:
            handler.stream(line)
        else:
            handler.stream(good)
            blocked.wait(PATIENCE)

    server.on("/pods", answer)
    changes, troubles, halt = [], [], Halt()
    watched = Watched(
        connect(),
        "/pods",
        halt,
        listed=lambda _: None,
        changed=lambda kind, value: changes.append((kind, value["metadata"]["name"])),
        trouble=troubles.append,
    )
    watched.start()
    try:
        wait_until(lambda: ("ADDED", "b") in changes, "the change after the broken line", 15)
        assert any(troubles), troubles
    finally:
        blocked.set()
        halt.now()


def test_what_a_change_leads_to_may_fail_once(server, connect):
    """Whatever the taking in of a change raises is reported, and made up for by a new list."""
    blocked, lists, troubles, halt = threading.Event(), [], [], Halt()

    def answer(handler):
        if "watch" not in handler.params:
            handler.json({"metadata": {"resourceVersion": "1"}, "items": []})
            return
        handler.stream(b'{"type":"ADDED","object":{"metadata":{"name":"b","resourceVersion":"2"}}}\n')
        blocked.wait(PATIENCE)

    def fail(kind, value):
        raise OSError(28, "No space left on device")

    server.on("/pods", answer)
    watched = Watched(connect(), "/pods", halt, listed=lists.append, changed=fail, trouble=troubles.append)
    watched.start()
    try:
        wait_until(lambda: len(lists) >= 2, "the second list")
        assert any("No space left on device" in trouble for trouble in troubles if trouble)
    finally:
        blocked.set()
        halt.now()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "most_requests"),
    [
        pytest.param(lambda request: request.stream(), 6, id="ended at once"),
        pytest.param(lambda request: request.status(410, "Expired", "too old"), 10, id="always too old"),
    ],
)
def test_a_watch_that_cannot_go_on_backs_off(server, connect, answer, most_requests):
    listed = {"metadata": {"resourceVersion": "1"}, "items": []}
    server.on("/pods", lambda request: answer(request) if "watch" in request.params else request.json(listed))
    halt = Halt()
    watched = Watched(connect(), "/pods", halt, listed=lambda _: None, changed=lambda *_: None, trouble=lambda _: None)
    watched.start()
    time.sleep(2.0)
    halt.now()
    assert len(server.requests) <= most_requests


def in_parallel(number, task):
    threads = [threading.Thread(target=task, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def test_forty_requests_need_one_plugin(server, connect, tmp_path):
    server.on("/x", lambda handler: handler.json({}))
    plugin = Plugin(tmp_path, seconds=0.3, expires="2999-01-01T00:00:00Z")
    api = connect(plugin.user)
    plugin.calls.unlink()  # the first call was for a certificate that it might have had
    api.credentials.issued = None
    in_parallel(40, lambda: api.get("/x"))
    assert plugin.num_calls == 1


def test_forty_requests_need_one_plugin_that_fails(server, connect, tmp_path):
    server.on("/x", lambda handler: handler.json({}))
    plugin = Plugin(tmp_path, seconds=0.3)
    api = connect(plugin.user)
    plugin.offline.touch()
    plugin.calls.unlink()
    errors = []

    def ask():
        try:
            api.get("/x")
        except Exception as error:
            errors.append(error)

    in_parallel(40, ask)
    assert {type(error).__name__ for error in errors} == {"UserError"}
    assert len(errors) == 40
    assert plugin.num_calls <= 2


def test_forty_refused_tokens_need_one_new_one(server, connect, tmp_path):
    calls, plugin = tmp_path / "calls", tmp_path / "plugin"
    plugin.write_text(
        f"#!/bin/sh\necho x >> {calls}\nsleep 0.2\n"
        f'echo "{{\\"status\\": {{\\"token\\": \\"token-$(wc -l < {calls} | tr -d " ")\\"}}}}"\n'
    )
    plugin.chmod(0o755)
    first, everyone = threading.Event(), threading.Barrier(20)

    def guarded(handler):
        if handler.headers["Authorization"] == "Bearer token-1":
            if not first.is_set():
                everyone.wait(PATIENCE)
                first.set()
            handler.status(401, "Unauthorized", "Unauthorized")
        else:
            handler.json({})

    server.on("/x", guarded)
    api = connect({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}})
    in_parallel(20, lambda: api.get("/x"))
    assert calls.read_text().count("x") == 2


class News(Reporter):
    """What `windlass run` would print."""

    def __init__(self):
        self.reports = []

    def report(self, text, record):
        self.reports.append((time.monotonic(), text))

    def has(self, words):
        return any(words in text for _, text in self.reports)


@pytest.fixture
def follow(tmp_path, quick):
    """`windlass run` of a job that trains, without a terminal: what it says, until it ends."""
    run = parse_run({"name": "run", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}})
    folder = RunFolder(tmp_path / "runs" / "run")
    folder.create(run)
    cluster_job().write(folder)
    folder.record("launched", attempt=1)
    folder.record("started", step=0)

    def start():
        news, ended = News(), []
        job, target = JobRef("kubernetes", "run", folder), KubernetesTarget()
        thread = threading.Thread(target=lambda: ended.append(Follower(folder).follow(target, job, news)), daemon=True)
        thread.start()
        return news, thread, ended

    start.folder = folder
    return start


@pytest.mark.slow
def test_an_api_that_is_silent_is_named_while_the_run_trains_and_when_it_is_back(server, connect, follow, monkeypatch):
    """The connections stay open, and nothing comes: as when a network is cut, or the server hangs."""
    monkeypatch.setattr(job_watch_module, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(job_watch_module, "ANSWER_SECONDS", 0.3)
    cluster = Cluster(server, watch_seconds=60.0)
    cluster.running_pods = [0]
    server.on(f"{PODS}/run-0/log", lambda handler: (time.sleep(0.3), handler.stream()))
    connect()
    silent, back = threading.Event(), threading.Event()
    server.on("/version", lambda handler: back.wait(PATIENCE) if silent.is_set() else handler.json({}))
    news, thread, ended = follow()
    wait_until(lambda: any("watch" in params for _, path, params in server.requests if path == JOBS), "the watch")
    time.sleep(1.0)
    assert not news.reports
    silent.set()
    wait_until(lambda: news.has("does not answer since"), "word of the silence", 10)
    cluster.watch_seconds = 1.05  # of watches that are opened from now on: those that are open stay silent
    silent.clear()
    back.set()
    wait_until(lambda: news.has("all is well again"), "word of its end", 10)
    assert not ended
    cluster.finished = True
    thread.join(PATIENCE)
    assert [record.state for record in ended] == ["finished"]


@pytest.mark.slow
def test_a_run_is_followed_to_its_end_although_the_plugin_failed(server, connect, follow, tmp_path):
    plugin, cluster = Plugin(tmp_path), Cluster(server)
    connect(plugin.user)
    news, thread, ended = follow()
    wait_until(
        lambda: {path for _, path, params in server.requests if "watch" in params} >= {JOBS, PODS}, "the watches"
    )
    plugin.offline.touch()
    wait_until(lambda: news.has("gave no credentials"), "word of the plugin")
    cluster.finished = True
    plugin.offline.unlink()
    thread.join(PATIENCE)
    assert [record.state for record in ended] == ["finished"]


@pytest.mark.slow
def test_a_full_disk_loses_no_line_and_ends_no_thread(server, connect, follow):
    cluster = Cluster(server)
    cluster.running_pods = [0]
    lines = [f"2026-11-15T06:00:{tick:02d}.000000001Z [rank 0] line {tick} {'x' * 60}\n" for tick in range(40)]
    server.on(f"{PODS}/run-0/log", lambda handler: handler.stream("".join(lines).encode()))
    connect()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    full = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, full[1]))
    try:
        news, thread, ended = follow()
        wait_until(lambda: news.has("the run folder here falls behind"), "word of the full disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, full)
    log = follow.folder.rank_log(0)
    wait_until(lambda: log.exists() and log.read_text().count("\n") == len(lines), "the rest of the lines")
    cluster.finished = True
    thread.join(PATIENCE)
    assert [record.state for record in ended] == ["finished"]
    assert log.read_text() == "".join(line.partition("[rank 0] ")[2] for line in lines)


@pytest.mark.slow
def test_many_pods_are_read_in_streams_and_in_turns_without_loss_or_repetition(server, connect, tmp_path, monkeypatch):
    """More pods than streams; every line of every pod once and in order, those of a container before a restart too."""
    monkeypatch.setattr(logs_module, "MAX_STREAMS", 3)
    monkeypatch.setattr(logs_module, "TURN_SECONDS", 0.3)
    monkeypatch.setattr(logs_module, "LOOK_SECONDS", 0.1)
    cluster, nodes, num_lines = Cluster(server), range(8), 30
    cluster.running_pods, cluster.restarts = list(nodes), {5: 1}
    grown = dict.fromkeys(nodes, 5)

    def line(node, tick, word="line"):
        return f"2026-11-15T06:00:{tick:02d}.{tick % 2}Z [rank {node}] {word} {tick}\n".encode()

    def log_of(node):
        def answer(handler):
            since = handler.params.get("sinceTime", "")
            if handler.params.get("previous"):
                first = [b"2026-11-15T05:00:00Z [rank 5] before the restart\n"]
            else:
                grown[node] = min(num_lines, grown[node] + 5)  # it says more each time
                first = [line(node, tick) for tick in range(grown[node])]
            handler.stream(
                b"".join(text for text in first if text[:19] >= since[:19].encode()), broken=grown[node] == 15
            )

        return answer

    for node in nodes:
        server.on(f"{PODS}/run-{node}/log", log_of(node))
    folder = RunFolder(tmp_path / "runs" / "run")
    with (
        JobWatch(connect(), cluster_job(nodes=len(nodes))) as live,
        opened(folder) as archive,
        Collector(live.api, live.job, live, archive) as collector,
    ):
        wait_until(lambda: all(grown[node] == num_lines for node in nodes), "all lines")
        cluster.finished = True
        assert collector.drain(PATIENCE)
    for node in nodes:
        wanted = [f"line {tick}" for tick in range(num_lines)]
        before = ["before the restart"] if node == 5 else []
        assert folder.rank_log(node).read_text().splitlines() == before + wanted


def test_leaving_does_not_wait_for_a_kubelet_that_hangs(server, connect, tmp_path, monkeypatch):
    """And what it says in the end is left to the next who keeps the archive."""
    monkeypatch.setattr(logs_module, "MAX_STREAMS", 1)
    monkeypatch.setattr(logs_module, "LEAVE_SECONDS", 0.5)
    cluster, answer, answered = Cluster(server), threading.Event(), threading.Event()
    cluster.running_pods = [0, 1]

    def hang(handler):
        answer.wait(PATIENCE)
        handler.stream(b"2026-11-15T06:00:00Z [rank 1] late\n")
        answered.set()

    for node in (0, 1):
        server.on(f"{PODS}/run-{node}/log", hang)
    folder = RunFolder(tmp_path / "runs" / "run")
    with JobWatch(connect(), cluster_job(nodes=2)) as live, opened(folder) as archive:
        with Collector(live.api, live.job, live, archive):
            wait_until(lambda: sum(path.endswith("/log") for _, path, _ in server.requests) == 2, "both questions")
            begin = time.monotonic()
        assert time.monotonic() - begin < 5
    answer.set()
    assert answered.wait(PATIENCE)
    time.sleep(0.5)
    assert not folder.rank_log(1).exists()
