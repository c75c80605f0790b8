"""The commands for pods, where there are none; and what is said when something they need is missing."""

import subprocess
import sys

import pytest

from windlass.cli.clusters.pods import _split
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import dump_run, load_run, parse_run
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.request import PodLayout
from windlass.targets.kubernetes.syncing import folder_to_send


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("my", "--", "ls", "-l"), ("my", 0, ["ls", "-l"])),
        (("my", "3", "--", "ls"), ("my", 3, ["ls"])),
        (("my", "3", "nvidia-smi", "--help"), ("my", 3, ["nvidia-smi", "--help"])),
        (("my", "--", "--", "x"), ("my", 0, ["--", "x"])),
    ],
)
def test_exec_finds_its_command(words, expected):
    assert _split(words) == expected


def test_exec_without_a_command():
    with pytest.raises(UserError) as error:
        _split(("my", "3", "--"))
    assert error.value.fix == "windlass exec my 3 -- nvidia-smi"


@pytest.fixture
def local_run(windlass, run_file):
    run = load_run(run_file)
    RunFolder.of(run).create(run)
    return run.name


@pytest.mark.parametrize("command", [("exec", "{}", "--", "true"), ("top", "{}"), ("debug", "{}"), ("sync", "{}")])
def test_a_run_without_pods(windlass, local_run, command):
    answer = windlass(*(item.format(local_run) for item in command))
    assert answer.code == 2
    assert "is on the target local" in answer.err


def cluster_job(**facts):
    layout = PodLayout("windlass.dev/run=run", ("index",), None, 1, 1, "trainer")
    kind = facts.pop("kind", JobKind.INDEXED)
    return ClusterJob("here", "team", kind, "batch/v1", "jobs", "run", "u1", "d", "s", layout, **facts)


def run_with_code(folder):
    options = {"kind": "kubernetes", "kubernetes": {"code": folder}}
    return parse_run(
        {"name": "run", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}, "target": options}
    )


def test_a_run_file_from_the_cluster_does_not_choose_the_folder_that_is_sent():
    mine, adopted, run = cluster_job(), cluster_job(adopted=True), run_with_code("~/thesis")
    assert folder_to_send(mine, run, None) == "~/thesis"
    with pytest.raises(UserError, match="not said which folder") as error:
        folder_to_send(adopted, run, None)
    assert "~/thesis" in error.value.evidence
    assert error.value.fix == "windlass sync run --code FOLDER"
    assert folder_to_send(adopted, run, "src") == "src"


def test_code_is_not_sent_to_who_cannot_start_with_it():
    with pytest.raises(UserError, match="cannot be started anew") as error:
        folder_to_send(cluster_job(kind=JobKind.HYPERPOD), run_with_code("src"), None)
    assert "windlass stop run" in error.value.fix
    with pytest.raises(UserError, match="carries no code"):
        folder_to_send(cluster_job(), run_with_code(None), None)


def test_sync_of_an_adopted_run_sends_nothing_unasked(windlass, server, api, tmp_path):
    """From the cluster to a run folder here, and no further."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "draft.py").write_text("x = 1")
    run = dump_run(run_with_code(str(tmp_path / "thesis")))
    job = {
        "metadata": {"name": "run", "uid": "u1", "annotations": {"windlass.dev/name": "run"}},
        "status": {},
    }
    server.on("/apis/batch/v1/namespaces/team/jobs", lambda handler: handler.json({"metadata": {}, "items": [job]}))
    run_map = {"metadata": {"name": "run-run"}, "data": {"run.yaml": run}}
    server.on("/api/v1/namespaces/team/configmaps/run-run", lambda handler: handler.json(run_map))
    server.on("/apis", lambda handler: handler.json({"groups": []}))
    server.on("/version", lambda handler: handler.json({"major": "1", "minor": "36"}))
    answer = windlass("sync", "run", "--on", "kubernetes")
    assert "not said which folder" in answer.err, answer
    assert answer.code == 2
    assert {method for method, _, _ in server.requests} == {"GET"}


def test_only_clusters_know_their_runs(windlass):
    answer = windlass("ls", "--on", "local")
    assert answer.code == 2
    assert "known by their run folders alone" in answer.err


def test_a_cluster_that_is_not_configured(windlass, run_file, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    answer = windlass("run", run_file, "--on", "kubernetes")
    assert answer.code == 2
    assert "no Kubernetes cluster is configured here" in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_missing_library_is_named_with_its_extra(tmp_path):
    program = (
        "import sys\n"
        "sys.modules['httpx2'] = sys.modules['httpcore2'] = None  # the one brings the other\n"
        "from windlass.targets import target_of_kind\n"
        "from windlass.errors import UserError\n"
        "try:\n"
        "    target_of_kind('kubernetes')\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "needs httpx2" in answer.stdout
    assert "pip install 'windlass[k8s]'" in answer.stdout
