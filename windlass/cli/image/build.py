"""`windlass image build`: make an image, prove it, and show every change that made it work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from windlass.cli.image.options import BUILDERS, LEVELS, assignments, surroundings, surroundings_options
from windlass.errors import ExitCode, UserError

if TYPE_CHECKING:
    from windlass.image.build.building import Built, Workshop
    from windlass.image.build.job import Settings, Source
    from windlass.image.facts.node import Node
    from windlass.image.read.texts import Fix


@click.command(short_help="Build an image and prove it.")
@click.argument("run_file", metavar="[RUN.yaml]", required=False, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("-f", "--dockerfile", type=click.Path(path_type=Path), help="Your own.  [default: image.dockerfile]")
@click.option("--context", type=click.Path(path_type=Path), help="Folder to build from.  [default: image.context]")
@click.option("--name", help="Repository of the image.  [default: image.name]")
@click.option("--builder", type=click.Choice([*BUILDERS, "codebuild"]), help="[default: the first that works here]")
@click.option("--auto-fix", is_flag=True, help="Heal what resolving shows; after a failure, what the log proves.")
@click.option("--attempts", type=click.IntRange(1), default=3, show_default=True, help="Builds at most.")
@click.option("--test", "level", type=click.Choice([*LEVELS, "none"]), default="quick", show_default=True)
@click.option("--platform", type=click.Choice(["linux/amd64", "linux/arm64"]), help="[default: the nodes']")
@click.option("--target", help="Stage to build.  [default: the last]")
@click.option("--build-arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Value of an ARG.")
@click.option("--driver", metavar="VERSION", help="NVIDIA driver of the nodes.")
@click.option("--gpu", metavar="GPU", help="GPU of the nodes, for example H100.")
@click.option("--cache", metavar="REPOSITORY", help="Repository that keeps layers for other machines.")
@click.option("--no-cache", is_flag=True, help="Build every step anew.")
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME=FILE", help="File for RUN --mount=type=secret,id=NAME."
)
@click.option("--records", type=click.Path(path_type=Path), default=Path("images"), show_default=True)
@click.option("--project", default="windlass-image", show_default=True, help="CodeBuild project.")
@click.option("--bucket", help="Bucket for CodeBuild.  [default: windlass-image-ACCOUNT-REGION]")
@click.option("--region", help="AWS region of CodeBuild.  [default: that of image.name]")
@surroundings_options
@click.option("--dry-run", is_flag=True, help="Print the Dockerfile and the command, and build nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def build(
    run_file: Path | None,
    overrides: tuple[str, ...],
    dockerfile: Path | None,
    context: Path | None,
    name: str | None,
    builder: str | None,
    auto_fix: bool,
    attempts: int,
    level: str,
    platform: str | None,
    target: str | None,
    arguments: tuple[str, ...],
    driver: str | None,
    gpu: str | None,
    cache: str | None,
    no_cache: bool,
    secrets: tuple[str, ...],
    records: Path,
    project: str,
    bucket: str | None,
    region: str | None,
    python: str | None,
    mounts: tuple[str, ...],
    variables: tuple[str, ...],
    gpus: bool,
    smoke: str,
    imports: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Build an image and prove it.

    From a run file: its image.dockerfile, or one that windlass plans. Without a run file: ./Dockerfile. Every failed
    attempt is followed, with --auto-fix, by another one with one more change, derived from the log and shown; the
    changed files are written beside yours as Dockerfile.windlass and so on, never over them. The image counts as built
    when the tests inside it pass. Logs and the proof are kept in images/TAG.
    """
    from windlass.image.build.building import build_image
    from windlass.image.build.job import Settings
    from windlass.image.build.preparing import proof_of, source_of
    from windlass.image.build.records import Records
    from windlass.spec import load_run

    run = load_run(run_file, overrides) if run_file else None
    source, node = source_of(
        run,
        run_file,
        dockerfile=dockerfile,
        context=context,
        name=name,
        platform=platform,
        target=target,
        arguments=assignments("--build-arg", arguments),
        driver=driver,
        gpu=gpu,
    )
    settings = Settings(
        attempts=attempts,
        auto_fix=auto_fix,
        proof=None if level == "none" else proof_of(run, node, level, imports=imports, smoke=smoke),
        around=surroundings(python, mounts, variables, gpus),
        secrets=_secret_files(secrets),
        cache=cache,
        fresh=no_cache,
    )
    source, fixes = _judged(source, node, auto_fix=auto_fix, quiet=as_json)
    workshop = _workshop(builder, source, project, bucket, region)
    if dry_run:
        return _show(source, workshop, settings, as_json)
    from windlass.cli.image.watching import watching

    with watching(as_json=as_json) as watcher:
        built = build_image(source, workshop, Records(records), settings, watcher, fixes)
    _report(built, as_json)
    return ExitCode.OK


def _secret_files(values: tuple[str, ...]) -> dict[str, Path]:
    files = {name: Path(file).absolute() for name, file in assignments("--secret", values).items()}
    for name, file in files.items():
        if not file.is_file():
            raise UserError(f"--secret {name}: there is no file {file}", fix=f"--secret {name}=FILE    that holds it")
    return files


def _judged(source: Source, node: Node, *, auto_fix: bool, quiet: bool) -> tuple[Source, tuple[Fix, ...]]:
    """What resolving shows needs no failed build: with --auto-fix it is healed first, else it is said."""
    from dataclasses import replace

    from windlass.image.judge import heal
    from windlass.image.read.texts import Fix, Texts
    from windlass.image.state.resolver import Index

    files = {**source.texts.files, **source.planned}
    texts = Texts(source.texts.dockerfile, files, source.texts.name, code=source.texts.code)
    healed = heal(texts, node, Index(), arguments=source.arguments, target=source.target, repair=auto_fix)
    if not quiet:
        for finding in healed.before.findings:
            click.echo(f"{finding.severity}: {finding.where}: {finding.sentence}", err=True)
        for unknown in healed.before.unknown:
            click.echo(f"not checked: {unknown}", err=True)
        if healed.diff:
            click.echo(f"changed before the first attempt:\n{healed.diff}", err=True)
    if not healed.diff:
        return source, ()
    changed = {name: text for name, text in healed.patched.files.items() if name not in source.planned}
    planned = {name: healed.patched.files[name] for name in source.planned}
    after = Texts(healed.patched.dockerfile, changed, source.texts.name)
    fixes = tuple(
        Fix(finding.id, sentence, finding.evidence, after.dockerfile or "")
        for finding, sentence in zip(healed.fixed, healed.changes, strict=True)
    )
    return replace(source, texts=after, planned=planned), fixes


def _workshop(name: str | None, source: Source, project: str, bucket: str | None, region: str | None) -> Workshop:
    from windlass.common.aws import account_of
    from windlass.image.aws.codebuild import CloudWorkshop
    from windlass.image.aws.ecr import EcrHost
    from windlass.image.build.builders import find_builder
    from windlass.image.build.building import LocalWorkshop
    from windlass.image.registry.reference import ImageReference

    host = EcrHost.of(ImageReference.parse(source.title).registry)
    if name != "codebuild":
        try:
            return LocalWorkshop(find_builder(name))
        except UserError:
            if name or host is None:
                raise
    # No builder here, and the image belongs to ECR: AWS builds it.
    if host is None:
        raise UserError(
            f"CodeBuild pushes what it builds to ECR, and {source.title} is not there",
            fix="image.name=ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY",
        )
    where = region or host.region
    return CloudWorkshop(project, bucket or f"windlass-image-{account_of(where)}-{where}", where)


def _show(source: Source, workshop: Workshop, settings: Settings, as_json: bool) -> int:
    """What would be built and by which command or request, and nothing else."""
    from windlass.cli.image.watching import command_of
    from windlass.cli.output import print_json

    sent = command_of(source, workshop, settings)
    if as_json:
        print_json({"dockerfile": source.recipe, "builder": workshop.name, **sent})
    else:
        click.echo(f"{source.recipe.rstrip()}\n\n# {workshop.name}: {sent.get('command') or sent.get('request')}")
    return ExitCode.OK


def _report(built: Built, as_json: bool) -> None:
    from windlass.cli.output import print_json, print_pairs

    record = built.record
    if as_json:
        fields = ("image", "id", "tag", "platform", "builder", "attempts", "fixes")
        print_json(
            {
                **{name: getattr(record, name) for name in fields},
                "written": [str(path) for path in built.written],
                "records": str(built.folder),
                "pushed": record.pushed,
                "proof": built.report.as_dict() if built.report else None,
            }
        )
        return
    pairs = [("image", record.image), ("platform", record.platform), ("records", str(built.folder))]
    if built.report:
        loaded = ", ".join(f"{key} {value}" for key, value in built.report.values["loaded"].items() if value)
        pairs.append(("proven", f"{built.report.values['level']}: {loaded}"))
    pairs += [("changed", str(path)) for path in built.written]
    pairs.append(("pushed", record.pushed) if record.pushed else ("next", "windlass image push"))
    print_pairs(pairs)
