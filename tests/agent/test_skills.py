"""Skills and slash commands: valid for the agents that read them, and never behind the command line."""

import json
import re
import shlex

import click
import pytest
import yaml

from tests.cli.test_schemas import commands_with_json
from windlass.agent.skills import NOT_FOR_AGENTS, PLACES, SKILLS, commands_of, files_for
from windlass.api.schemas.outputs import OUTPUTS
from windlass.cli.main import COMMANDS, cli

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def front_matter(text):
    _, header, body = text.split("---\n", 2)
    return yaml.safe_load(header), body


def test_every_command_is_in_one_skill():
    named = [name for skill in SKILLS for name in skill.commands]
    assert sorted([*named, *NOT_FOR_AGENTS]) == sorted(COMMANDS)


@pytest.mark.parametrize("agent", PLACES)
def test_skills_are_valid(agent):
    """The rules of Claude Code, opencode and the Agent Skills format."""
    files = files_for(agent)
    pages = {path: text for path, text in files.items() if path.name == "SKILL.md"}
    assert len(pages) == len(SKILLS)
    for path, text in pages.items():
        header, body = front_matter(text)
        assert header["name"] == path.parent.name
        assert NAME.fullmatch(header["name"])
        assert len(header["name"]) <= 64
        assert 1 <= len(header["description"]) <= 1024
        assert len(header["compatibility"]) <= 500
        assert set(header) <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
        assert all(isinstance(part, str) for pair in header["metadata"].items() for part in pair)
        assert len(body.splitlines()) < 500
        for link in re.findall(r"\]\(([^)]+)\)", body):
            assert path.parent / link in files
    for path, text in files.items():
        if path.parent.name == "commands":
            header, body = front_matter(text)
            assert header["description"]
            assert "$ARGUMENTS" in body


def test_every_option_and_every_printed_key_is_there():
    outputs = {output.name: output for output in OUTPUTS}
    files = files_for("claude")
    for skill in SKILLS:
        page = next(text for path, text in files.items() if skill.name in path.parts and path.name == "commands.md")
        for path, command in commands_of(skill):
            section = page.partition(f"\n## windlass {path}\n")[2].partition("\n## ")[0]
            for parameter in command.params:
                if isinstance(parameter, click.Option) and not parameter.hidden:
                    assert any(option in section for option in parameter.opts), (path, parameter.name)
            if path in dict(commands_with_json()):
                assert "Prints" in section, path
            model = outputs[path].model if path in outputs else None
            for key in getattr(model, "model_fields", ()):
                assert f"`{getattr(model.model_fields[key], 'alias', None) or key}`" in section, (path, key)


def parse(line):
    """Parse a command line against the click tree, without running it."""
    words = shlex.split(line, comments=True)
    assert words[0] == "windlass"
    command, rest = cli, words[1:]
    context = click.Context(cli, info_name="windlass")
    while isinstance(command, click.Group):
        below = command.get_command(context, rest[0])
        assert below is not None, line
        command, rest = below, rest[1:]
    command.make_context(" ".join(words[1:]), rest, parent=context, resilient_parsing=False)


def test_the_lines_that_skills_tell_to_type_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for skill in SKILLS:
        for line in skill.steps:
            parse(line)


def test_installing_writes_them_and_leaves_other_settings_alone(windlass, tmp_path):
    (tmp_path / ".mcp.json").write_text(json.dumps({"mcpServers": {"other": {"command": "x"}}}))
    answer = windlass("agent", "install", "--for", "claude", "--for", "opencode", "--mcp", "--json")
    assert answer.code == 0, answer
    for name in answer.json["files"]:
        assert (tmp_path / name).is_file()
    assert (tmp_path / ".opencode" / "skills" / "windlass-train" / "SKILL.md").is_file()
    servers = json.loads((tmp_path / ".mcp.json").read_text())["mcpServers"]
    assert servers == {"other": {"command": "x"}, "windlass": {"command": "windlass", "args": ["agent", "mcp"]}}
    opencode = json.loads((tmp_path / "opencode.json").read_text())
    assert opencode["mcp"]["windlass"]["command"] == ["windlass", "agent", "mcp"]
    (tmp_path / ".mcp.json").write_text("[]")
    refused = windlass("agent", "install", "--mcp", "--json")
    assert (refused.code, refused.json["code"]) == (2, "bad-input")
    assert (tmp_path / ".mcp.json").read_text() == "[]"
