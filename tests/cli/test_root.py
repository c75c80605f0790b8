"""The root of the command line: quick, lean, and every error shown once."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.cli.main import COMMANDS, cli, run_command
from windlass.errors import UserError

HEAVY = ("torch", "transformers", "datasets", "numpy", "pydantic", "rich", "httpx", "yaml")


def test_help_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from windlass.cli.main import run_command\n"
        "run_command(['--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stderr.strip() == "[]"
    assert "Write a run file to start from." in answer.stdout


# The rooms that know run files, targets and failures: most of what a command imports, and no part of its options.
ROOMS = ("pydantic", "yaml", "windlass.spec", "windlass.plan", "windlass.diagnose", "windlass.api.schemas")
EVERYDAY = ("run", "plan", "ls", "show", "logs", "why", "stop", "ckpt", "exec", "top", "image", "cluster", "doctor")


@pytest.mark.parametrize("command", EVERYDAY)
def test_options_are_shown_and_completed_without_what_the_command_does(command, tmp_path):
    """By what is imported, not by time: the shell waits for it at every TAB."""
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "run.yaml").touch()
    program = (
        "import os, sys\n"
        "from windlass.cli.main import main, run_command\n"
        f"run_command([{command!r}, '--help'])\n"
        f"for words, number in (('windlass {command} ', 2), ('windlass {command} --', 2)):\n"
        "    os.environ.update(_WINDLASS_COMPLETE='bash_complete', COMP_WORDS=words, COMP_CWORD=str(number))\n"
        "    try: main([])\n"
        "    except SystemExit: pass\n"
        f"print([name for name in {ROOMS} if name in sys.modules], file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert answer.stderr.strip() == "[]"
    assert "plain,--help" in answer.stdout
    if command in ("show", "logs", "why", "stop"):
        assert "plain,small\n" in answer.stdout


def test_the_help_of_every_command_needs_no_extra():
    program = (
        "import sys\n"
        "from windlass.cli.main import COMMANDS, EXTRAS, run_command\n"
        "packages = [*' '.join(EXTRAS.values()).split(), 'huggingface_hub']\n"
        "sys.modules.update(dict.fromkeys(packages))\n"  # None: as if it were not installed
        "print([name for name in COMMANDS if run_command([name, '--help'])], file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stderr.strip() == "[]"


def test_ctrl_c_while_commands_are_imported_shows_no_traceback(tmp_path):
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", "ls"],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_at_the_root_is_the_commands_own(name):
    command = cli.get_command(None, name)
    assert command.help.splitlines()[0] == COMMANDS[name][1]
    assert command.name == name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, windlass):
    answer = windlass(name, "--help")
    assert answer.code == 0
    assert COMMANDS[name][1].rstrip(".") in answer.out


def test_no_command_is_help(windlass):
    answer = windlass()
    assert "Commands:" in answer.out


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("resume my", "windlass run my.yaml    goes on from the newest checkpoint"),
        ("train my.yaml", "windlass run my.yaml"),
        ("status my", "windlass show my"),
        ("cancel my", "windlass stop my"),
        ("delete my", "windlass rm my"),
        ("ps", "windlass ls"),
        ("shwo my --curve", "windlass show my --curve"),
        ("get", "windlass ls"),
        ("frobnicate", "windlass --help"),
    ],
)
def test_words_of_other_tools_lead_to_the_command(typed, fix, windlass):
    answer = windlass(*typed.split())
    assert answer.code == 2
    assert answer.err.splitlines()[-1].strip() == f"fix       {fix}"


def test_a_run_that_is_in_a_folder_above_is_found_by_name(windlass, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.yaml").touch()
    (tmp_path / "below").mkdir()
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)
    monkeypatch.chdir(tmp_path / "below")
    answer = windlass("show", "mine")
    assert f"no runs in {tmp_path / 'below' / 'runs'}" in answer.err
    assert f"WINDLASS_RUNS={tmp_path / 'runs'}" in answer.err


def test_version(windlass):
    assert windlass("--version").out.startswith("windlass ")


def test_a_typo_gets_the_nearest_command(windlass):
    answer = windlass("rnu")
    assert answer.code == 2
    assert "did you mean run?" in answer.err


def test_usage_errors_exit_with_2(windlass):
    answer = windlass("show")
    assert answer.code == 2
    assert "windlass show --help" in answer.err
    answer = windlass("run", "a.yaml", "--nodes", "no", "--json")
    assert answer.code == 2
    assert "'no'" in answer.json["error"]


def test_user_errors_are_shown_once(windlass):
    answer = windlass("show", "nothing")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.count("there is no run 'nothing'") == 1
    answer = windlass("show", "nothing", "--json")
    assert (answer.json["exit_code"], answer.err) == (2, "")


def test_a_bug_leaves_its_traceback_in_a_file(windlass, monkeypatch):
    def broken(*_args, **_options):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli, "main", broken)
    answer = windlass("ls", "--json")
    assert answer.code == 1
    assert answer.json["error"] == "unexpected ZeroDivisionError: oops"
    path = answer.json["evidence"].removeprefix("the traceback is in ")
    with open(path) as file:
        assert "ZeroDivisionError" in file.read()


def test_exit_codes_come_from_the_error(monkeypatch, capsys):
    def failing(*_args, **_options):
        raise UserError("no", exit_code=75)

    monkeypatch.setattr(cli, "main", failing)
    assert run_command(["ls"]) == 75
    assert run_command(["ls", "--json"]) == 75
    assert json.loads(capsys.readouterr().out)["error"] == "no"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(windlass, shell):
    answer = windlass("completion", shell)
    assert answer.code == 0
    assert "_WINDLASS_COMPLETE" in answer.out


def test_a_package_that_is_not_installed_is_named_with_its_extra(run_file, tmp_path):
    """As in an environment with windlass's own dependencies alone."""
    for module, words, extra in (("numpy", ["plan", str(run_file)], "train"), ("anyio", ["agent", "mcp"], "mcp")):
        program = f"import sys; sys.modules[{module!r}] = None; from windlass.cli.main import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", program, *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert answer.returncode == 2
        assert f"pip install 'windlass[{extra}]'" in answer.stderr
        assert "unexpected" not in answer.stderr
