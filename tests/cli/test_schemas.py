"""The published schemas of --json: every command has one, and what tests see of any command is held against it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import click
import pytest
from jsonschema import Draft202012Validator

from tests.outputs import WrongOutputError, check_printed, check_value, command_in, outputs_of
from windlass.api.schemas import SCHEMA_VERSION, runs
from windlass.api.schemas.outputs import OUTPUTS, schema_of
from windlass.cli import output
from windlass.cli.main import cli
from windlass.targets.kubernetes.network import Finding
from windlass.targets.kubernetes.pod import programs as inside
from windlass.targets.protocol import JobStatus, PodRow
from windlass.trainer.reporting import StepMetrics

STATUS = JobStatus("running", step=3, steps=9).as_dict()
ROW = {"name": "a", "target": "local", "started": None, **STATUS}


def commands_with_json(place=cli, path=()):
    context = click.Context(place)
    if isinstance(place, click.Group):
        for name in place.list_commands(context):
            yield from commands_with_json(place.get_command(context, name), (*path, name))
    elif any("--json" in one.opts for one in place.params):
        yield " ".join(path), place


def test_every_command_with_json_has_a_schema_and_no_other():
    there = dict(commands_with_json())
    assert set(there) == {one.command for one in OUTPUTS} - {"error"}
    for one in OUTPUTS:
        known = {option for parameter in there[one.command].params for option in parameter.opts} if one.typed else set()
        assert one.options <= known


def test_the_schema_is_one_and_unknown_keys_are_allowed():
    schema = schema_of(OUTPUTS)
    Draft202012Validator.check_schema(schema)
    assert schema["schema_version"] == SCHEMA_VERSION
    listed = Draft202012Validator(schema_of([one for one in OUTPUTS if one.name == "ls"]))
    assert listed.is_valid([ROW])
    assert listed.is_valid([{**ROW, "new_in_a_later_version": 1}])
    assert not listed.is_valid([{**ROW, "state": 3}])
    assert not listed.is_valid([{key: value for key, value in ROW.items() if key != "name"}])


def test_a_schema_can_be_asked_for(windlass):
    one = windlass("schema", "output", "ckpt", "ls").json
    assert one["$defs"]["ckpt ls"] == {"type": "array", "items": {"$ref": "#/$defs/ListedCheckpoint"}}
    assert windlass("schema", "output").json == schema_of(OUTPUTS)
    assert "exit_code" in windlass("schema", "output", "error").json["$defs"]["Error"]["properties"]
    refused = windlass("schema", "output", "ckpt", "list", "--json")
    assert refused.code == 2
    assert refused.json["fix"] == "windlass schema output ckpt ls"
    below = windlass("schema", "output", "ckpt").json["$defs"]
    assert {"ListedCheckpoint", "Exported"} <= below.keys()
    assert "ListedRun" not in below
    assert "windlass schema output run" in windlass("schema", "run").err


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("ls", [{**ROW, "unheard_of": 1}]),
        ("ls", [{"name": "a"}]),
        ("show", {"name": "a"}),
        ("ckpt ls", {}),
        ("exec", {}),
    ],
)
def test_a_drift_is_seen_in_any_test(command, value):
    """The tests' own watch, which must not be fooled: in this process and in others."""
    context = click.Context(cli, info_name="windlass")
    for word in command.split():
        context = click.Context(context.command.get_command(context, word), parent=context, info_name=word)
    with context, pytest.raises(WrongOutputError):
        output.print_json(value)
    if command != "exec":
        with pytest.raises(WrongOutputError):
            check_printed([*command.split(), "--json"], json.dumps(value))


def test_processes_are_watched_too(tmp_path):
    (tmp_path / "windlass").write_text(f"#!{sys.executable}\nprint('[{{\"name\": 3}}]')\n")
    (tmp_path / "windlass").chmod(0o755)
    with pytest.raises(WrongOutputError):
        subprocess.run([tmp_path / "windlass", "ls", "--json"], capture_output=True, text=True, check=True)
    assert command_in(["ckpt", "ls", "a"]) == "ckpt ls"
    assert command_in(["nothing"]) is None
    assert [one.name for one in outputs_of("run", ["a.yaml", "--sweep", "x=1", "--dry-run"])] == [
        "run --sweep --dry-run"
    ]


def test_numbers_that_are_not_finite_are_null_on_every_stream(capsys):
    output.print_json_line({"kind": "x", "loss": float("nan")}, stderr=True)
    assert json.loads(capsys.readouterr().err) == {"kind": "x", "loss": None}


def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


def test_what_only_clusters_and_registries_print_is_made_of_what_the_code_has():
    """Fast tests do not see these outputs; the tests with clusters validate them whole."""
    assert set(runs.Pod.model_fields) == fields(PodRow)
    assert set(runs.NetworkCheck.model_fields) == fields(Finding)
    assert set(runs.StepLine.model_fields) == fields(StepMetrics) | {"kind", "seconds_left"}
    assert set(runs.Status.model_fields) == fields(JobStatus)
    used = {"pod": "a-0", "node": "n", "node_rank": 0, "tokens_per_s": None, **inside.usage()}
    use = {"name": "a", "step": 1, "steps": 2, "tokens_per_s": 3.5, "pods": [used]}
    check_value(use, outputs_of("top", []), "top")
