"""`import windlass`: the functions, and that they return what the commands print."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import windlass as api
from windlass.api.schemas import printed
from windlass.runfolder import RunFolder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)
    return tmp_path


def test_importing_windlass_imports_nothing_else():
    program = (
        "import sys; before = set(sys.modules); import windlass\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'torch', 'pydantic', 'click', 'yaml'}, new\n"
        "assert set(windlass.__all__) <= set(dir(windlass))\n"
        "for name in windlass.__all__: getattr(windlass, name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_says_what_it_does():
    for name in api.__all__:
        assert getattr(api, name).__doc__
    for name, member in vars(api.Job).items():
        if not name.startswith("_") and name not in ("find", "name"):
            assert member.__doc__, name
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        api.nothing_of_this_name  # noqa: B018


def test_mistakes_are_user_errors(here, run_file):
    with pytest.raises(api.UserError, match=r"there is no run file"):
        api.load("smal.yaml")
    with pytest.raises(api.UserError) as wrong:
        api.load(run_file, "train.stepz=3")
    assert "train.steps" in str(wrong.value)
    run = api.load(run_file)
    with pytest.raises(api.UserError, match="there is no target 'moon'"):
        api.submit(run, on="moon")
    with pytest.raises(api.UserError, match="has no name"):
        api.submit(run.model_copy(update={"name": ""}))
    with pytest.raises(api.UserError, match="there is no run 'small'"):
        api.job("small")
    assert api.jobs() == []
    assert not (here / "runs").exists()


def test_plans_and_dry_runs_are_what_the_commands_print(here, windlass, run_file):
    run = api.load(run_file, "train.steps=9")
    assert run.train.steps == 9
    settings = [run_file, "train.steps=9"]
    assert printed(api.plan_run(run)) == windlass("plan", *settings, "--json").json
    assert printed(api.plan_run(run.model_copy(update={"resources": type(run.resources)()}), gpu="H200")) == (
        windlass("plan", *settings, "resources={}", "--gpu", "H200", "--json").json
    )
    dry = windlass("run", *settings, "target.port=29555", "--dry-run", "--json").json
    assert printed(api.dry_run(api.load(run_file, "train.steps=9", "target.port=29555"))) == dry
    assert "sbatch" in api.dry_run(run, on="slurm", offline=True).request.argv[0]
    assert api.dry_run(run, on="slurm:login", offline=True).run.target.host == "login"


def test_a_run_file_may_be_named_in_the_place_of_its_run(here, run_file):
    run = api.load(run_file)
    for named in (run_file, str(run_file)):
        assert api.plan_run(named) == api.plan_run(run)
        assert api.dry_run(named, on="slurm", offline=True) == api.dry_run(run, on="slurm", offline=True)
    for use in (api.plan_run, api.dry_run, api.submit, api.train):
        with pytest.raises(api.UserError, match=r"there is no run file smal\.yaml"):
            use("smal.yaml")
        with pytest.raises(api.UserError, match=r"a run or the path of a run file is wanted, not dict") as wrong:
            use({"model": {"preset": "llama-tiny"}})
        assert "windlass.load" in wrong.value.fix
    folder = RunFolder.of(run)
    folder.create(run)
    assert api.job(folder.path).name == api.job("small").name == "small"


def test_training_here_goes_on_with_the_same_settings_alone(here, run_file):
    from windlass.plan import resolve

    run = api.load(run_file, "resources.processes_per_node=1")
    folder = RunFolder.of(run)
    folder.create(resolve(run))
    folder.record("checkpoint", step=2)
    with pytest.raises(api.UserError, match="exists with other settings") as told:
        api.train(run, loss=lambda logits, labels: logits.sum())
    assert "train.loss" in str(told.value)

    program = "import time; time.sleep(60)"
    marked = {"WINDLASS_FOLDER": str(folder.path.resolve())}
    with subprocess.Popen([sys.executable, "-c", program], env=marked) as other:
        try:
            with pytest.raises(api.UserError, match="already running"):
                api.train(run)
        finally:
            other.kill()


@pytest.mark.train
def test_two_programs_do_not_train_in_one_folder(here, run_file):
    settings = ("resources.processes_per_node=1", "train.steps=100000")
    program = f"import windlass; windlass.train(windlass.load({str(run_file)!r}, *{settings}))"
    run = api.load(run_file, *settings)
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"}) as other:
        metrics = RunFolder.of(run).metrics
        while not metrics.exists():
            assert other.poll() is None
            time.sleep(0.05)
        with pytest.raises(api.UserError, match="already running") as refused:
            api.train(run)
        assert refused.value.error_code == "under-way"
        other.kill()


def test_a_model_that_is_made_already_is_refused_in_words(run_file):
    torch = pytest.importorskip("torch")
    with pytest.raises(api.UserError, match="instance of Linear") as refused:
        api.train(api.load(run_file), model=torch.nn.Linear(2, 2))
    assert "save_pretrained" in (refused.value.fix or "")


def test_lines_with_a_date_that_is_none():
    from windlass.api.jobs import _newer
    from windlass.targets.protocol import LogLine

    lines = [LogLine(rank=0, text=text) for text in ("2026-01-01 00:00:00 a", "2026-99-99 00:00:00 b")]
    assert list(_newer(iter(lines), 1.0)) == lines


@pytest.mark.train
def test_a_run_from_start_to_end(here, windlass, run_file):
    """Everything that can be asked of a run that trains, is stopped, goes on and finishes."""
    settings = ("train.warmup_steps=1", "checkpoint.every=500")
    run = api.load(run_file, "train.steps=2000", *settings)
    job = api.submit(run, on="local")
    assert job.wait(timeout=0).state in ("waiting", "running")
    assert next(line for line in job.logs(follow=True) if line.rank == 1)
    while not job.status().step:
        job.wait(timeout=0.2)
    again = api.submit(run)  # under way: the same job
    assert (again.name, again.folder) == (job.name, job.folder)
    stopped = job.stop()
    assert (stopped.was, stopped.state) == ("running", "stopped")
    assert 0 < (stopped.step or 0) < 2000

    job = api.submit(api.load(run_file, f"train.steps={stopped.step + 2}", *settings))
    assert any("train.steps" in warning for warning in job.warnings)
    result = job.wait()
    assert (result.state, result.exit_code, result.error) == ("finished", 0, None)
    assert result.summary.steps == stopped.step + 2
    assert job.status().state == "finished"
    table = job.metrics()
    assert table["step"] == list(range(1, stopped.step + 3))
    assert table["loss"][-1] == result.summary.loss
    job = api.job("small")
    shown = windlass("show", "small", "--json", "--curve").json
    assert printed(job.show(curve=True)) == shown
    assert [printed(line) for line in job.logs(tail=2)] == windlass("logs", "small", "--tail", "2", "--json").json
    assert printed(job.why()) == windlass("why", "small", "--json").json
    assert printed(api.jobs()[0]) == windlass("ls", "--json").json[0]
    done = api.submit(api.load(run_file, f"train.steps={stopped.step + 2}", *settings)).wait()
    assert done.summary == result.summary  # finished: nothing was started
