"""From a run file, or from a Dockerfile alone, to what is built and what the image has to show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import windlass
from windlass.catalog.models import known_config
from windlass.errors import UserError
from windlass.image.build.context import Context, Ignore
from windlass.image.build.job import Proof, Source
from windlass.image.facts.node import Node, node_of
from windlass.image.inside.proof import SMALL_MODEL
from windlass.image.plan.choose import ImagePlan, plan_image
from windlass.image.read.requirements import read_requirement_files
from windlass.image.read.texts import Texts
from windlass.image.registry.reference import ImageReference
from windlass.spec import Run

PACKAGE = ".windlass/windlass"  # where a planned Dockerfile copies windlass itself from


def source_of(
    run: Run | None,
    run_file: Path | None,
    *,
    dockerfile: Path | None = None,
    context: Path | None = None,
    name: str | None = None,
    platform: str | None = None,
    target: str | None = None,
    arguments: Mapping[str, str] | None = None,
    driver: str | None = None,
    gpu: str | None = None,
) -> tuple[Source, Node]:
    """What is built, and the node that it is for. The command line adds to a run file, or speaks in its place."""
    home = run_file.parent if run_file else Path()
    node = node_of(run, driver=driver, gpu_name=gpu) if run else Node()
    files = Context.open(context or (home / run.image.context if run else home))
    dockerfile = dockerfile or (home / run.image.dockerfile if run and run.image.dockerfile else None)
    planned: Mapping[str, str] = {}
    trees: Mapping[str, Context] = {}
    if run is None or dockerfile:
        dockerfile = dockerfile or files.folder / "Dockerfile"
        recipe = _read(dockerfile)
    else:
        plan = planned_image(run, node, home)
        recipe, planned = plan.dockerfile, plan.files
        trees = planned_trees()
    source = Source(
        title=title_of(run, name, files.folder),
        texts=Texts(recipe, files.texts(), dockerfile.name if dockerfile else "Dockerfile", code=files.code()),
        context=files,
        platform=platform or node.platform,
        dockerfile=dockerfile,
        planned=planned,
        trees=trees,
        arguments=arguments or {},
        target=target,
    )
    return source, node


def planned_image(run: Run, node: Node, home: Path) -> ImagePlan:
    """The image of a run file in the folder `home`."""
    own = [run.image.requirements] if run.image.requirements else []
    return plan_image(run, node, read_requirement_files(home, own))


def planned_trees() -> dict[str, Context]:
    """The folders that a planned Dockerfile copies, by where they are in its context: windlass itself."""
    return {PACKAGE: Context(Path(windlass.__file__).parent, Ignore(("**/__pycache__", "**/*.pyc")))}


def title_of(run: Run | None, name: str | None, folder: Path) -> str:
    """The repository: of --name, else of image.name, else one of this machine with the run's name."""
    named = name or (run.image.name if run else None)
    if named:
        reference = ImageReference.parse(named)
        return reference.name if reference.registry else f"localhost/{reference.repository}"
    text = run.name if run else folder.resolve().name
    return f"localhost/{re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-') or 'image'}"


def proof_of(run: Run | None, node: Node, level: str, *, imports: tuple[str, ...] = (), smoke: str = "") -> Proof:
    """The versions that the run file asks for must be those that are loaded."""
    asked: dict[str, str | None] = {}
    if run:
        asked = {"python": run.image.python, "torch": run.image.torch, "cuda": run.image.cuda}
    return Proof(
        level=level,
        imports=imports,
        expect={name: version for name, version in asked.items() if version},
        efa=node.efa,
        smoke=smoke,
        model=small_model(known_config(run.model)) if run else None,
    )


def small_model(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """The family of a model with the sizes of a toy: what has to work is its code, not its memory."""
    return {**SMALL_MODEL, "model_type": config["model_type"]} if config and "model_type" in config else None


def _read(dockerfile: Path) -> str:
    try:
        return dockerfile.read_text()
    except FileNotFoundError:
        raise UserError(
            f"there is no {dockerfile}",
            fix="windlass image build RUN.yaml    plans one\nor name yours: --dockerfile PATH",
        ) from None
