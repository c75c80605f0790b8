"""`windlass image plan`: what an image should be made of, and what is wrong with the one a user has."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windlass.cli.image.options import assignments
from windlass.errors import ExitCode, UserError

if TYPE_CHECKING:
    from windlass.image.facts.node import Node
    from windlass.image.judge import Healed, Verdict
    from windlass.image.plan.choose import ImagePlan
    from windlass.image.rules import Finding
    from windlass.image.state.resolver import Index
    from windlass.spec import Run


@click.command(short_help="Choose what an image is made of, or judge a Dockerfile.")
@click.argument("file", metavar="[RUN.yaml|Dockerfile]", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--gpu", "gpu_name", metavar="GPU", help="GPU of the nodes, for example h100; `none` for CPUs.")
@click.option("--driver", metavar="VERSION", help="NVIDIA driver of the nodes, for example 570.86.")
@click.option("--platform", type=click.Choice(["linux/amd64", "linux/arm64"]), help="[default: the nodes']")
@click.option("--from-cluster", is_flag=True, help="Read GPU and driver from the labels of the cluster's nodes.")
@click.option("--dockerfile", metavar="FILE", help="Judge this Dockerfile; sets image.dockerfile.")
@click.option("--context", type=click.Path(path_type=Path), help="Its build context.  [default: image.context]")
@click.option("--requirements", metavar="FILE", help="Requirements to install; sets image.requirements.")
@click.option("--build-arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Value of an ARG.")
@click.option("--target", help="Stage that is built.  [default: the last]")
@click.option("--resolve/--no-resolve", default=True, show_default=True, help="Ask the package indexes.")
@click.option("--strict", is_flag=True, help="Fail where anything could not be checked.")
@click.option("--lock", is_flag=True, help="Pin every package of a planned image; not of your own Dockerfile.")
@click.option("--diff", "only_diff", is_flag=True, help="Print the patch alone.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write all that a build needs to this folder.")
@click.option("--replace", "write_over", is_flag=True, help="With -o, write over files that are not windlass's own.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan(
    file: str | None,
    overrides: tuple[str, ...],
    gpu_name: str | None,
    driver: str | None,
    platform: str | None,
    from_cluster: bool,
    dockerfile: str | None,
    context: Path | None,
    requirements: str | None,
    arguments: tuple[str, ...],
    target: str | None,
    resolve: bool,
    strict: bool,
    lock: bool,
    only_diff: bool,
    out: Path | None,
    write_over: bool,
    as_json: bool,
) -> int:
    """Choose what an image is made of, or judge a Dockerfile.

    Base image, torch with its CUDA, one NCCL, Python, EFA and its NCCL plugin, HyperPod's agent where it is asked for:
    from the run file and the GPU and driver of the nodes, each with its reason. A Dockerfile of your own, with a run
    file or alone, is resolved step by step against the package indexes; what does not fit is shown with its line, and
    a patch where it heals the file. Exit code 1 where it will not work, and with --strict where something could not be
    checked. Nothing is built.
    """
    from windlass.cli.output import print_json
    from windlass.image.build.preparing import planned_trees
    from windlass.image.build.saving import check_folder, save_files
    from windlass.image.state.resolver import Index
    from windlass.spec import load_run

    if out:
        check_folder(out)
    index = Index(offline=not resolve)
    if file is not None and not file.endswith((".yaml", ".yml")):
        if overrides or dockerfile:
            raise UserError(
                f"{file} is no run file (.yaml), so there is nothing that KEY=VALUE could change",
                fix=f"windlass image plan RUN.yaml --dockerfile {file} KEY=VALUE",
            )
        file, dockerfile = None, file
    if file is None:
        run, path = None, Path(dockerfile or "Dockerfile")
        home = folder = path.parent
        node, assumed = _named_node(gpu_name, driver, platform)
    else:
        named = {"image.dockerfile": dockerfile, "image.requirements": requirements, "image.platform": platform}
        run = load_run(file, [*overrides, *(f"{key}={value}" for key, value in named.items() if value)])
        home = Path(file).parent
        path, folder = home / (run.image.dockerfile or "Dockerfile"), home / run.image.context
        node = _node(run, driver, gpu_name, from_cluster)
        assumed = _unknown_of(node)
    if lock and not (run and not run.image.dockerfile):
        raise UserError(
            f"--lock pins the packages of an image that windlass plans, and {path} is your own",
            fix="uv pip compile requirements.in -o requirements.txt    pins what yours installs",
        )
    if run and not run.image.dockerfile:
        planned, verdict = _planned(run, node, home, index, lock=lock)
        files, trees, own_context = {"Dockerfile": planned.dockerfile, **planned.files}, planned_trees(), None
        values = planned.as_dict() | _as_dict(verdict, [*assumed, *planned.assumed])
        show = partial(_print_plan, planned, verdict)
    else:
        trees, own_context = {}, context or folder
        healed = _healed(path, own_context, node, index, assignments("--build-arg", arguments), target)
        verdict = healed.before
        files = {"Dockerfile.windlass": healed.patched.dockerfile or "", **healed.patched.changed_files(healed.texts)}
        left = [finding.as_dict() for finding in healed.after.findings]
        values = _as_dict(verdict, assumed) | {"patch": healed.diff, "changes": list(healed.changes), "left": left}
        show = partial(_print_checked, healed, path.name, assumed)
    if out:
        for written in save_files(out, files, trees, replace=write_over):
            click.echo(f"wrote {written}", err=True)
        options = ["--platform", node.platform, *(["--target", target] if target else [])]
        options += [word for argument in arguments for word in ("--build-arg", argument)]
        click.echo(f"{_build_command(options, out, files, own_context)}    builds it", err=True)
    if as_json:
        print_json(values)
    elif only_diff:
        click.echo(values["patch"], nl=False)
    else:
        show()
    return ExitCode.FAILED if verdict.errors or (strict and verdict.unknown) else ExitCode.OK


def _named_node(gpu: str | None, driver: str | None, platform: str | None) -> tuple[Node, list[str]]:
    """The nodes by what the command line says, and what had to be assumed of them."""
    from windlass.image.facts.node import node_named
    from windlass.image.facts.table import host_platform

    node = node_named(gpu, driver, platform)
    known = platform or (node.gpu and host_platform(node.gpu))
    assumed = [] if known else [f"the nodes are {node.platform} (--platform)"]
    if gpu is None:
        return replace(node, cpu_only=False), [
            "the nodes have a GPU, of which nothing is known (--gpu, --gpu none)",
            *([] if driver else ["their driver runs whatever torch is built with (--driver)"]),
            *assumed,
        ]
    return node, assumed + _unknown_of(node)


def _unknown_of(node: Node) -> list[str]:
    return [] if node.driver or node.cpu_only else ["the driver runs whatever torch is built with (--driver)"]


def _planned(run: Run, node: Node, home: Path, index: Index, *, lock: bool) -> tuple[ImagePlan, Verdict]:
    """Everything chosen, and judged like any other Dockerfile."""
    from windlass.image.build.preparing import planned_image
    from windlass.image.judge import judge
    from windlass.image.plan import choose
    from windlass.image.read.texts import Texts

    planned = planned_image(run, node, home)
    if lock:
        planned = choose.lock(planned, index)
    return planned, judge(Texts(planned.dockerfile, planned.files), node, index)


def _healed(
    path: Path, context: Path, node: Node, index: Index, arguments: dict[str, str], target: str | None
) -> Healed:
    """A user's own Dockerfile, judged, with the patch that heals it."""
    from windlass.image.build.context import code_files, context_names, text_files
    from windlass.image.judge import heal
    from windlass.image.read.dockerfile import parse_dockerfile
    from windlass.image.read.texts import Texts

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        beside = (path if path.is_dir() else path.parent) / "Dockerfile"
        own = f"windlass image plan {beside}" if beside != path and beside.is_file() else ""
        fix = own or "windlass image plan RUN.yaml    chooses one"
        raise UserError(f"the Dockerfile {path} cannot be read", evidence=str(error), fix=fix) from None
    files = text_files(context, leave_out=(path.name,)) if context.is_dir() else {}
    names = context_names(context) if context.is_dir() else None
    code = code_files(context) if context.is_dir() else {}
    healed = heal(Texts(text, files, path.name, names, code), node, index, arguments=arguments, target=target)
    stages = parse_dockerfile(text, arguments).stages
    if target and stages and not healed.before.trace.states:
        listed = ", ".join(stage.name or str(stage.number) for stage in stages)
        raise UserError(
            f"{path} has no stage {target}",
            evidence=f"its stages: {listed}",
            fix=f"--target {stages[-1].name or stages[-1].number}",
        )
    if not healed.before.trace.states:
        raise UserError(
            f"nothing can be built from {path}: {healed.before.unknown[0]}",
            fix=f"{path}: begin with FROM IMAGE; windlass image plan RUN.yaml    writes one",
        )
    return healed


def _as_dict(verdict: Verdict, assumed: list[str]) -> dict[str, Any]:
    found = [finding.as_dict() for finding in verdict.findings]
    unknown = {"unchecked": list(verdict.unknown), "assumed": list(dict.fromkeys([*assumed, *verdict.assumed]))}
    return {"conflicts": found, "patch": "", "changes": [], "left": found} | unknown


def _node(run: Run, driver: str | None, gpu_name: str | None, from_cluster: bool) -> Node:
    from windlass.image.facts.node import node_from_labels, node_of

    if not from_cluster:
        return node_of(run, driver=driver, gpu_name=gpu_name)
    if driver or gpu_name:
        raise UserError(
            "--from-cluster reads GPU and driver itself; give either it or --gpu and --driver",
            fix="--from-cluster    alone",
        )
    from windlass.targets.kubernetes.client import KubernetesTarget

    nodes = KubernetesTarget().facts(run).nodes
    return node_from_labels([node.labels for node in nodes], instance=run.resources.instance)


def _print_checked(healed: Healed, name: str, assumed: list[str]) -> None:
    _print_findings(healed.before.findings, name)
    if healed.diff:
        click.echo(f"\n{healed.diff}", nl=False)
        click.echo("\nThis patch was resolved and judged again:")
        for change in healed.changes:
            click.echo(f"  {change}")
        left = ", ".join(dict.fromkeys(error.id for error in healed.after.errors))
        click.echo(f"  left to you: {left}" if left else "  nothing is left after it")
    _print_unknown(healed.before, assumed)


def _print_unknown(verdict: Verdict, assumed: Sequence[str]) -> None:
    for sentence in dict.fromkeys([*assumed, *verdict.assumed]):
        click.echo(f"assumed: {sentence}", err=True)
    for sentence in verdict.unknown:
        click.echo(f"not checked: {sentence}", err=True)


def _build_command(options: list[str], out: Path, files: Mapping[str, str], own_context: Path | None) -> str:
    """What builds the image of the written files; those of a user's own Dockerfile go with its context."""
    if own_context is None:
        return shlex.join(["docker", "build", *options, str(out)])
    recipe = next(iter(files))
    if len(files) == 1 or out.resolve() == own_context.resolve():
        return shlex.join(["docker", "build", *options, "-f", str(out / recipe), str(own_context)])
    copy = shlex.join(["cp", "-R", f"{out}/.", str(own_context)])
    return f"{copy} && {shlex.join(['docker', 'build', *options, '-f', str(own_context / recipe), str(own_context)])}"


def _print_plan(planned: ImagePlan, verdict: Verdict) -> None:
    from windlass.cli.output import print_pairs, warn

    rows = [("nodes", planned.node.describe())]
    for choice in planned.choices:
        rows.append((choice.what, f"{choice.value} · {choice.why}"))
        if choice.source:
            rows.append(("", f"({choice.source})"))
    print_pairs(rows)
    click.echo(f"\n{planned.dockerfile}", nl=False)
    for name, text in planned.files.items():
        click.echo(f"\n# {name}\n{text}", nl=False)
    for warning in planned.warnings:
        warn(warning)
    if verdict.findings:
        click.echo()
        _print_findings(verdict.findings, "the plan")
    _print_unknown(verdict, planned.assumed)


def _print_findings(findings: tuple[Finding, ...], name: str) -> None:
    if not findings:
        click.echo(f"{name}: no conflicts found")
        return
    for finding in findings:
        place = f"{finding.where}: " if finding.where else ""
        click.echo(f"{finding.severity}: {place}{finding.sentence}  [{finding.id}]")
        for line in finding.evidence[:4]:
            click.echo(f"    {line}")
