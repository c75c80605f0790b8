"""From a run file to what is built: the planned context, the name, and what the image has to show."""

from __future__ import annotations

import json

import pytest

from windlass.cli.main import run_command
from windlass.errors import UserError
from windlass.image.build.building import build_image, write_beside
from windlass.image.build.job import Settings
from windlass.image.build.preparing import proof_of, small_model, source_of, title_of
from windlass.image.build.records import Records
from windlass.image.facts.node import Node
from windlass.image.read.texts import Fix
from windlass.spec import load_run


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("model: {preset: llama3.2-1b}\ndata: {source: 'corpus:austen'}\n")
    return path


def test_a_planned_image_gets_windlass_itself_and_the_files_of_the_plan(run_file, tmp_path_factory):
    source, node = source_of(load_run(run_file), run_file)
    assert source.dockerfile is None
    assert source.recipe.startswith("FROM ")
    staged = tmp_path_factory.mktemp("staged")
    source.stage(staged)
    assert (staged / ".windlass" / "windlass" / "cli" / "main.py").is_file()
    assert not list(staged.rglob("__pycache__"))
    for name in source.planned:
        assert (staged / name).is_file()
    assert source.content == source_of(load_run(run_file), run_file)[0].content
    assert node.platform == source.platform == "linux/amd64"


def test_the_name_is_the_one_of_the_command_line_then_of_the_run_then_of_this_machine(run_file, tmp_path):
    run = load_run(run_file)
    assert title_of(run, None, tmp_path) == "localhost/my"
    named = load_run(run_file, ["image.name=r.example/team/train:v1"])
    assert title_of(named, None, tmp_path) == "r.example/team/train"
    assert title_of(named, "other", tmp_path) == "localhost/other"
    (tmp_path / "My Project").mkdir()
    assert title_of(None, None, tmp_path / "My Project") == "localhost/my-project"


def test_what_the_run_file_asks_for_must_be_loaded(run_file):
    run = load_run(run_file, ["image.torch=2.14.1", "image.cuda=13.0"])
    proof = proof_of(run, Node(efa=True), "full")
    assert proof.expect == {"torch": "2.14.1", "cuda": "13.0"}
    assert proof.efa
    assert json.loads(proof.order())["model"]["model_type"] == "llama"
    assert small_model(None) is None


@pytest.mark.slow
def test_a_dry_run_prints_the_dockerfile_and_the_command_and_makes_nothing(run_file, tmp_path, capsys, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "buildah").write_text("#!/bin/sh\nexit 0\n")
    (tools / "buildah").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.chdir(tmp_path)
    assert run_command(["image", "build", str(run_file), "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["command"].startswith("buildah build --layers --format oci --platform linux/amd64 --tag localhost/my:")
    assert "COPY .windlass/windlass" in shown["dockerfile"]
    assert not (tmp_path / "images").exists()


def test_a_missing_dockerfile_is_said(tmp_path):
    with pytest.raises(UserError, match=r"there is no .*Dockerfile"):
        source_of(None, None, context=tmp_path)


def test_changed_files_are_written_beside_the_users_own(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM a\n")
    (tmp_path / "requirements.txt").write_text("torch\n")
    source, _ = source_of(None, None, context=tmp_path)
    fixed = source.with_fix(Fix("x", "does x", (), "FROM b\n", {"requirements.txt": "torch==2.14.1\n"}))
    written = {path.name: path.read_text() for path in write_beside(fixed)}
    assert written == {"Dockerfile.windlass": "FROM b\n", "requirements.txt.windlass": "torch==2.14.1\n"}
    assert (tmp_path / "Dockerfile").read_text() == "FROM a\n"
    assert fixed.content != source.content
    assert source_of(None, None, context=tmp_path)[0].content == source.content  # and are no part of the next build


def test_builds_are_attempted_no_more_often_than_allowed_and_never_twice_the_same(tmp_path):
    """A workshop where everything fails for want of one program after the other."""
    from windlass.image.build.building import Failed

    class Broken:
        name = "broken"

        def __init__(self):
            self.recipes = []

        def make(self, job, watcher):
            self.recipes.append(job.source.recipe)
            program = ("git", "curl", "cmake", "unzip")[len(self.recipes) - 1]
            said = ["STEP 2/2: RUN all", f"/bin/sh: 1: {program}: not found"]
            said.append('Error: building at STEP "RUN all": exit status 127')
            return Failed("\n".join(said), tmp_path / "log")

    class Silent:
        def __getattr__(self, name):
            return lambda *arguments: None

    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN all\n")
    source, _ = source_of(None, None, context=tmp_path)
    workshop = Broken()
    with pytest.raises(UserError, match=r"attempt 3 of 3") as refused:
        build_image(source, workshop, Records(tmp_path / "images"), Settings(attempts=3, auto_fix=True), Silent())
    assert len(workshop.recipes) == len(set(workshop.recipes)) == 3
    assert "cmake: not found" in refused.value.evidence
    assert refused.value.cause.count("tried: ") == 2
    workshop = Broken()
    with pytest.raises(UserError, match=r"attempt 1 of 3"):
        build_image(source, workshop, Records(tmp_path / "images"), Settings(attempts=3, auto_fix=False), Silent())


def test_a_planned_image_holds_what_image_requirements_asks_for(tmp_path, tmp_path_factory):
    (tmp_path / "requirements.txt").write_text("-r more.txt\neinops==0.8.1\n")
    (tmp_path / "more.txt").write_text("rich==14.1.0\n")
    path = tmp_path / "my.yaml"
    path.write_text(
        "model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\nimage: {requirements: requirements.txt}\n"
    )
    source, _ = source_of(load_run(path), path)
    assert "own-requirements.txt" in source.recipe
    staged = tmp_path_factory.mktemp("staged")
    source.stage(staged)
    own = (staged / ".windlass" / "own-requirements.txt").read_text()
    assert "einops==0.8.1" in own
    assert "rich==14.1.0" in own
