"""The root of the command line: finds the command, and shows every error once."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from windlass import __version__
from windlass.errors import ExitCode, UserError

# The help of a command stands here so that `windlass --help` imports none of them; a test compares it with theirs.
COMMANDS = {
    "init": ("windlass.cli.init:init", "Write a run file to start from."),
    "plan": ("windlass.cli.runs.plan:plan", "Say what a run will need and cost."),
    "run": ("windlass.cli.runs.run:run", "Train what a run file describes."),
    "ls": ("windlass.cli.runs.ls:ls", "List the runs."),
    "show": ("windlass.cli.runs.show:show", "Show where a run stands."),
    "logs": ("windlass.cli.runs.logs:logs", "Print what the ranks of a run said."),
    "why": ("windlass.cli.runs.why:why", "Say why a job failed or waits."),
    "notify": ("windlass.cli.runs.notify:notify", "Tell people when a run ends, fails or hangs."),
    "stop": ("windlass.cli.runs.stop:stop", "Save a checkpoint and stop a run."),
    "compare": ("windlass.cli.views.compare:compare", "Compare runs: settings and results."),
    "sweep": ("windlass.cli.runs.sweep:sweep", "Train one run per combination of values."),
    "plot": ("windlass.cli.views.plot:plot", "Draw curves of runs to an image."),
    "report": ("windlass.cli.views.report:report", "Write a run as one page to send."),
    "ui": ("windlass.cli.views.ui:ui", "Show the runs on a page in the browser."),
    "rm": ("windlass.cli.runs.rm:rm", "Delete runs that have ended."),
    "cluster": ("windlass.cli.clusters.cluster:cluster", "Clusters: list, use, check, fix, create."),
    "exec": ("windlass.cli.clusters.pods:exec_command", "Run a command where a rank runs."),
    "top": ("windlass.cli.clusters.pods:top", "Show what every pod of a run uses."),
    "debug": ("windlass.cli.clusters.pods:debug", "Measure the network between the pods of a run."),
    "sync": ("windlass.cli.clusters.pods:sync", "Send changed code to a run's pods."),
    "generate": ("windlass.cli.models.generate:generate", "Go on with a prompt, as a run's model would."),
    "eval": ("windlass.cli.models.evaluate:evaluate", "Evaluate a run's model on benchmark tasks."),
    "ckpt": ("windlass.cli.models.ckpt:ckpt", "List, verify, fetch and export checkpoints."),
    "data": ("windlass.cli.data:data", "Data: fetch, tokenize to shards, inspect."),
    "image": ("windlass.cli.image:image", "Images: plan, build, test, push."),
    "agent": ("windlass.agent.command:agent", "Coding agents: an MCP server, skills."),
    "doctor": ("windlass.cli.doctor:doctor", "Say whether this machine can train."),
    "schema": ("windlass.cli.schema:schema", "Print the schema of the run file."),
    "completion": ("windlass.cli.jobs:completion", "Print the completion script of a shell."),
}


# What other tools call a command.
OTHER_NAMES = {
    **dict.fromkeys(("train", "launch", "submit", "start", "restart", "create", "apply"), "run"),
    **dict.fromkeys(("status", "describe", "info"), "show"),
    **dict.fromkeys(("list", "get", "ps", "jobs", "runs", "queue"), "ls"),
    **dict.fromkeys(("cancel", "kill", "down"), "stop"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    **dict.fromkeys(("log", "tail"), "logs"),
    "checkpoint": "ckpt",
    "checkpoints": "ckpt",
    "export": "ckpt export",
    "diagnose": "why",
    "mcp": "agent mcp",
}


def _no_such_command(word: str, rest: list[str]) -> UserError:
    if word == "resume":
        name = rest[0] if rest and not rest[0].startswith("-") else "RUN"
        command, fix = "run", f"windlass run {name.removesuffix('.yaml')}.yaml    goes on from the newest checkpoint"
    else:
        near = difflib.get_close_matches(word, COMMANDS, 1)
        command = OTHER_NAMES.get(word) or (near[0] if near else "")
        fix = " ".join(["windlass", command, *rest]) if command else "windlass --help"
    hint = f"; did you mean {command}?" if command else ""
    return UserError(f"there is no command {word!r}{hint}", fix=fix, error_code="usage")


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise _no_such_command(args[0], args[1:])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="windlass", message="%(prog)s %(version)s")
def cli() -> None:
    """Train PyTorch models from one run file: here, and on clusters.

    \b
    windlass init my.yaml                   writes a run file
    windlass run my.yaml train.steps=200    trains it
    """


def main(args: Sequence[str] | None = None) -> None:
    """The program: runs a command and exits with its code."""
    from windlass.cli.streams import finish, protect

    arguments = list(sys.argv[1:] if args is None else args)
    trains = arguments[:1] == ["run"]  # its code is the run's, whoever reads what it prints
    output = protect(go_on=trains)
    code = run_command(arguments)
    problem = finish(output)
    if problem is not None:
        error = UserError(
            "the output could not be written",
            evidence=str(problem),
            fix="windlass … > FILE    on a disk with room",
            exit_code=ExitCode.FAILED,
        )
        click.echo(str(error), err=True)
        code = code if trains else code or error.exit_code
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        result = cli.main(args=arguments, prog_name="windlass", standalone_mode=False)
    except UserError as error:
        return show_error(error, as_json=as_json)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return ExitCode.BAD_INPUT
    except click.ClickException as error:
        return show_error(_as_user_error(error), as_json=as_json)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except OSError as error:
        return show_error(_of_the_disk(error) or _as_bug(error), as_json=as_json)
    except ModuleNotFoundError as error:
        return show_error(_of_an_extra(error) or _as_bug(error), as_json=as_json)
    except Exception as error:
        return show_error(_as_bug(error), as_json=as_json)
    return result if isinstance(result, int) else ExitCode.OK


def show_error(error: UserError, *, as_json: bool) -> int:
    if as_json:
        from windlass.cli.output import print_json_line

        print_json_line(error.as_dict())
    else:
        click.echo(_readable(error), err=True)
    return error.exit_code


def _readable(error: UserError) -> str:
    """An error as wide as the terminal; a fix stays in one piece, so that it can be copied."""
    from windlass.cli.output import plain, wrapped

    lines, is_fix = [], False
    for line in plain(str(error)).splitlines():
        label = line[2:11].strip()
        is_fix = label == "fix" if label else is_fix
        indent = "  " if line.startswith("error: ") else " " * 12
        lines.append(line if is_fix else wrapped(line, indent, stderr=True))
    return "\n".join(lines)


def _as_user_error(error: click.ClickException) -> UserError:
    context: Any = getattr(error, "ctx", None)
    return UserError(
        error.format_message(),
        fix=f"{context.command_path} --help" if context else None,
        exit_code=ExitCode.BAD_INPUT,
        error_code="usage",
    )


def _of_the_disk(error: OSError) -> UserError | None:
    """A file that cannot be read or written: nothing that a traceback would explain."""
    import errno

    advice = {
        errno.EROFS: "mount it for writing, or set WINDLASS_RUNS to a folder on another disk",
        errno.ENOSPC: "make room, or set WINDLASS_RUNS to a folder on a larger disk",
        errno.EDQUOT: "make room within your quota, or set WINDLASS_RUNS to a folder on another disk",
        errno.EACCES: "ask its owner, or set WINDLASS_RUNS to a folder of your own",
        errno.EPERM: "ask its owner",
        errno.EEXIST: None,
        errno.EISDIR: None,
        errno.ELOOP: None,
        errno.ENOTDIR: None,
        errno.EIO: None,
        errno.ESTALE: None,
        errno.EMFILE: "ulimit -n 4096",
    }
    if error.errno not in advice:
        return None
    where = error.filename2 or error.filename
    return UserError(
        f"{where} cannot be used: {error.strerror}" if where else f"a file cannot be used: {error.strerror}",
        fix=advice[error.errno],
        exit_code=ExitCode.FAILED,
    )


# Packages of the extras that commands import; pyproject.toml has the whole list.
EXTRAS = {
    "train": "torch numpy transformers tokenizers datasets safetensors pyarrow aiohttp jinja2",
    "eval": "lm_eval accelerate peft",
    "k8s": "httpx2",
    "aws": "boto3 botocore",
    "image": "packaging",
    "ui": "starlette uvicorn resvg_py",
    "mcp": "mcp anyio",
}


def _of_an_extra(error: ModuleNotFoundError) -> UserError | None:
    """A package that only some commands need, and that is not installed."""
    package = (error.name or "").partition(".")[0]
    extra = next((name for name, packages in EXTRAS.items() if package in packages.split()), None)
    if extra is None:
        return None
    return UserError(
        f"this needs the package {package}, which is not installed",
        fix=f"pip install 'windlass[{extra}]'",
        error_code="not-installed",
    )


def _as_bug(error: Exception) -> UserError:
    """An error that should have been a UserError: the traceback goes to a file, its last line to the user."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="windlass-", suffix=".traceback", delete=False) as file:
        traceback.print_exception(error, file=file)
    return UserError(
        f"unexpected {type(error).__name__}: {error}",
        evidence=f"the traceback is in {file.name}",
        fix="a mistake of windlass: please report it with that file",
        exit_code=ExitCode.FAILED,
        error_code="unexpected",
    )


if __name__ == "__main__":
    main()
