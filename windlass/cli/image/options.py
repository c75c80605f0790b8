"""Options that several image commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.image.build.builders import Builder
    from windlass.image.build.job import Surroundings
    from windlass.image.build.records import ImageRecord, Records
    from windlass.spec import Run

Command = TypeVar("Command", bound=Callable[..., Any])
BUILDERS = ("docker", "podman", "buildah")
LEVELS = ("quick", "standard", "full")


def surroundings_options(command: Command) -> Command:
    """How the image is run for a test."""
    for option in (
        click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Variable inside the image."),
        click.option(
            "--mount", "mounts", multiple=True, metavar="PATH[:PATH]", help="Folder to show inside, read-only."
        ),
        click.option("--python", metavar="PATH", help="Interpreter in the image.  [default: python, else python3]"),
        click.option("--gpus", is_flag=True, help="Give the container the GPUs of this machine."),
        click.option(
            "--smoke", default="", metavar="COMMAND", help="Smoke run of --level full.  [default: windlass's]"
        ),
        click.option("--import", "imports", multiple=True, metavar="MODULE", help="Module that must be there."),
    ):
        command = option(command)
    return command


def surroundings(python: str | None, mounts: tuple[str, ...], variables: tuple[str, ...], gpus: bool) -> Surroundings:
    from windlass.image.build.job import Surroundings

    pairs = []
    for mount in mounts:
        source, _, target = mount.partition(":")
        folder = Path(source).resolve() if not target else Path(source).absolute()
        if not folder.exists():
            raise UserError(
                f"--mount {mount}: there is no {folder}", fix="--mount FOLDER[:FOLDER-INSIDE]    that is here"
            )
        pairs.append((str(folder), target or str(folder)))
    return Surroundings(python, tuple(pairs), assignments("--env", variables), gpus)


def assignments(option: str, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, each."""
    for value in values:
        if "=" not in value:
            raise UserError(f"{option} {value}: NAME=VALUE is needed", fix=f"{option} {value}=VALUE")
    return dict(value.split("=", 1) for value in values)


def builder_of(name: str | None, built_by: str | None = None) -> Builder:
    """The builder that was asked for, else the one that has the image, else the first that works here."""
    from windlass.image.build.builders import KINDS, find_builder

    return find_builder(name or (built_by if built_by in KINDS else None))


def built_image(what: str, overrides: tuple[str, ...], records: Records) -> tuple[Run | None, ImageRecord | None]:
    """The run of a run file and its newest image; or what is known of an image by that name."""
    from windlass.image.build.preparing import title_of
    from windlass.spec import load_run

    if not what.endswith((".yaml", ".yml")) or not Path(what).is_file():
        return None, records.find(what)
    run = load_run(what, overrides)
    record = records.find(None, title_of(run, None, Path()))
    if record is None:
        raise UserError(f"no image of {what} was built here", fix=f"windlass image build {what}")
    return run, record
