"""`windlass image infrastructure`: what CodeBuild needs in an AWS account, as a CloudFormation template."""

from __future__ import annotations

import click

from windlass.errors import ExitCode, UserError


@click.command(short_help="Print what CodeBuild needs in AWS.")
@click.option("--name", default="windlass-image", show_default=True, help="Of the project and its role.")
@click.option("--repository", default="windlass/train", show_default=True, help="ECR repository.")
@click.option("--bucket", help="For build contexts.  [default: windlass-image-ACCOUNT-REGION]")
@click.option("--account", help="[default: asked of AWS]")
@click.option("--region", envvar=["AWS_REGION", "AWS_DEFAULT_REGION"], help="[default: AWS_REGION]")
@click.option("--platform", type=click.Choice(["linux/amd64", "linux/arm64"]), default="linux/amd64", show_default=True)
@click.option(
    "--compute",
    type=click.Choice(["SMALL", "MEDIUM", "LARGE", "XLARGE", "2XLARGE"]),
    default="LARGE",
    show_default=True,
)
@click.option("--minutes", type=click.IntRange(5, 480), default=120, show_default=True, help="A build is ended then.")
@click.option("--json", "as_json", is_flag=True, help="It is JSON in any case.")
def infrastructure(
    name: str,
    repository: str,
    bucket: str | None,
    account: str | None,
    region: str | None,
    platform: str,
    compute: str,
    minutes: int,
    as_json: bool,
) -> int:
    """Print what CodeBuild needs in AWS, as a CloudFormation template.

    A project, its role with no more rights than a build needs, a bucket for build contexts, an ECR repository.

    \b
    windlass image infrastructure > stack.json; aws cloudformation deploy --template-file stack.json …
    """
    from windlass.cli.output import print_json
    from windlass.common.aws import account_of
    from windlass.image.aws.infrastructure import Infrastructure, cloudformation

    if region is None:
        raise UserError("in which region?", fix="--region us-west-2    or set AWS_REGION")
    owner = account or account_of(region)
    wanted = Infrastructure(
        name=name,
        repository=repository,
        bucket=bucket or f"windlass-image-{owner}-{region}",
        region=region,
        account=owner,
        platform=platform,
        compute=compute,
        minutes=minutes,
        partition="aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws",
    )
    print_json(cloudformation(wanted))
    return ExitCode.OK
