"""`windlass image infrastructure`: what CodeBuild needs in an AWS account, as a CloudFormation template."""

from __future__ import annotations

import click

from windlass.errors import ExitCode


@click.command(short_help="Print what CodeBuild needs in AWS.")
@click.option("--json", "as_json", is_flag=True, help="It is JSON in any case.")
def infrastructure(as_json: bool) -> int:
    """Print what CodeBuild needs in AWS, as a CloudFormation template.

    A project, its role with no more rights than a build needs, a bucket for build contexts, an ECR repository. Names,
    the size of the machine and the longest build are parameters of the template.

    \b
    windlass image infrastructure > stack.json; aws cloudformation deploy --template-file stack.json …
    """
    import json
    from importlib import resources

    from windlass.cli.output import print_json

    print_json(json.loads(resources.files("windlass.image.aws").joinpath("codebuild.json").read_text()))
    return ExitCode.OK
