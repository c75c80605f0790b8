"""Write the pages that come from the code: run file, output of commands, schemas, the rooms of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import windlass
from windlass import __version__
from windlass.api.schemas import SCHEMA_VERSION
from windlass.api.schemas.outputs import OUTPUTS, Output, schema_of
from windlass.catalog.instances import Instance, instance
from windlass.catalog.models import known_config
from windlass.cli.main import cli
from windlass.cli.reference import Key, options_of_targets, sections
from windlass.diagnose.classes import CLASSES
from windlass.diagnose.facts import schema as facts_schema
from windlass.errors import ExitCode
from windlass.plan import resolve
from windlass.plan.fitting import apply, fastest_change
from windlass.plan.shape import ModelShape
from windlass.plan.speed import Hardware
from windlass.spec import Run, parse_run

WHERE_OUTPUT_IS = (
    "Written by `make docs` from the code. `windlass schema output` prints the JSON Schema of all of it, which is "
    "[output.schema.json](output.schema.json) too; `windlass schema output ckpt ls` that of one command, and "
    "`windlass schema output error` what any command prints when it fails."
)
OUTPUT_POLICY = (
    f"This is version {SCHEMA_VERSION} (`schema_version` in the schema). A newer windlass may print more keys: pass "
    "over those that you do not know. A key that is removed or renamed, another type, or a new word in a list of "
    "words makes a new version. A number that is not finite is `null`. The result is on stdout, text for "
    "people (warnings) "
    "on stderr. A command that fails prints an [error](#error) on stdout and ends with its `exit_code`; `run` of a "
    "run that failed prints its result, with the error in it."
)
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LAYOUTS = ("<!-- layouts -->\n", "<!-- /layouts -->")
ROOMS = ("<!-- rooms -->\n", "<!-- /rooms -->")


def run_file_page() -> str:
    lines = [
        "# The run file",
        "",
        "Written by `make docs` from the code. `windlass schema --keys` prints it; `run.schema.json` is for editors.",
        "Only `model` and `data` are needed. On the command line: `windlass run my.yaml train.steps=200`.",
        "",
        "**A run file is code.** It chooses programs, images, folders and files to read and to send. Run one from",
        "somebody else as you would run their script: read it first, and look at `--dry-run`.",
    ]
    for section in (*sections(), *options_of_targets()):
        if section.name:
            lines += ["", f"## {section.name}", "", section.description]
        lines += ["", "| key | default | type | what it does |", "|---|---|---|---|"]
        lines += [_row(key) for key in section.keys]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{json.dumps(key.default)}`"
    cells = [f"`{key.path}`", default, key.kind, key.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def schema() -> str:
    return json.dumps(Run.model_json_schema(), indent=2) + "\n"


def architecture_page() -> str:
    """ARCHITECTURE.md with its table: rooms in the order of the import contract, each with its first line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    lines = ["| room | what it is for |", "|---|---|"]
    for layer in contract["layers"]:
        for room in layer.split(" | "):
            path = ROOT.joinpath(*room.split("."))
            lines.append(f"| **`{_shown(path)}`** | {_first_line(path)} |")
            folders = sorted({child.parent for child in path.rglob("__init__.py")} - {path})
            lines += [f"| `{_shown(folder)}` | {_first_line(folder)} |" for folder in folders]
    before, rest = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split(ROOMS[0])
    return before + ROOMS[0] + "\n".join(lines) + "\n" + ROOMS[1] + rest.split(ROOMS[1])[1]


def _shown(path: Path) -> str:
    name = path.relative_to(ROOT / "windlass").as_posix()
    return f"{name}/" if path.is_dir() else f"{name}.py"


def _first_line(path: Path) -> str:
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"error: {module.relative_to(ROOT)} does not say what it is for")
    return docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def output_page() -> str:
    whole = schema_of(OUTPUTS)
    lines = [
        "# What commands print with `--json`",
        "",
        *textwrap.wrap(WHERE_OUTPUT_IS, 118),
        "",
        *textwrap.wrap(OUTPUT_POLICY, 118),
        "",
        "| command | prints | what |",
        "|---|---|---|",
    ]
    for one in OUTPUTS:
        array, model = _model_of(one, whole)
        link = f"[{model}](#{model.lower()})" if model else "an object"
        said = _definition(whole, model).get("description", "") + (f" ({one.note})" if one.note else "")
        lines.append(f"| `{one.name}` | {'an array of ' if array else ''}{link} | {_cell(said)} |")
    for name in sorted(_named_models(whole)):
        model = _definition(whole, name)
        lines += ["", f"## {name}", "", model.get("description", "")]
        if "properties" in model:
            lines += ["", "| key | type | |", "|---|---|---|"]
            lines += [_property_row(key, value, model) for key, value in model["properties"].items()]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _model_of(one: Output, whole: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether an output is an array, and the name of the model that it is, or is made of."""
    found = whole["$defs"][one.name]
    array = found.get("type") == "array"
    if "anyOf" in found and all("$ref" in choice for choice in found["anyOf"]):
        return array, "ProgressLine"
    reference = (found["items"] if array else found).get("$ref")
    return array, reference.rpartition("/")[2] if reference else None


def _definition(whole: dict[str, Any], name: str | None) -> dict[str, Any]:
    if name == "ProgressLine":
        kinds = [choice["$ref"].rpartition("/")[2] for choice in whole["$defs"]["run (progress)"]["anyOf"]]
        return {"description": "One of " + ", ".join(f"[{kind}](#{kind.lower()})" for kind in kinds)}
    found: dict[str, Any] = whole["$defs"][name] if name else {}
    return found


def _named_models(whole: dict[str, Any]) -> list[str]:
    """Every model but those of the run file, which have a page of their own."""
    of_the_run_file = set(Run.model_json_schema()["$defs"]) | {"Run"}
    return ["ProgressLine", *(name for name in whole["$defs"] if name[0].isupper() and name not in of_the_run_file)]


def _property_row(key: str, value: dict[str, Any], model: dict[str, Any]) -> str:
    left_out = "" if key in model.get("required", ()) else "; may be left out"
    return f"| `{key}` | {_cell(_type(value))}{left_out} | {_cell(value.get('description', ''))} |"


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return "[run file](run-file.md)" if name == "Run" else f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(_type(choice) for choice in value["anyOf"])
    if "enum" in value:
        return " or ".join(f"`{word}`" for word in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        if "prefixItems" in value:
            return "array: " + ", ".join(_type(one) for one in value["prefixItems"])
        return f"array of {_type(value['items'])}"
    if isinstance(value.get("additionalProperties"), dict):
        return f"object of {_type(value['additionalProperties'])}"
    return {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}.get(
        value.get("type", ""), value.get("type", "anything")
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


BEGIN, END = "<!-- classes: written by `make docs` -->", "<!-- end of classes -->"


def why_page() -> str:
    """docs/why.md with its table of classes as the code has them."""
    text = (DOCS / "why.md").read_text(encoding="utf-8")
    rows = [f"| `{one.name}` | {one.kind} | {one.retry} | {one.cause} | {one.fix} |" for one in CLASSES.values()]
    table = "\n".join(["| class | kind | retry | what happened | what to do |", "|---|---|---|---|---|", *rows])
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


REFERENCE, END_OF_REFERENCE = "<!-- reference: written by `make docs` -->", "<!-- end of reference -->"


def python_page() -> str:
    """docs/python.md with the functions of `import windlass` and the methods of a job, from their docstrings."""
    functions = [name for name in windlass.__all__ if inspect.isfunction(getattr(windlass, name))]
    entries = [(f"windlass.{name}", getattr(windlass, name)) for name in functions]
    methods = {name: value for name, value in vars(windlass.Job).items() if not name.startswith("_") and value.__doc__}
    entries += [(f"Job.{name}", value) for name, value in methods.items()]
    lines: list[str] = []
    for name, value in entries:
        signature = _signature(value) if inspect.isfunction(value) else ""
        lines += [f"**`{name}{signature}`**", "", inspect.getdoc(value) or "", ""]
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(REFERENCE)
    body = "\n".join(lines)
    return f"{before}{REFERENCE}\n\n{body}{END_OF_REFERENCE}{rest.partition(END_OF_REFERENCE)[2]}"


def _signature(function: Any) -> str:
    """Annotations are text, and shown without their quotes."""
    shown = re.sub(r"""(?<=: |> )(['"])(.*?)\1(?=[,) ]|$)""", r"\2", str(inspect.signature(function)))
    return re.sub(r"^\(self(, )?", "(", shown)


SYMPTOMS = {
    "resources": "It waits: there is no room for it",
    "ran out": "It ran out of memory, disk or files",
    "lifecycle": "It waits, was stopped or was taken away",
    "access": "It may not",
    "image": "The image cannot be pulled or does not fit",
    "user": "Settings, data or code",
    "infra": "Nodes, GPUs, network, storage",
    "training": "It trains, and the numbers go wrong",
    "unknown": "Nobody can say yet",
}
RAN_OUT = frozenset(  # while it ran, whatever their kind
    (
        "host_oom", "evicted_memory", "evicted_disk", "shm", "cuda_oom", "cuda_oom_fragmentation",
        "cuda_oom_other_process", "disk_full", "inodes_full", "too_many_files",
    )
)  # fmt: skip
AGAIN = {"yes": "yes", "no": "no", "wait": "when it is its turn", "policy": "as [the policy](retry.md) says"}


def troubleshooting_page() -> str:
    """The classes of failure by what a user sees first."""
    lines = [
        "# Troubleshooting by symptom",
        "",
        "Written by `make docs` from the rules of `windlass why`.",
        "",
        "```sh",
        "windlass why my                      # the cause, its evidence, and what to do",
        "windlass show my --history           # everything that happened, and what was decided",
        "windlass logs my --tail 100",
        "windlass why pytorchjob/NAME -n NAMESPACE   # a job that windlass did not launch",
        "```",
        "",
        "`why` names one of the classes below. What it takes as evidence, and how sure it is: [why](why.md).",
        "*Again* says whether `windlass run` tries it again by itself.",
    ]
    for kind, symptom in SYMPTOMS.items():
        lines += ["", f"## {symptom}", "", "| what happened | what to do | again | class |", "|---|---|---|---|"]
        lines += [
            f"| {_cell(one.cause)} | {_cell(one.fix)} | {AGAIN[one.retry]} | `{one.name}` |"
            for one in CLASSES.values()
            if ("ran out" if one.name in RAN_OUT else one.kind) == kind
        ]
    return "\n".join(lines) + "\n"


def man_page() -> str:
    """windlass(1), from the help of every command."""
    lines = [
        f'.TH WINDLASS 1 "" "windlass {__version__}"',
        ".SH NAME",
        "windlass \\- train PyTorch models from one run file: here, and on clusters",
        ".SH SYNOPSIS",
        ".B windlass\n.I COMMAND\n[\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]",
        ".SH COMMANDS",
    ]
    for path, command in _commands(cli, ()):
        context = click.Context(command, info_name=f"windlass {' '.join(path)}")
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f".SS windlass {' '.join(path)} {_roff(usage)}", _roff(inspect.cleandoc(command.help or ""))]
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record and isinstance(parameter, click.Option):
                lines += [".TP", f".B {_roff(record[0])}", _roff(record[1])]
    lines += [".SH EXIT STATUS"]
    lines += [f".TP\n.B {int(code)}\n{name.lower().replace('_', ' ')}" for name, code in ExitCode.__members__.items()]
    lines += [".SH FILES", ".TP\n.I runs/NAME/\nthe run folder; WINDLASS_RUNS names another place for all of them"]
    return "\n".join(lines) + "\n"


def _commands(place: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(place, click.Group):
        yield path, place
        return
    context = click.Context(place)
    for name in place.list_commands(context):
        below = place.get_command(context, name)
        if below is not None and not below.hidden:
            yield from _commands(below, (*path, name))


def _roff(text: str) -> str:
    escaped = text.strip().replace("\\", "\\e").replace("-", "\\-").replace("\b\n", "")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line or ".PP" for line in escaped.splitlines())


def large_models_page() -> str:
    """large-models.md with its table: the layout that plan proposes for the largest presets."""
    lines = ["| model | GPUs | tensor | recomputed | GiB of a GPU | tokens/s | of a GPU |", "|---" * 7 + "|"]
    sizes = itertools.product(
        ("llama3.1-70b", "llama3.1-405b"), ("p5.48xlarge", "p5en.48xlarge"), (1, 2, 4, 8, 16, 32, 64)
    )
    lines += [_planned_row(preset, instance(kind), nodes) for preset, kind, nodes in sizes]
    before, rest = (DOCS / "large-models.md").read_text(encoding="utf-8").split(LAYOUTS[0])
    return before + LAYOUTS[0] + "\n".join(lines) + "\n" + LAYOUTS[1] + rest.split(LAYOUTS[1])[1]


def _planned_row(preset: str, kind: Instance, nodes: int) -> str:
    values = {"name": preset, "model": {"preset": preset}, "data": {"sequence_length": 8192}}
    run = resolve(parse_run(values | {"train": {"global_batch": 512}, "resources": {"nodes": nodes}}))
    shape = ModelShape.of(known_config(run.model))
    assert shape is not None
    change = fastest_change(run, Hardware(kind.gpu, kind.gpus, nodes, kind), shape)
    begin = f"| {preset} | {nodes * kind.gpus} {kind.gpu.name} |"
    if change is None:
        return f"{begin} fits with no layout | | | | |"
    parallel = apply(run, change.overrides).parallel
    split = f"{parallel.tensor}" + (f", context {parallel.context}" if parallel.context > 1 else "")
    speed = f"{change.tokens_per_s:,.0f} | {change.tokens_per_s / change.hardware.ranks:,.0f}"
    return f"{begin} {split} | {parallel.activation_checkpointing} | {change.peak_gib:.0f} | {speed} |"


def pages() -> dict[Path, str]:
    return {
        DOCS / "run-file.md": run_file_page(),
        DOCS / "run.schema.json": schema(),
        DOCS / "output.md": output_page(),
        DOCS / "output.schema.json": json.dumps(schema_of(OUTPUTS), indent=1) + "\n",
        ROOT / "ARCHITECTURE.md": architecture_page(),
        DOCS / "facts.schema.json": json.dumps(facts_schema(), indent=2) + "\n",
        DOCS / "why.md": why_page(),
        DOCS / "python.md": python_page(),
        DOCS / "troubleshooting.md": troubleshooting_page(),
        DOCS / "windlass.1": man_page(),
        DOCS / "large-models.md": large_models_page(),
    }


def main() -> int:
    DOCS.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
