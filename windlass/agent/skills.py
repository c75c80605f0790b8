"""Skills and slash commands for coding agents, made from the help and the schemas of the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import TypeAdapter

from windlass import __version__
from windlass.api.schemas.outputs import OUTPUTS
from windlass.cli.main import cli

HELP_WIDTH = 100


@dataclass(frozen=True)
class Skill:
    """A task, and the commands that do it. The description says when to use it; the rest is generated."""

    name: str
    description: str
    commands: tuple[str, ...]
    steps: tuple[str, ...]
    """What to type, in order; `windlass …` lines are checked by a test."""


SKILLS = (
    Skill(
        "windlass-train",
        "Train or fine-tune a PyTorch language model with windlass: write a run file, see what it needs and costs, "
        "start it here, on Slurm or on Kubernetes, follow it, stop it and go on. Use when asked to train, fine-tune, "
        "resume, sweep or compare runs.",
        ("init", "plan", "run", "ls", "show", "logs", "stop", "rm", "sweep", "compare", "notify", "schema", "doctor"),
        (
            "windlass init my.yaml --task lora --model HUB-ID",
            "windlass plan my.yaml --json",
            "windlass run my.yaml --detach --json",
            "windlass show my --json",
            "windlass stop my --json",
        ),
    ),
    Skill(
        "windlass-diagnose",
        "Find out why a training job failed, hangs, is slow or waits, with windlass: cause, evidence and fix from "
        "pods, events, exit codes and logs; also for PyTorchJobs, pods and Slurm jobs that windlass did not launch. "
        "Use when a job crashed, is pending or makes no progress.",
        ("why", "top", "debug", "exec", "sync"),
        (
            "windlass why my --json",
            "windlass show my --history --json",
            "windlass logs my --tail 200 --json",
            "windlass why pytorchjob/other --json",
        ),
    ),
    Skill(
        "windlass-checkpoints",
        "List, verify, fetch, prune and export checkpoints of windlass runs, write Hugging Face folders from them, and "
        "let a trained model answer a prompt. Use when asked for the weights of a run, for an export, for what a model "
        "says, or about disk space of checkpoints.",
        ("ckpt", "generate", "eval"),
        ("windlass ckpt ls my --json", "windlass ckpt verify my --json", "windlass ckpt export my --json"),
    ),
    Skill(
        "windlass-data",
        "Prepare training data with windlass: fetch a part of a Hugging Face dataset, tokenize text to shards, look at "
        "what a run will read. Use when asked to prepare, tokenize or inspect data.",
        ("data",),
        (
            "windlass data fetch allenai/c4 --config en --samples 100000 -o c4 --json",
            "windlass data tokenize c4 -o shards --tokenizer NAME --json",
            "windlass data inspect shards --json",
        ),
    ),
    Skill(
        "windlass-images",
        "Build container images for training with windlass: torch, CUDA, NCCL and EFA that agree, conflicts found and "
        "healed, proven from inside, pushed by digest. Use for Dockerfiles of training jobs and version conflicts.",
        ("image",),
        (
            "windlass image plan my.yaml --json",
            "windlass image build my.yaml --auto-fix --json",
            "windlass image test my.yaml --level standard --json",
            "windlass image push my.yaml --json",
        ),
    ),
    Skill(
        "windlass-clusters",
        "Check, mend, make and delete Kubernetes clusters for training with windlass: EKS, SageMaker HyperPod and any "
        "context of a kubeconfig. Use before a job is submitted, and when pods cannot be scheduled.",
        ("cluster",),
        (
            "windlass cluster ls --json",
            "windlass cluster check my.yaml --json",
            "windlass cluster fix my.yaml --yes --json",
            "windlass cluster create NAME --region us-west-2 --dry-run --json",
        ),
    ),
)
NOT_FOR_AGENTS = ("ui", "plot", "report", "completion", "agent")  # for people, or this itself
PLACES = {"claude": ".claude", "opencode": ".opencode", "agents": ".agents"}
SHARED_RULES = """\
- `--json` prints one object on stdout; the keys are below. Parse that, not the text for people.
- A command that fails prints `{"error", "code", "evidence", "cause", "fix", "exit_code"}`: branch on `code`, try `fix`.
- Exit codes: 0 done, 1 failed, 2 wrong input and nothing was started, 75 stopped with a checkpoint, 130 interrupted.
- What deletes or costs money asks first, and without a terminal refuses (`needs-confirmation`): show the user what it
  said, and only when they agree repeat it with `--yes`.
- Start runs with `--detach`, then look at `windlass show NAME --json`.
- After a failure the same `windlass run` goes on from the newest checkpoint."""


def files_for(agent: str) -> dict[Path, str]:
    """Every file of an agent's folder, by its path in the project."""
    place = Path(PLACES[agent])
    files: dict[Path, str] = {}
    for skill in SKILLS:
        folder = place / "skills" / skill.name
        files[folder / "SKILL.md"] = skill_page(skill)
        files[folder / "references" / "commands.md"] = reference_page(skill)
        if agent != "agents":
            files[place / "commands" / f"{skill.name}.md"] = slash_command(skill, agent)
    return files


def skill_page(skill: Skill) -> str:
    header = {
        "name": skill.name,
        "description": skill.description,
        "license": "Apache-2.0",
        "compatibility": "Needs the windlass command (pip install windlass) in PATH.",
        "metadata": {"version": __version__},
    }
    lines = [
        *_front_matter(header),
        f"# {skill.name}",
        "",
        *("```sh", *skill.steps, "```", ""),
        *("## Rules", "", SHARED_RULES, ""),
        *("## Commands", "", "Options and printed keys: [references/commands.md](references/commands.md).", ""),
        *(f"- `windlass {path}`: {_first_line(command)}" for path, command in commands_of(skill)),
    ]
    return "\n".join(lines) + "\n"


def reference_page(skill: Skill) -> str:
    lines = [f"# Commands of {skill.name}"]
    for path, command in commands_of(skill):
        names = ["-h", "--help"]
        context = click.Context(
            command, info_name=f"windlass {path}", terminal_width=HELP_WIDTH, help_option_names=names
        )
        lines += ["", f"## windlass {path}", "", "```text", command.get_help(context), "```"]
        for output in (output for output in OUTPUTS if output.command == path):
            typed = f" with `{output.typed}`" if output.typed else ""
            lines += ["", f"Prints{typed}: {_keys(output.model)}"]
    return "\n".join(lines) + "\n"


def slash_command(skill: Skill, agent: str) -> str:
    header: dict[str, Any] = {"description": _first_sentence(skill.description)}
    if agent == "claude":
        header |= {"argument-hint": "what to do, or arguments", "allowed-tools": "Bash(windlass:*)"}
    lines = [
        *_front_matter(header),
        f"Use the skill {skill.name} for: $ARGUMENTS",
        "",
        "The commands, in the usual order:",
        "",
        *("```sh", *skill.steps, "```", ""),
        SHARED_RULES,
    ]
    return "\n".join(lines) + "\n"


def mcp_configuration(agent: str) -> tuple[Path, dict[str, Any]]:
    """Where an agent reads its MCP servers from, and the entry of windlass."""
    if agent == "opencode":
        return Path("opencode.json"), {"mcp": {"windlass": {"type": "local", "command": ["windlass", "agent", "mcp"]}}}
    return Path(".mcp.json"), {"mcpServers": {"windlass": {"command": "windlass", "args": ["agent", "mcp"]}}}


def commands_of(skill: Skill) -> Iterator[tuple[str, click.Command]]:
    """The commands of a skill, groups taken apart: `ckpt ls`, `ckpt verify`."""
    for name in skill.commands:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        yield from _leaves(name, command)


def _leaves(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        if below is not None and not below.hidden:
            yield from _leaves(f"{path} {name}", below)


def _front_matter(header: dict[str, Any]) -> list[str]:
    return ["---", yaml.safe_dump(header, sort_keys=False, allow_unicode=True, width=10_000).rstrip(), "---", ""]


def _first_line(command: click.Command) -> str:
    return (command.help or "").strip().split("\n")[0]


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".") + "."


def _keys(model: Any) -> str:
    """The keys that a model prints, those of a list's elements for a list."""
    whole = TypeAdapter(model).json_schema(mode="serialization")
    is_list = whole.get("type") == "array"
    schema = whole["items"] if is_list else whole
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    keys = ", ".join(f"`{key}`" for key in schema.get("properties", {})) or "an object whose keys are not fixed"
    return f"a list of objects with {keys}" if is_list else keys
