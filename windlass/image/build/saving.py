"""Write the files of a plan to a folder that a user named, and never over what is not windlass's own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.common.files import sha256_of, write_output
from windlass.errors import UserError
from windlass.image.build.context import Context

RECORD = ".windlass/written.sha256"  # what earlier calls wrote, as sha256sum writes it


def check_folder(folder: Path) -> None:
    """Make a folder for a plan, where there is none."""
    fix = "-o FOLDER    one that is there, or that can be made"
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"-o {folder} is no folder", fix=fix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"-o {folder}: the folder cannot be made", evidence=str(error), fix=fix) from None


def save_files(
    folder: Path, files: Mapping[str, str], trees: Mapping[str, Context], *, replace: bool = False
) -> Iterator[Path]:
    """Write files and whole folders, and yield the path of each. Nothing is written where one of them is not ours."""
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    digests |= {name: tree.digest() for name, tree in trees.items()}
    record = _read_record(folder / RECORD)
    present = {name: _digest(folder / name, trees.get(name)) for name in digests}
    foreign = [name for name, found in present.items() if found not in (None, digests[name], record.get(name))]
    if foreign and not replace:
        raise UserError(
            f"{folder} has files that windlass did not write, or that were changed since: {', '.join(foreign)}",
            evidence="nothing was written",
            fix="-o FOLDER    another one, or --replace, which writes over them",
        )
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_output(folder / name, text)
        yield folder / name
    for name, tree in trees.items():
        tree.copy(folder / name)
        yield folder / name
    (folder / RECORD).parent.mkdir(exist_ok=True)
    write_output(folder / RECORD, "".join(f"{digest}  {name}\n" for name, digest in sorted((record | digests).items())))


def _digest(path: Path, tree: Context | None) -> str | None:
    """What is at a path; None: nothing."""
    if not os.path.lexists(path):
        return None
    if tree and path.is_dir():
        return Context(path, tree.ignore).digest()
    return sha256_of(path) if path.is_file() and not tree else "of another kind"


def _read_record(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # without it nothing is known to be ours
        return {}
    return {name: digest for digest, gap, name in (line.partition("  ") for line in lines) if gap}
