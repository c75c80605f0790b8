"""The documentation: every command parses, every run file validates, every key exists, every link leads somewhere."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
import yaml

import windlass
from windlass.cli.jobs import _keys
from windlass.cli.main import cli
from windlass.spec import Run, parse_run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TYPED_IN = ("sh", "bash", "console", "", "text")
NOT_TYPED = ("json", "diff", "toml", "dockerfile")
INLINE = re.compile(r"`(windlass [^`]+)`")
TYPED = re.compile(r"^(?:\$ )?(windlass .*)$")
BASE = {"model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}}


def blocks(page, *languages):
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands(page):
    """What a page tells to type: lines of blocks and inline code, `a · b · c` taken apart."""
    for text in blocks(page, *TYPED_IN):
        for line in text.replace("\\\n", " ").splitlines():
            match = TYPED.match(line.strip())
            if match:
                yield match[1]
    for line in INLINE.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        yield " ".join(line.split())


def alternatives(line):
    """`windlass ls · show NAME` are two commands; a word or a sentence after several blanks is for people."""
    line = re.split(r"\s{2,}| #|; | \||>| any job:", line)[0].rstrip(" .,:")
    first, *others = line.split(" · ")
    yield first
    words = first.split()
    for other in others:
        group = cli.get_command(click.Context(cli), words[1])
        yield f"windlass {words[1]} {other}" if isinstance(group, click.Group) else f"windlass {other}"


def parse(line):
    """A command line against the click tree; nothing of it is run."""
    words = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="windlass")
    while isinstance(command, click.Group):
        if not words:  # a group by its name, in a sentence
            return
        below = command.get_command(context, words[0])
        if below is None:
            raise click.UsageError(f"there is no command {words[0]!r}", context)
        command, words = below, words[1:]
        context = click.Context(command, info_name=command.name, parent=context)
    is_named = not words
    if is_named:  # `windlass run` in a sentence
        return
    parser = command.make_parser(context)
    _, rest, _ = parser.parse_args(list(words))
    if rest:
        raise click.UsageError(f"too many words: {rest}", context)
    for word in words:
        key, equals, _ = word.partition("=")
        if equals and re.fullmatch(r"[a-z_.0-9]+", key) and command.name in ("run", "plan", "sweep"):
            must_be_key(key)


def must_be_key(key):
    known = _keys()
    short = {path.rpartition(".")[2] for path in known}
    parents = {path.rpartition(".")[0] for path in known}
    free = ("model.config.", "target.kubernetes.pod.", "target.kubernetes.environment.", "target.kubernetes.labels.")
    if key not in known and key not in short and key not in parents and not key.startswith(free):
        raise click.UsageError(f"the run file has no key {key}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_parses(page):
    wrong = []
    for line in commands(page):
        for one in alternatives(line):
            if "…" in one or "[" in one:
                continue  # a form, not a command
            try:
                parse(one)
            except (click.UsageError, ValueError) as error:
                wrong.append(f"{one}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_check_finds_mistakes():
    for line in ("windlass rum my.yaml", "windlass run my.yaml --detatch", "windlass run my.yaml train.stepz=3"):
        with pytest.raises(click.UsageError):
            parse(line)
    for text in ("windlass.submitt(run)", "windlass.train(run, modell=Model)"):
        with pytest.raises((AttributeError, AssertionError)):
            must_be_python(text)
    with pytest.raises(SyntaxError):
        must_be_python("windlass.train(")
    assert list(alternatives("windlass ckpt ls · get NAME")) == ["windlass ckpt ls", "windlass ckpt get NAME"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_run_file_validates(page):
    for text in blocks(page, "yaml"):
        for values in yaml.safe_load_all(text):
            if not isinstance(values, dict) or "apiVersion" in values:
                continue
            if not values.keys() & Run.model_fields.keys():  # a part of the section that the page is about
                values = {"target": {"kubernetes": values}}
            merged = {**BASE, **values}
            if "data" in values and not values["data"].keys() & {"source", "sources"}:
                merged["data"] = {**BASE["data"], **values["data"]}
            parse_run(merged)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_checked_and_python_compiles(page):
    languages = {language for language, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert languages <= {*TYPED_IN, *NOT_TYPED, "yaml", "python"}
    for text in blocks(page, "python"):
        must_be_python(textwrap.dedent(text))


def must_be_python(text):
    """It parses, and what it takes of `windlass` is there with the parameters that it names."""
    for node in ast.walk(ast.parse(text)):
        call = node.func if isinstance(node, ast.Call) else node
        if not (isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "windlass"):
            continue
        offered = getattr(windlass, call.attr)
        if isinstance(node, ast.Call) and inspect.isfunction(offered):
            known = inspect.signature(offered).parameters
            unknown = [keyword.arg for keyword in node.keywords if keyword.arg not in known]
            assert not unknown, f"windlass.{call.attr} has no {unknown}"


def test_every_key_of_the_migration_tables_exists():
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    keys = []
    for row in re.findall(r"^\| .* \|$", text, re.MULTILINE):
        keys += re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)", row.strip("| ").rpartition(" | ")[2])
    assert len(keys) > 90
    for key in keys:
        must_be_key(key)


@pytest.mark.slow
def test_the_site_builds_and_no_link_is_dead(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "architecture" / "index.html").is_file()
