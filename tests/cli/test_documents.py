"""Run files that `init` writes, the schema, and the pages made from the models."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from windlass.catalog.models import presets
from windlass.cli.init import run_file_text
from windlass.cli.reference import sections
from windlass.spec import Run, load_run, parse_run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("preset", presets())
def test_init_writes_a_run_file_that_loads(windlass, tmp_path, preset):
    answer = windlass("init", tmp_path / "my.yaml", "--preset", preset, "--json")
    assert answer.code == 0
    run = load_run(tmp_path / "my.yaml")
    assert run.model.preset == preset
    assert run.name == "my"
    assert run.data.source == ("corpus:austen" if preset.endswith("tiny") else "hf:allenai/c4")


def test_every_comment_of_init_can_be_uncommented():
    text = run_file_text({"model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}})
    keys = [key for section in sections() for key in section.keys]
    for key in keys:
        assert f"{key.name}:" in text
    names = {key.name for key in keys} | set(Run.model_fields)
    lines = []
    for line in text.splitlines():
        bare = line.lstrip("# ").split(":")[0]
        if line.lstrip().startswith("#") and bare in names and ": " in f"{line} ":
            indent = "" if bare in Run.model_fields and not line.startswith("#  ") else "  "
            lines.append(indent + line.lstrip("# "))
        elif not line.lstrip().startswith("#"):
            lines.append(line)
    values = yaml.safe_load("\n".join(lines))
    values.pop("name")
    values["train"]["epsilon"] = float(values["train"]["epsilon"])  # PyYAML reads 1e-08 as text; windlass does not
    defaults = parse_run({"model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}})
    assert parse_run(values) == defaults


@pytest.mark.parametrize("task", ["pretrain", "chat", "lora", "dpo"])
@pytest.mark.parametrize("full", [[], ["--full"]])
def test_init_writes_a_short_file_for_every_task(windlass, tmp_path, task, full):
    beginning = [] if task == "pretrain" else ["--model", "runs/my/export"]
    answer = windlass("init", "my.yaml", "--task", task, *beginning, *full)
    assert answer.code == 0, answer.err
    text = (tmp_path / "my.yaml").read_text()
    assert full or len(text.splitlines()) <= 20
    run = load_run(tmp_path / "my.yaml")
    assert run.data.format == {"pretrain": "text", "dpo": "preference"}.get(task, "chat")
    assert run.train.objective == ("dpo" if task == "dpo" else "next_token")
    assert (run.model.lora is not None) == (task in ("lora", "dpo"))
    assert run.model.init == ("random" if task == "pretrain" else "pretrained")
    assert run.train.steps <= 200


def test_init_needs_a_model_to_fine_tune(windlass, tmp_path):
    answer = windlass("init", "my.yaml", "--task", "lora", "--data", "talks.jsonl")
    assert answer.code == 2
    assert "windlass init my.yaml --task lora --model HUB_ID_OR_FOLDER --data talks.jsonl" in answer.err
    assert not (tmp_path / "my.yaml").exists()


def test_init_overwrites_only_when_told(windlass, tmp_path):
    assert windlass("init", "my.yaml").code == 0
    (tmp_path / "my.yaml").write_text("mine")
    answer = windlass("init", "my.yaml")
    assert answer.code == 2
    assert "--force" in answer.err
    assert (tmp_path / "my.yaml").read_text() == "mine"
    assert windlass("init", "my.yaml", "--force").code == 0
    assert windlass("init", "no/such/my.yaml").code == 2
    answer = windlass("init", "other.yaml", "--preset", "llama-tinny")
    assert answer.code == 2
    assert "--preset llama-tiny" in answer.err
    assert not (tmp_path / "other.yaml").exists()


def test_init_lists_presets(windlass):
    assert "llama3.1-405b" in windlass("init", "--list").out
    assert {one["name"] for one in windlass("init", "--list", "--json").json} == set(presets())


def test_schema(windlass):
    schema = windlass("schema").json
    assert schema["additionalProperties"] is False
    listed = windlass("schema", "--keys", "--json").json
    assert {one["key"] for one in listed} >= {"name", "train.steps", "target.max_restarts"}
    assert all(one["description"] for one in listed)
    assert "train.steps" in windlass("schema", "--keys").out


def test_pages_are_up_to_date():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from make_docs import pages
    finally:
        sys.path.pop(0)
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name} is old: run `make docs`"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_examples_load(path):
    from windlass.plan import check, resolve

    check(resolve(load_run(path)), 2)


@pytest.mark.slow
def test_doctor(windlass):
    answer = windlass("doctor", "--json")
    assert answer.code == (0 if answer.json["can_train"] else 1)
    rows = {row["name"]: row for row in answer.json["rows"]}
    assert rows["python"]["state"] == "ok"
    assert all(row["fix"] for row in rows.values() if row["state"] != "ok")
    assert "torch" in rows


def test_doctor_says_what_is_missing(windlass, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = windlass("doctor", "--json")
    assert answer.code == 1
    assert {"torch", "transformers"} <= {row["name"] for row in answer.json["rows"] if row["state"] == "missing"}
    assert json.dumps(answer.json).count("pip install 'windlass[train]'") >= 2
