"""`windlass init`: a run file to start from."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click
import yaml

from windlass.catalog.models import preset as find_preset
from windlass.catalog.models import presets
from windlass.cli.jobs import complete_preset
from windlass.cli.output import print_json, print_table
from windlass.cli.reference import Key, sections
from windlass.common.files import write_output
from windlass.errors import UserError
from windlass.targets.launch.machine import this_machine

WIDTH = 100
Values = dict[str, dict[str, Any]]


TASKS = {
    "pretrain": "train a model from random weights on text",
    "chat": "fine-tune a pretrained model on chats; only the assistant's turns are trained on",
    "lora": "fine-tune on chats with LoRA: a small adapter is trained, the model itself stays as it is",
    "dpo": "prefer chosen answers to rejected ones (DPO), as an adapter beside a chat model",
}
EXPECTED = {"chat": ("chats.jsonl", "chat"), "lora": ("chats.jsonl", "chat"), "dpo": ("pairs.jsonl", "preference")}
# Settings that a laptop trains in minutes; for models that no laptop trains, those that GPUs like.
LAPTOP: Values = {
    "train": {"steps": 200, "global_batch": 8, "learning_rate": "1e-3", "precision": "fp32"},
    "data": {"sequence_length": 128},
}
GPUS: Values = {
    "train": {"steps": 1000, "global_batch": 32, "learning_rate": "3e-4"},
    "data": {"sequence_length": 2048},
}


@click.command(short_help="Write a run file to start from.")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--task", type=click.Choice(list(TASKS)), default="pretrain", show_default=True)
@click.option("--preset", shell_complete=complete_preset, help="Model preset; --list names them.")
@click.option("--model", help="A pretrained model instead: hub id or folder, runs/NAME/export say.")
@click.option("--data", "source", help="Data source: corpus:austen, a file, a folder, a glob, hf:NAME.")
@click.option("--list", "list_presets", is_flag=True, help="List the model presets.")
@click.option("--full", is_flag=True, help="Every key, those with defaults as comments.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def init(
    path: Path | None,
    task: str,
    preset: str | None,
    model: str | None,
    source: str | None,
    list_presets: bool,
    full: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write a run file to start from.

    It holds what matters for the task; `windlass schema --keys` lists every other key with its default, and --full
    writes them all as comments. Without options it trains a tiny model on a shipped text, in about a minute.
    """
    if list_presets:
        _list_presets(as_json=as_json)
        return
    values = _settings(task, preset, model, source, path)
    name = preset or ("llama-tiny" if task == "pretrain" and not model else task)
    path = path or Path(f"{name}.yaml")
    text = run_file_text(values) if full else short_text(task, values)
    if path.exists() and not force:
        raise UserError(f"{path} exists", fix=f"windlass init {path} --force    overwrites it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", fix=f"mkdir -p {path.parent}")
    write_output(path, text)
    if as_json:
        print_json({"path": str(path), "task": task, "model": values["model"], "data": values["data"]["source"]})
    else:
        click.echo(f"wrote {path}\n  windlass plan {path}    what it would do\n  windlass run {path}")


def _settings(task: str, preset: str | None, model: str | None, source: str | None, path: Path | None) -> Values:
    """The keys that a run file for the task sets."""
    if preset and model:
        raise UserError("give either --preset or --model, and not both", fix=f"--preset {preset}")
    if task == "pretrain":
        tiny = not model and find_preset(preset or "llama-tiny", given_as="--preset ").hub_id is None
        sizes = LAPTOP if tiny else GPUS
        chosen: dict[str, Any] = {"path": model} if model else {"preset": preset or "llama-tiny"}
        data = {"source": source or ("corpus:austen" if tiny else "hf:allenai/c4"), **sizes["data"]}
        values = {"model": chosen, "data": data, "train": dict(sizes["train"])}
    else:
        from_preset = find_preset(preset, given_as="--preset ").hub_id if preset else None
        if not model and not from_preset:
            raise UserError(
                f"--task {task} starts from a pretrained model, and none is named",
                fix=f"windlass init {path or f'{task}.yaml'} --task {task} --model HUB_ID_OR_FOLDER "
                f"--data {source or EXPECTED[task][0]}",
            )
        chosen = {"path": model} if model else {"preset": preset}
        chosen["init"] = "pretrained"
        file, data_format = EXPECTED[task]
        values = {
            "model": chosen,
            "data": {"source": source or file, "format": data_format, "holdout": 0.05},
            "train": {"steps": 100, "global_batch": 8, "learning_rate": "2e-5", "validate_every": 25},
        }
        if not this_machine().gpus:
            values["train"]["precision"] = "fp32"
        if task in ("lora", "dpo"):
            chosen["lora"] = {"rank": 16}
            values["train"]["learning_rate"] = "2e-4" if task == "lora" else "5e-6"
        if task == "dpo":
            values["train"] = {"objective": "dpo", "dpo_beta": 0.1, **values["train"]}
    values["checkpoint"] = {"every": max(1, int(values["train"]["steps"]) // 4)}
    return values


NOTES = {
    "model.preset": "a configuration with random weights; --list names them",
    "model.path": "hub id or folder",
    "model.init": "load its weights",
    "model.lora": "train an adapter of this rank beside the frozen weights",
    "data.source": "a file, a folder, a glob, s3://…, hf:NAME, corpus:austen",
    "data.format": 'one {"messages": [{"role": …, "content": …}, …]} per line',
    "data.sequence_length": "tokens",
    "data.holdout": "share kept for validation",
    "train.objective": "direct preference optimization, against the model without its adapter",
    "train.dpo_beta": "how closely to stay to that model",
    "train.steps": "optimizer steps",
    "train.global_batch": "sequences per step, over all ranks",
    "train.learning_rate": "peak; warm-up and cosine decay by default",
    "train.precision": "what CPUs compute fastest; bf16 on GPUs",
    "train.validate_every": "steps",
    "checkpoint.every": "steps; the newest three are kept",
}


PREFERENCES = 'one {"prompt": …, "chosen": …, "rejected": …} per line'


def short_text(task: str, values: Values) -> str:
    """A run file of what matters, each key with a remark."""
    lines = [f"# {TASKS[task]}; every other key has a default: windlass schema --keys"]
    for section, keys in values.items():
        lines.append(f"{section}:")
        for key, value in keys.items():
            text = value if key == "learning_rate" else _yaml(value)
            note = PREFERENCES if value == "preference" else NOTES.get(f"{section}.{key}")
            lines.append(f"  {key}: {text}".ljust(34) + f" # {note}" if note else f"  {key}: {text}")
    return "\n".join(lines) + "\n"


def run_file_text(values: Values) -> str:
    """A run file that sets `values` and shows everything else as comments."""
    lines = ["# A run file: what to train. Every key that is commented out has the default shown.", ""]
    for section in sections():
        if section.name is None:
            for key in section.keys:
                lines += [*_comment(key.description, ""), f"# {key.name}: {_yaml(key.default)}", ""]
            continue
        given = values.get(section.name, {})
        lines += [*_comment(section.description, "")]
        lines.append(f"{section.name}:" if given else f"# {section.name}:")
        for key in section.keys:
            lines += _key_lines(key, given)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _key_lines(key: Key, given: dict[str, Any]) -> list[str]:
    if key.name in given:
        value = given[key.name]
        return [
            *_comment(key.description, "  "),
            f"  {key.name}: {value if isinstance(value, str) and key.name == 'learning_rate' else _yaml(value)}",
        ]
    mark = "  # " if given else "#   "
    return [
        *_comment(key.description, "  " if given else "", extra="" if given else "  "),
        f"{mark}{key.name}: {_yaml(key.default)}",
    ]


def _comment(text: str, indent: str, extra: str = "") -> list[str]:
    prefix = f"{indent}#{extra} "
    return textwrap.wrap(text, WIDTH, initial_indent=prefix, subsequent_indent=prefix)


def _yaml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).strip().removesuffix("...").strip()


def _list_presets(*, as_json: bool) -> None:
    known = presets().values()
    if as_json:
        print_json(
            [{"name": preset.name, "hub_id": preset.hub_id, "parameters": preset.num_parameters} for preset in known]
        )
        return
    rows = [
        [preset.name, f"{preset.num_parameters:,}" if preset.num_parameters else "–", preset.hub_id or "–"]
        for preset in known
    ]
    print_table(["PRESET", "PARAMETERS", "PUBLISHED AS"], rows)
