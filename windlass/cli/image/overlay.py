"""`windlass image overlay`: changed code on a proven image, in seconds."""

from __future__ import annotations

import time
from pathlib import Path

import click

from windlass.cli.image.options import is_run_file
from windlass.errors import ExitCode, UserError


@click.command(short_help="Put changed code on a proven image, in seconds.")
@click.argument("what", metavar="RUN.yaml|IMAGE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--code", type=click.Path(path_type=Path), help="Folder with the code.  [default: image.context]")
@click.option("--to", metavar="PATH", help="Where it belongs in the image.  [default: where the image has its code]")
@click.option("--keep", is_flag=True, help="Other files that the image has there stay.  [default: they are hidden]")
@click.option("--insecure", is_flag=True, help="The registry speaks plain HTTP. Those of this machine always do.")
@click.option("--no-pin", is_flag=True, help="Leave the run file as it is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def overlay(
    what: str,
    overrides: tuple[str, ...],
    code: Path | None,
    to: str | None,
    keep: bool,
    insecure: bool,
    no_pin: bool,
    as_json: bool,
) -> int:
    """Put changed code on a proven image, in seconds.

    One layer is added in the registry: nothing is built, pulled or installed here. The same code on the same image
    gives the same digest. An overlay of an overlay stands on the proven image below, so layers do not pile up.
    """
    from windlass.cli.output import print_json
    from windlass.image.aws.ecr import EcrHost, push_token
    from windlass.image.registry.credentials import find_credentials
    from windlass.image.registry.overlay import put_overlay
    from windlass.image.registry.reference import ImageReference, pin
    from windlass.image.registry.registry import Repository
    from windlass.spec import load_run

    begin = time.perf_counter()
    run = load_run(what, overrides) if is_run_file(what) else None
    if run and not run.image.name:
        raise UserError(f"{what} names no image", fix=f"windlass image push {what}    writes image.name")
    proven = ImageReference.parse(run.image.name if run and run.image.name else what)
    folder = code or (Path(what).parent / run.image.context if run else None)
    if folder is None:
        raise UserError("which folder holds the code?", fix="--code FOLDER")
    host = EcrHost.of(proven.registry)
    credentials = push_token(host) if host else find_credentials(proven.registry or "")
    done = put_overlay(Repository(proven, credentials, plain_http=insecure), proven, folder, to=to, keep=keep)
    pinned_file = Path(what) if run and not no_pin else None
    if pinned_file:
        pinned_file.write_text(pin(pinned_file.read_text(), str(done.pinned)))
    seconds = time.perf_counter() - begin
    if as_json:
        run_file = str(pinned_file) if pinned_file else None
        print_json({**done.as_dict(), "seconds": round(seconds, 3), "run_file": run_file})
        return ExitCode.OK
    click.echo(f"{done.image}: {done.files} files, {done.layer_bytes / 1024:.0f} KiB, {seconds:.1f} s")
    click.echo(f"{done.pinned}" + (f" is image.name of {pinned_file} now" if pinned_file else ""))
    return ExitCode.OK
