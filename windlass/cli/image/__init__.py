"""`windlass image`: the group; its commands have files of their own."""

from __future__ import annotations

import click

from windlass.cli.image.build import build
from windlass.cli.image.infrastructure import infrastructure
from windlass.cli.image.plan import plan
from windlass.cli.image.push import push
from windlass.cli.image.test import test


@click.group()
def image() -> None:
    """Images: plan, build, test, push."""
    from importlib.util import find_spec

    if find_spec("packaging") is None:
        from windlass.errors import UserError

        raise UserError("the Python package packaging is missing", fix="pip install 'windlass[image]'")


for command in (plan, build, test, push, infrastructure):
    image.add_command(command)
