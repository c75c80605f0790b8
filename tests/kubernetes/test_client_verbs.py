"""The commands for pods, where there are none; and what is said when something they need is missing."""

import subprocess
import sys

import pytest

from tests.cli.conftest import run_file, windlass  # noqa: F401
from windlass.cli.exec import _split
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import load_run


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
def local_run(windlass, run_file):  # noqa: F811
    run = load_run(run_file)
    RunFolder.of(run).create(run)
    return run.name


@pytest.mark.parametrize("command", [("exec", "{}", "--", "true"), ("top", "{}"), ("debug", "{}"), ("sync", "{}")])
def test_a_run_without_pods(windlass, local_run, command):  # noqa: F811
    answer = windlass(*(one.format(local_run) for one in command))
    assert answer.code == 2
    assert "is on the target local" in answer.err


def test_only_clusters_know_their_runs(windlass):  # noqa: F811
    answer = windlass("ls", "--on", "local")
    assert answer.code == 2
    assert "known by their run folders alone" in answer.err


def test_a_cluster_that_is_not_configured(windlass, run_file, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    answer = windlass("run", run_file, "--on", "kubernetes")
    assert answer.code == 2
    assert "no Kubernetes cluster is configured here" in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_missing_library_is_named_with_its_extra(tmp_path):
    program = (
        "import sys\n"
        "sys.modules['httpx2'] = None\n"
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
