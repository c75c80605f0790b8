"""`windlass image`: the group; its commands have files of their own."""

from __future__ import annotations

import click

from windlass.cli.image.build import build
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


for command in (plan, build, test, push):
    image.add_command(command)


@image.command(short_help="Print what CodeBuild needs in AWS.")
@click.option("--json", "as_json", is_flag=True, help="It is JSON in any case.")
def infrastructure(as_json: bool) -> int:
    """Print what CodeBuild needs in AWS, as a CloudFormation template.

    A project, its role with no more rights than a build needs, a bucket for build contexts, an ECR repository. Names,
    the size of the machine and the longest build are parameters of the template.

    \b
    windlass image infrastructure > stack.json; aws cloudformation deploy --template-file stack.json …
    """
    from windlass.cli.output import print_json
    from windlass.errors import ExitCode
    from windlass.image.aws.ecr import template

    print_json(template())
    return ExitCode.OK
