"""Read a run file and its overrides into a `Run`; a mistake becomes one UserError with its line and what mends it."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from windlass.errors import UserError
from windlass.spec.run import Run
from windlass.spec.section import IMPORT_PATH, SettingError

Values = dict[str, Any]
WRITTEN_FROM = "# relative paths are those of "  # first line of a saved run


def load_run(path: str | Path, overrides: Sequence[str] = (), *, saved: bool = False) -> Run:
    """The run that a file and `section.key=value` overrides describe.

    Paths in a file that a user wrote are looked for beside it, those of overrides from the current folder. `saved`: the
    file is the resolved one of a run folder; what is not here is looked for in the folder that it was written from.
    """
    path = Path(path)
    values = read_yaml(path)
    if saved:
        find_paths_beside(values, _written_from(path), here_first=True)  # a project may be copied with its runs
    else:
        find_paths_beside(values, path.parent)
    overridden = {apply_override(values, override, run_file=path) for override in overrides}
    values.setdefault("name", "")
    if not values["name"]:
        values["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
    return parse_run(values, source=str(path), file=path, overridden=overridden)


def run_of(run: Run | str | os.PathLike[str]) -> Run:
    """A run, or that of a run file by its path."""
    if isinstance(run, Run):
        return run
    if isinstance(run, str | os.PathLike):
        return load_run(Path(run))
    raise UserError(
        f"a run or the path of a run file is wanted, not {type(run).__name__}",
        fix='windlass.load("my.yaml", "train.steps=200")',
    )


def _written_from(path: Path) -> Path:
    """The folder from which a saved run was started; this one where its file does not say."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    return Path(first.removeprefix(WRITTEN_FROM).rstrip("\n")) if first.startswith(WRITTEN_FROM) else Path.cwd()


def read_yaml(path: Path) -> Values:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no run file {path}", fix=_instead_of(path), error_code="no-such-file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the run file {path} cannot be read",
            evidence=str(error),
            fix=f"ls -l {path}    a text file that you may read",
        ) from None
    try:
        values = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _not_yaml(error, path, text) from None
    if not isinstance(values, dict):
        raise UserError(
            f"{path} holds no run: a mapping with the sections model and data is expected",
            fix=f"windlass init {path} --force    writes one to start from",
        )
    return values


def _instead_of(path: Path) -> str:
    """What to type where there is no such run file."""
    if "=" in path.name:
        return f"windlass run RUN.yaml {path}"
    files = {file.stem: file for file in path.parent.glob("*.y*ml")}
    near = difflib.get_close_matches(path.stem, files, 1)  # .yaml alone is no likeness
    if near:
        return f"the same command with {files[near[0]]}"
    return f"windlass init {path if path.parent.is_dir() else path.name}"


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (plain SafeLoader reads `3e-4` as a string), and no key twice (SafeLoader drops the first)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in lines:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key!r} stands here again; it is in line {lines[key]} already",
                    key_node.start_mark,
                )
            if isinstance(key, str):
                lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


# What usually mends YAML, by words of the parser's complaint; the first that fits counts.
MENDED_BY = (
    ("'\\t'", "indent with spaces, not tabs"),
    ("stands here again", "keep one of the two"),
    ("mapping values are not allowed", "begin all keys of a section in the same column"),
    ("expected <block end>", "begin all keys of a section in the same column"),
    ("could not find expected ':'", "a colon and a space after every key: key: value"),
    ("quoted scalar", "add the quotation mark that closes it"),
    ("expected ',' or", "close every bracket that is opened: [a, b]   {key: value}"),
    ("", "quotes around a value that begins with a sign, or holds a colon, a # or a bracket"),
)


def _not_yaml(error: Exception, path: Path, text: str) -> UserError:
    """PyYAML calls every text "<unicode string>"; a user wants the file, the line, and what is wrong there."""
    what, problem = f"{path} is not valid YAML", str(error)
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:  # a 13th month; brackets without an end
        return UserError(what, evidence=problem, fix=f"{path}: {MENDED_BY[-1][1]}")
    problem = f"{error.context}: {error.problem}" if error.context else str(error.problem)
    key, _, value = "".join(text.splitlines()[mark.line : mark.line + 1]).strip().partition(": ")
    if "mapping values are not allowed" in problem and ": " in value:
        advice = f"quotes around a value with a colon in it: {key}: {json.dumps(value, ensure_ascii=False)}"
    else:
        advice = next(advice for words, advice in MENDED_BY if words in problem)
    where, snippet = f"{path}, line {mark.line + 1}", mark.get_snippet(indent=0) or ""
    evidence = f"{where}, column {mark.column + 1}: {problem}\n{snippet}".rstrip()
    return UserError(what, evidence=evidence, fix=f"{where}: {advice}")


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)|[-+]?[0-9]+\.[0-9_]*|[-+]?\.[0-9]+)$"),
    list("-+0123456789."),
)


def text_override(key: str, text: str) -> str:
    """The override that sets a key to a text, also one that YAML would read as something else: 1234, yes, null."""
    try:
        is_plain = yaml.load(text, Loader=_Loader) == text
    except (yaml.YAMLError, ValueError):
        is_plain = False
    return f"{key}={text if is_plain else json.dumps(text, ensure_ascii=False)}"


def apply_override(values: Values, override: str, *, run_file: Path = Path()) -> str:
    """Set one `a.b=value` in `values`; `b=value` too where only one section has a `b`. Gives the whole key."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"the override {override!r} is not of the form section.key=value", fix="train.steps=200")
    parts = _full_path(key.strip())
    try:
        # What begins with a star is a glob: an override holds no anchor that it could refer to.
        value = text if text.startswith("*") else yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"the value in the override {override!r} is not valid YAML",
            evidence=str(error),
            fix=f"'{key}={json.dumps(text, ensure_ascii=False)}'    with quotes inside those of the shell",
        ) from None
    here = values
    for part in parts[:-1]:
        below = here.setdefault(part, {})
        if below is None:
            below = here[part] = {}
        if not isinstance(below, dict):
            raise UserError(
                f"the override {override!r} goes below {part!r}, which is the value {below!r}",
                fix=f"{key.partition(part)[0]}{part}={text}",
            )
        here = below
    if ".".join(parts) in BESIDE_RUN_FILE and isinstance(value, str):
        value = os.path.relpath(value, run_file.parent)  # its readers join it to the run file's folder
    here[parts[-1]] = value
    return ".".join(parts)


# Keys that hold a path, or may: what is found beside the run file is meant. `{}` stands for each of several.
PATHS = (
    "code",
    "data.source",
    "data.sources.{}.source",
    "data.files",
    "data.sources.{}.files",
    "data.validation_source",
    "data.tokenizer",
    "model.path",
    "model.lora.adapter",
    "target.kubernetes.code",
)
BESIDE_RUN_FILE = ("image.dockerfile", "image.context", "image.requirements")


def find_paths_beside(values: Values, folder: Path, *, here_first: bool = False) -> None:
    """Turn the relative paths of a run file into paths from the current folder where they lie beside the file."""
    if folder.resolve() == Path.cwd():
        return
    for key in PATHS:
        _map_strings(
            values,
            key.split("."),
            lambda text: text if here_first and os.path.exists(text) else _beside(text, folder),
        )
    _map_strings(values, ["target", "kubernetes", "secrets"], lambda text: _file_secret_beside(text, folder))


def _map_strings(values: Any, parts: Sequence[str], change: Callable[[str], str]) -> None:
    """Change the text, or every text of the list, that stands at a dotted key; what is not there stays so."""
    *outer, last = parts
    for position, part in enumerate(outer):
        if part == "{}":
            for item in values if isinstance(values, list) else ():
                _map_strings(item, parts[position + 1 :], change)
            return
        values = values.get(part) if isinstance(values, dict) else None
    if not isinstance(values, dict) or last not in values:
        return
    value = values[last]
    if isinstance(value, str):
        values[last] = change(value)
    elif isinstance(value, list):
        values[last] = [change(item) if isinstance(item, str) else item for item in value]


def _beside(text: str, folder: Path) -> str:
    """`hf:`, `s3://` and hub ids name nothing beside the file, and stay as they are."""
    if not text or os.path.isabs(text) or text.startswith("~"):
        return text
    joined = os.path.join(folder, text)
    if not (os.path.exists(joined) or ("*" in text and glob.glob(joined, recursive=True))):
        return text
    absolute, here = os.path.abspath(joined), os.getcwd()
    # a path below the current folder stays relative, so that the resolved run is the same however the file was named
    return os.path.relpath(absolute, here) if absolute.startswith(here + os.sep) else absolute


def _file_secret_beside(text: str, folder: Path) -> str:
    name, mark, path = text.partition("=file:")
    return f"{name}{mark}{_beside(path, folder)}" if mark else text


def _full_path(key: str) -> list[str]:
    parts = key.split(".")
    if len(parts) > 1 or key in Run.model_fields:
        return parts
    sections = [name for name, section in _sections() if key in section.model_fields]
    if len(sections) == 1:
        return [sections[0], key]
    if sections:
        choices = ", ".join(f"{section}.{key}" for section in sections)
        raise UserError(f"the override {key!r} could mean {choices}", fix=f"{sections[0]}.{key}=…")
    raise UserError(_unknown(key, _nearest(key, _all_keys())), fix=f"{EXPLAINED}    lists every key")


def parse_run(
    values: Mapping[str, Any],
    *,
    source: str = "the run",
    file: Path | None = None,
    overridden: Collection[str] = frozenset(),
) -> Run:
    """The run of these values. A mistake is blamed on `source`, unless its key is one of those `overridden`.

    `file`: where they were read from; what mends a mistake is then told with its line.
    """
    values = {key: {} if value is None and key in dict(_sections()) else value for key, value in values.items()}
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors()
        problems = [_problem(mistake) for mistake in mistakes]
        in_file = "" if _is_overridden(mistakes[0], overridden) else f"{source}: "
        fixes = [_fix(mistake, None if _is_overridden(mistake, overridden) else file) for mistake in mistakes]
        raise UserError(
            f"{in_file}{problems[0]}" if len(problems) == 1 else f"{source} has {len(problems)} mistakes",
            evidence="\n".join(problems) if len(problems) > 1 else None,
            fix="\n".join(dict.fromkeys(fix for fix in fixes if fix)) or None,
        ) from None


def _place(error: Any) -> str:
    return ".".join(map(str, error["loc"]))


def _is_overridden(error: Any, overridden: Collection[str]) -> bool:
    """Whether an override set the key, or one of the section whose keys do not go together."""
    place = _place(error)
    return any(key == place or key.startswith(f"{place}.") for key in overridden)


# What other tools call a choice.
OTHER_CHOICES = {"fsdp": "full", "zero3": "full", "hsdp": "hybrid", "k8s": "kubernetes", "kube": "kubernetes"}
EXPLAINED = "windlass schema --keys"


def nearest_choice(given: str, choices: Sequence[str]) -> str | None:
    """The choice that was probably meant by a word that is none."""
    meant = OTHER_CHOICES.get(given.lower())
    if meant in choices:
        return meant
    near = difflib.get_close_matches(given, choices, 1, cutoff=0.5)
    return near[0] if near else None


def _fix(error: Any, file: Path | None) -> str | None:
    """The setting that was probably meant, or the default: as an override, or with the line of the file to change."""
    key, given = _place(error), error["input"]
    line = _line_of(file, error["loc"]) if file else None

    def setting(wanted: str, value: Any, remark: str = "") -> str:
        if line is None:
            return f"{wanted}={value}{remark}"
        section, _, name = wanted.rpartition(".")
        text = f"{name}:" if isinstance(value, dict | list) else f"{name}: {_as_yaml(value)}"
        moved = f"put it below `{section}:`, as " if section != key.rpartition(".")[0] else ""
        return f"{file}, line {line}: {moved}{text}{remark}"

    explained = EXPLAINED if line is None else f"{file}, line {line}: {EXPLAINED}    lists every key"
    match error["type"]:
        case "extra_forbidden":
            near = _nearest_key(error)
            is_value = not isinstance(given, dict | list)
            return setting(near, given) if near and (is_value or line is not None) else explained
        case "literal_error":
            choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
            likely = nearest_choice(str(given), choices)
            option = f"    or --on {likely}" if likely and key == "target.kind" else ""
            return setting(key, likely, option) if likely else explained
        case "model_type" | "dict_type" if file and line and re.match(r"\w+:\S", str(given)):
            name, _, value = str(given).split()[0].partition(":")
            return (
                f"{file}, line {_line_of(file, error['loc'], of_value=True)}: a space after the colon: {name}: {value}"
            )
        case "missing" if key == "model":
            return "model.preset=llama3.2-1b    (windlass init --list has others) or model.path=HUB-ID"
        case "missing":
            return EXPLAINED
        case "value_error":
            mistake = error["ctx"]["error"]
            return _mended(mistake, file) if isinstance(mistake, SettingError) else None
        case _:
            default = _default_of(error["loc"])
            remark = f"    (its default; {EXPLAINED} explains every key)"
            return explained if default is None else setting(key, default, remark)


def _mended(mistake: SettingError, file: Path | None) -> str:
    """The setting that mends a mistake: with its line where the file has the key, else as an override."""
    *section, name = mistake.key.split(".")
    line = _line_of(file, [*section, name]) if file else None
    value = _as_yaml(mistake.value)
    return (
        f"{mistake.key}={value}{mistake.remark}"
        if line is None
        else (f"{file}, line {line}: {name}: {value}{mistake.remark}")
    )


def _line_of(file: Path, place: Sequence[Any], *, of_value: bool = False) -> int | None:
    """The line of a key in a run file, or of its value; None where the file does not have it."""
    if not file.is_file():  # a pipe, which was read to its end
        return None
    node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
    key = node
    for part in place:
        if isinstance(node, yaml.MappingNode):
            pairs = {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
            if part not in pairs:
                return None
            key, node = pairs[part]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            if part >= len(node.value):  # of a longer list, which an override brought
                return None
            key = node = node.value[part]
    return int((node if of_value else key).start_mark.line) + 1


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000).removesuffix("...\n").strip()


def _default_of(place: Sequence[Any]) -> Any:
    """The default of a key that holds a single value."""
    section = _section_at(place[:-1])
    field = section.model_fields.get(str(place[-1])) if section else None
    return field.default if field and isinstance(field.default, int | float | str) else None


def _problem(error: Any) -> str:
    """One pydantic error in a user's words."""
    place = _place(error)
    match error["type"]:
        case "extra_forbidden":
            return _unknown(place, _nearest_key(error))
        case "missing":
            return f"{place} is missing"
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type" | "dict_type":
            return f"{place} is a section with keys of its own, not {error['input']!r}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{place} must be a whole number, not {error['input']!r}"
        case "float_parsing" | "float_type":
            return f"{place} must be a number, not {error['input']!r}"
        case "string_type":
            return f"{place} must be a text, not {error['input']!r}"
        case "bool_parsing" | "bool_type":
            return f"{place} must be true or false, not {error['input']!r}"
        case "literal_error":
            return f"{place} must be {error['ctx']['expected']}, not {error['input']!r}"
        case "string_pattern_mismatch" if error["ctx"]["pattern"] == IMPORT_PATH:
            return f"{place} must be an import path, my.module:name, not {error['input']!r}"
        case _:
            message = error["msg"][0].lower() + error["msg"][1:]
            return f"{place}: {message}, not {error['input']!r}"


# What other tools call a key.
OTHER_NAMES = {
    "lr": "train.learning_rate",
    "min_lr": "train.min_learning_rate",
    "batch_size": "train.global_batch",
    "bs": "train.global_batch",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "warmup": "train.warmup_steps",
    "max_grad_norm": "train.grad_clip",
    "clip": "train.grad_clip",
    "seq_len": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "gradient_checkpointing": "parallel.activation_checkpointing",
    "dataset": "data.source",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "gpus": "resources.gpus_per_node",
    "num_nodes": "resources.nodes",
    "adapter": "model.lora.adapter",
}


def _unknown(key: str, near: str | None) -> str:
    return f"unknown key {key}; did you mean {near}?" if near else f"unknown key {key}"


def _nearest_key(error: Any) -> str | None:
    """The key that was probably meant by one that is not there."""
    *section, _ = error["loc"]
    place = _section_at(section)
    siblings = [".".join([*map(str, section), key]) for key in (place.model_fields if place else ())]
    return _nearest(_place(error), [*siblings, *_all_keys()])


def _nearest(key: str, known: Sequence[str]) -> str | None:
    leaf = key.rsplit(".", 1)[-1]
    if leaf in OTHER_NAMES:
        return OTHER_NAMES[leaf]
    near = difflib.get_close_matches(key, known, 1, cutoff=0.7)
    if not near:  # the right leaf in the wrong section, or a leaf misspelt
        by_leaf = {path.rsplit(".", 1)[-1]: path for path in reversed(known)}
        near = [by_leaf[path] for path in difflib.get_close_matches(leaf, list(by_leaf), 1, cutoff=0.6)]
    return near[0] if near else None


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Run.model_fields.items():
        kind = model_of(field.annotation)
        if kind:
            yield name, kind


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, or may hold, or holds several of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        return next((kind for arg in typing.get_args(annotation) if (kind := model_of(arg))), None)
    return None


def _section_at(place: Sequence[Any]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Run
    for part in place:
        if isinstance(part, int):  # one of several alike
            continue
        field = section.model_fields.get(str(part)) if section else None
        section = model_of(field.annotation) if field else None
    return section


def _all_keys() -> list[str]:
    leaves = [f"{name}.{key}" for name, section in _sections() for key in section.model_fields]
    return [*Run.model_fields, *leaves]


def dump_run(run: Run, *, written_from: Path | None = None) -> str:
    """The run as YAML that `load_run` reads back to the same run; relative paths are those of the folder given."""
    text: str = yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return f"{WRITTEN_FROM}{written_from}\n{text}" if written_from else text
