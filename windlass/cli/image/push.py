"""`windlass image push`: into a registry, verified there, and pinned in the run file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from windlass.cli.image.options import BUILDERS, builder_of, built_image
from windlass.common.files import write_output
from windlass.errors import ExitCode, UserError

if TYPE_CHECKING:
    from windlass.image.registry.credentials import Credentials
    from windlass.image.registry.reference import ImageReference


@click.command(short_help="Push a proven image and pin the run file to it.")
@click.argument("what", metavar="RUN.yaml|IMAGE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--to", metavar="REGISTRY/REPOSITORY", help="[default: image.name]")
@click.option("--tag", help="[default: that of the build, from git and content]")
@click.option("--builder", type=click.Choice(BUILDERS), help="[default: the one that built it]")
@click.option("--username", help="User of the registry; the password comes on stdin.")
@click.option("--insecure", is_flag=True, help="The registry speaks plain HTTP. Those of this machine always do.")
@click.option("--unproven", is_flag=True, help="Push an image whose tests did not pass, or were not run.")
@click.option("--replace", is_flag=True, help="Move a tag that is there.")
@click.option("--no-pin", is_flag=True, help="Leave the run file as it is.")
@click.option("--records", type=click.Path(path_type=Path), default=Path("images"), show_default=True)
@click.option("--dry-run", is_flag=True, help="Say what would be pushed where, and send nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def push(
    what: str,
    overrides: tuple[str, ...],
    to: str | None,
    tag: str | None,
    builder: str | None,
    username: str | None,
    insecure: bool,
    unproven: bool,
    replace: bool,
    no_pin: bool,
    records: Path,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Push a proven image and pin the run file to it.

    Of a run file, its newest built image. An ECR repository is made where it is missing: tags that cannot move, a scan
    of every push, old images expiring. Credentials: WINDLASS_REGISTRY_USER and WINDLASS_REGISTRY_PASSWORD, --username
    with the password on stdin, or what docker and podman know; for ECR, a token of AWS. They stay in memory. The
    digest is verified by asking the registry, and written to image.name of the run file.
    """
    import dataclasses

    from windlass.cli.output import print_json
    from windlass.image.build.builders import IN_THE_CLOUD
    from windlass.image.build.records import Records
    from windlass.image.registry.push import look_up, push_image
    from windlass.image.registry.reference import ImageReference, pin

    kept = Records(records)
    run, record = built_image(what, overrides, kept)
    if not (record and record.proven) and not unproven:
        raise UserError(
            f"{record.image if record else what} is not proven",
            cause="its last test failed" if record and record.proof else "it was not tested here",
            fix=f"windlass image test {what}    or push it --unproven",
        )
    image = record.image if record else what
    destination = _destination(image, to, tag)
    if dry_run:
        if as_json:
            print_json({"image": image, "destination": str(destination)})
        else:
            click.echo(f"{image} → {destination}")
        return ExitCode.OK
    credentials = _credentials(destination, username, quiet=as_json)
    if record and record.builder == IN_THE_CLOUD and record.pushed:
        pushed = look_up(ImageReference.parse(record.pushed), credentials, plain_http=insecure)
    else:
        quiet = as_json or not sys.stderr.isatty()
        pushed = push_image(
            builder_of(builder, record.builder if record else None),
            image,
            destination,
            credentials,
            plain_http=insecure,
            replace=replace,
            on_line=None if quiet else lambda line: click.echo(f"  {line}", err=True),
        )
    if record:
        kept.save(dataclasses.replace(record, pushed=str(pushed.pinned)))
    pinned_file = None
    if run and not no_pin:
        pinned_file = Path(what)
        write_output(pinned_file, pin(pinned_file.read_text(), str(pushed.pinned)))
    if as_json:
        print_json(
            {
                "image": str(pushed.image),
                "pinned": str(pushed.pinned),
                "digest": pushed.digest,
                "bytes": pushed.size,
                "already_there": pushed.already_there,
                "run_file": str(pinned_file) if pinned_file else None,
            }
        )
        return ExitCode.OK
    there = " was there already" if pushed.already_there else f": {pushed.size / 2**20:.1f} MiB"
    click.echo(f"{pushed.image}{there}, verified in the registry")
    click.echo(f"{pushed.pinned}" + (f" is image.name of {pinned_file} now" if pinned_file else ""))
    return ExitCode.OK


def _destination(image: str, to: str | None, tag: str | None) -> ImageReference:
    from windlass.image.registry.reference import ImageReference

    local = ImageReference.parse(image)
    target = ImageReference.parse(to) if to else local
    chosen = tag or (target.tag if to else None) or local.tag
    if target.registry in (None, "localhost"):
        raise UserError(
            f"{image} belongs to no registry", fix="--to registry.example.com/team/train    or set image.name so"
        )
    if chosen is None or chosen == "latest":
        raise UserError("a tag that says what is in the image is needed", fix="--tag v1    latest alone names nothing")
    return target.tagged(chosen)


def _credentials(destination: ImageReference, username: str | None, *, quiet: bool) -> Credentials | None:
    from windlass.cli.output import warn
    from windlass.image.aws.ecr import EcrHost, ensure_repository, push_token
    from windlass.image.registry.credentials import Credentials, find_credentials

    if username:
        password = sys.stdin.readline().rstrip("\n")
        if not password:
            raise UserError("--username needs the password on stdin", fix="… push --username NAME < FILE")
        return Credentials(username, password)
    host = EcrHost.of(destination.registry)
    if host is None:
        return find_credentials(destination.registry or "")
    repository = ensure_repository(host, destination.repository)
    if not quiet:
        if repository.created:
            click.echo(f"made the ECR repository {repository.name}", err=True)
        for warning in repository.warnings:
            warn(warning)
    return push_token(host)
