"""`windlass image plan`: what an image should be made of, and what is wrong with the one a user has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windlass.errors import ExitCode, UserError

if TYPE_CHECKING:
    from windlass.image.conflict import Conflict
    from windlass.image.facts.node import Node
    from windlass.image.read.texts import Texts
    from windlass.image.plan.choose import ImagePlan
    from windlass.spec import Run


@click.command(short_help="Choose what an image is made of.")
@click.argument("run_file", metavar="RUN.yaml", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--gpu", "gpu_name", metavar="GPU", help="GPU of the nodes, for example h100.")
@click.option("--driver", metavar="VERSION", help="NVIDIA driver of the nodes, for example 570.86.")
@click.option("--from-cluster", is_flag=True, help="Read GPU and driver from the labels of the cluster's nodes.")
@click.option("--dockerfile", metavar="FILE", help="Check this Dockerfile; sets image.dockerfile.")
@click.option("--requirements", metavar="FILE", help="Requirements to install; sets image.requirements.")
@click.option("--resolve/--no-resolve", default=True, show_default=True, help="Ask a real resolver (uv, else pip).")
@click.option("--lock", is_flag=True, help="Pin every package of a planned image.")
@click.option("--diff", "only_diff", is_flag=True, help="Print the patch alone.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the Dockerfile and its files to this folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan(
    run_file: str,
    overrides: tuple[str, ...],
    gpu_name: str | None,
    driver: str | None,
    from_cluster: bool,
    dockerfile: str | None,
    requirements: str | None,
    resolve: bool,
    lock: bool,
    only_diff: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    """Choose what an image is made of.

    Base image, torch with its CUDA, one NCCL, Python, EFA and its NCCL plugin, HyperPod's agent where it is asked for:
    from the run file and the GPU and driver of the nodes, each with its reason. With a Dockerfile or a requirements
    file of your own, it looks for conflicts, by reading them and by a real resolver, and shows a patch. Exit code 1
    where what you have will not work. Nothing is built.
    """
    from windlass.spec import load_run

    changes = list(overrides)
    changes += [f"image.dockerfile={dockerfile}"] if dockerfile else []
    changes += [f"image.requirements={requirements}"] if requirements else []
    run = load_run(run_file, changes)
    beside = Path(run_file).parent
    node = _node(run, driver, gpu_name, from_cluster)
    texts = texts_of(run, beside)
    if run.image.dockerfile:
        return _check(texts, node, resolve=resolve, only_diff=only_diff, out=out, as_json=as_json)
    return _plan(run, node, texts, resolve=resolve, lock=lock, only_diff=only_diff, out=out, as_json=as_json)


def _plan(
    run: Run, node: Node, texts: Texts, *, resolve: bool, lock: bool, only_diff: bool, out: Path | None, as_json: bool
) -> int:
    """Choose everything; requirements of the user's own are checked first, and planned with as they should be."""
    from windlass.image.plan.choose import plan_image

    checked = _checked(texts, node, resolve=resolve)
    planned = plan_image(run, node, checked.after.files)
    if lock:
        from windlass.image.plan.lock import lock as pin

        planned = pin(planned)
    found = [*checked.found, *_planned_conflicts(planned, resolve=resolve and not lock)]
    if out:
        _write(out, {"Dockerfile": planned.dockerfile, **planned.files})
    if as_json:
        from windlass.cli.output import print_json

        print_json(planned.as_dict() | checked.as_dict() | {"conflicts": [one.as_dict() for one in found]})
    elif only_diff:
        click.echo(checked.diff, nl=False)
    else:
        if checked.found:
            _print_checked(checked, "the requirements")
            click.echo("\nThe plan with this patch:\n")
        _print_plan(planned, found[len(checked.found) :])
    return ExitCode.FAILED if any(one.severity == "error" for one in found) else ExitCode.OK


@dataclass(frozen=True)
class Checked:
    """What was found in a user's own files, and the files as they should be."""

    found: list[Conflict]
    before: Texts
    after: Texts
    num_changes: int
    left: list[Conflict]
    unchecked: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        return self.after.diff(self.before)

    def as_dict(self) -> dict[str, Any]:
        return {
            "conflicts": [one.as_dict() for one in self.found],
            "patch": self.diff,
            "left": [one.as_dict() for one in self.left],
            "unchecked": list(self.unchecked),
        }


def _checked(texts: Texts, node: Node, *, resolve: bool) -> Checked:
    from windlass.image.conflicts import find_conflicts, patch

    found = find_conflicts(texts.dockerfile, texts.files, node, name=texts.name)
    if not resolve or (texts.dockerfile is None and not texts.files):
        made = patch(texts, node)
        return Checked(found, texts, made.after, len(made.fixed), list(made.left))
    from windlass.image.recipe import Recipe
    from windlass.image.resolving import check_by_resolving, repair

    before = check_by_resolving(Recipe(texts), node)
    made, after = repair(texts, node)
    every = sorted([*found, *before.conflicts], key=lambda one: one.severity)
    unchecked = tuple(dict.fromkeys([*before.unchecked, *after.unchecked]))
    return Checked(every, texts, made.after, len(made.fixed), [*made.left, *after.conflicts], unchecked)


def _node(run: Run, driver: str | None, gpu_name: str | None, from_cluster: bool) -> Node:
    from windlass.image.facts.node import node_of

    if not from_cluster:
        return node_of(run, driver=driver, gpu_name=gpu_name)
    if driver or gpu_name:
        raise UserError("--from-cluster reads GPU and driver itself; give either it or --gpu and --driver")
    from windlass.image.facts.node import node_from_labels
    from windlass.targets.kubernetes.client import KubernetesTarget

    nodes = KubernetesTarget().facts(run).nodes
    return node_from_labels([one.labels for one in nodes], instance=run.resources.instance)


def texts_of(run: Run, beside: Path) -> Texts:
    """The Dockerfile of a run, where it has one, and the requirement files that it or the run file names."""
    from windlass.image.read.texts import Texts
    from windlass.image.read.requirements import read_requirement_files

    image = run.image
    if not image.dockerfile:
        return Texts(None, read_requirement_files(beside, [image.requirements] if image.requirements else []))
    path = beside / image.dockerfile
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the Dockerfile {path} cannot be read", evidence=str(error)) from None
    context = beside / image.context
    named = [str(one.relative_to(context)) for pattern in ("*.txt", "*/*.txt") for one in sorted(context.glob(pattern))]
    return Texts(text, read_requirement_files(context, named, only_requirements=True), image.dockerfile)


def _check(texts: Texts, node: Node, *, resolve: bool, only_diff: bool, out: Path | None, as_json: bool) -> int:
    """Look for conflicts in a user's own Dockerfile, and show the patch that removes them."""
    checked = _checked(texts, node, resolve=resolve)
    if out:
        _write(out, {"Dockerfile.windlass": checked.after.dockerfile or "", **checked.after.changed_files(texts)})
    if as_json:
        from windlass.cli.output import print_json

        print_json(checked.as_dict())
    elif only_diff:
        click.echo(checked.diff, nl=False)
    else:
        _print_checked(checked, texts.name)
    return ExitCode.FAILED if any(one.severity == "error" for one in checked.found) else ExitCode.OK


def _print_checked(checked: Checked, name: str) -> None:
    _print_conflicts(checked.found, name)
    if checked.diff:
        click.echo(f"\n{checked.diff}", nl=False)
        count = f"{checked.num_changes} change{'s' * (checked.num_changes != 1)}"
        click.echo(f"\n{count} in this patch; {_left(checked.left)}")
    for one in checked.unchecked:
        click.echo(f"not checked: {one}", err=True)


def _left(left: list[Conflict]) -> str:
    ids = ", ".join(dict.fromkeys(one.id for one in left))
    return f"left to you: {ids}" if left else "nothing is left after it"


def _planned_conflicts(planned: ImagePlan, *, resolve: bool) -> list[Conflict]:
    """What is wrong with a plan: with a base image or requirements of the user's own there may be something."""
    from windlass.image.conflicts import find_conflicts

    found = find_conflicts(planned.dockerfile, planned.files, planned.node)
    of = planned.ingredients
    if not resolve or not (of.own or of.pip or of.agent):
        return found
    from windlass.image.read.texts import Texts
    from windlass.image.recipe import Recipe
    from windlass.image.resolving import check_by_resolving

    resolved = check_by_resolving(Recipe(Texts(planned.dockerfile, planned.files)), planned.node)
    for one in resolved.unchecked:
        click.echo(f"not checked: {one}", err=True)
    return [*found, *resolved.conflicts]


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _print_plan(planned: ImagePlan, found: list[Conflict]) -> None:
    from windlass.cli.output import print_pairs, warn

    rows = [("nodes", planned.node.describe())]
    for one in planned.choices:
        rows.append((one.what, f"{one.value} · {one.why}"))
        if one.source:
            rows.append(("", f"({one.source})"))
    print_pairs(rows)
    click.echo(f"\n{planned.dockerfile}", nl=False)
    for name, text in planned.files.items():
        click.echo(f"\n# {name}\n{text}", nl=False)
    for warning in planned.warnings:
        warn(warning)
    if found:
        click.echo()
        _print_conflicts(found, "the plan")


def _print_conflicts(found: list[Conflict], name: str) -> None:
    if not found:
        click.echo(f"{name}: no conflicts found")
        return
    for one in found:
        place = f"{one.place}: " if one.place else ""
        click.echo(f"{one.severity}: {place}{one.sentence}  [{one.id}]")
        for line in one.evidence[:8]:
            click.echo(f"    {line}")
        if one.fix:
            click.echo(f"    fix: {one.fix.sentence}")
